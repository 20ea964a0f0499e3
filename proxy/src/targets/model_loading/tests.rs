//! Which model gets memory when, with models that load in a second of a paused clock.

use std::sync::atomic::AtomicU32;

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use futures::future::join_all;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::*;
use crate::error::RequestErrorKind;
use crate::targets::nodes::{Health, StateChange, StateReason};

const LOAD_TIME: Duration = Duration::from_secs(1);

/// A model of so many bytes. `fails`: it never loads.
async fn model(name: &str, bytes: u64, keep_alive: KeepAlive, fails: bool) -> Arc<LoadableModel> {
    of_process(0, name, bytes, keep_alive, fails).await
}

/// The same with the id of its process, which is measured.
async fn of_process(pid: u32, name: &str, bytes: u64, keep_alive: KeepAlive, fails: bool) -> Arc<LoadableModel> {
    let info = Arc::new(SimEngine::new(SimConfig::default()).info().await.unwrap());
    let (wanted, mut is_wanted) = watch::channel(false);
    let health = Health::supervised(name);
    health.note_unloaded();
    let kept = Arc::clone(&health);
    let stop = CancellationToken::new();
    let tracker = TaskTracker::new();
    let stopped = stop.clone();
    tracker.spawn(stopped.run_until_cancelled_owned(async move {
        while is_wanted.changed().await.is_ok() {
            if !*is_wanted.borrow_and_update() {
                kept.note_unloaded();
                continue;
            }
            kept.note_loading(StateReason::Starts);
            tokio::time::sleep(LOAD_TIME).await;
            match fails {
                true => kept.note_failure(&StateChange::new(StateReason::StartFailed, "broken"), LOAD_TIME),
                false => kept.note_answer(Arc::clone(&info)),
            }
        }
    }));
    tracker.close();
    let settings = LoadableSettings { name: name.into(), estimated_bytes: bytes, outline: None, keep_alive };
    LoadableModel::new(settings, ModelProcess { wanted, health, pid: Arc::new(AtomicU32::new(pid)), stop, tracker })
}

async fn lasting(name: &str, bytes: u64) -> Arc<LoadableModel> {
    model(name, bytes, KeepAlive::Forever, false).await
}

fn loader(budget: u64, models: &[&Arc<LoadableModel>]) -> Arc<ModelLoader> {
    let limits = LoadLimits { memory_budget: budget, max_wait: Duration::from_secs(30), max_waiting: 2, reserved: 0 };
    ModelLoader::new(limits, models.iter().map(|model| Arc::clone(model)).collect())
}

fn state(model: &LoadableModel) -> LoadState {
    model.report().state
}

async fn after(seconds: f64) {
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn all_who_wait_share_one_load_and_their_number_is_bounded() {
    let a = lasting("a", 5).await;
    let loader = loader(10, &[&a]);
    let stays = join_all((0..3).map(|_| loader.lease(&a, None))).await;
    assert_eq!(stays.iter().filter(|stay| stay.is_ok()).count(), 2, "two may wait");
    assert_eq!((a.report().n_active, a.report().history.n_loads), (2, 1));
    assert!(a.report().history.last_load >= LOAD_TIME);
    // Nobody waits for what is there.
    let more = join_all((0..3).map(|_| loader.lease(&a, None))).await;
    assert!(more.iter().all(Result::is_ok));
    drop((stays, more));
    assert_eq!((a.report().n_active, a.report().n_waiting), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_model_goes_when_its_time_is_over_and_not_while_it_is_used() {
    let a = model("a", 5, KeepAlive::For(Duration::from_secs(10)), false).await;
    let loader = loader(10, &[&a]);
    let stay = loader.lease(&a, None).await.unwrap();
    after(60.0).await;
    assert_eq!(state(&a), LoadState::Loaded);
    drop(stay);
    after(9.0).await;
    assert_eq!(state(&a), LoadState::Loaded);
    after(2.0).await;
    assert_eq!(state(&a), LoadState::Unloaded);
    // A request's own word, until the next one says otherwise.
    drop(loader.lease(&a, Some(KeepAlive::Forever)).await.unwrap());
    drop(loader.lease(&a, None).await.unwrap());
    after(600.0).await;
    assert_eq!((state(&a), a.report().expires_at), (LoadState::Loaded, None));
    loader.unload(&a);
    after(1.0).await;
    assert_eq!(state(&a), LoadState::Unloaded);
    let counts = a.report().history.unloads;
    assert_eq!((counts[&UnloadReason::Idle], counts[&UnloadReason::Asked]), (1, 1));
    // Loaded again, it is kept as configured.
    drop(loader.lease(&a, None).await.unwrap());
    after(12.0).await;
    assert_eq!(state(&a), LoadState::Unloaded);
}

#[tokio::test(start_paused = true)]
async fn a_process_that_has_ended_takes_no_memory() {
    let pid = std::process::id();
    let a = of_process(pid, "a", 5, KeepAlive::Forever, false).await;
    let loader = loader(10, &[&a]);
    drop(loader.lease(&a, None).await.unwrap());
    a.set_measured(pid, 20);
    assert_eq!(a.bytes(), 20);
    a.health.note_unloaded();
    assert_eq!(a.bytes(), 5, "although its end is not noted yet");
}

#[tokio::test(start_paused = true)]
async fn the_one_that_was_used_longest_ago_makes_room() {
    let a = lasting("a", 4).await;
    let b = lasting("b", 4).await;
    let c = lasting("c", 5).await;
    let loader = loader(10, &[&a, &b, &c]);
    for model in [&a, &b, &a] {
        drop(loader.lease(model, None).await.unwrap());
        after(1.0).await;
    }
    let stay = loader.lease(&c, None).await.unwrap();
    assert_eq!((state(&a), state(&b), state(&c)), (LoadState::Loaded, LoadState::Unloaded, LoadState::Loaded));
    assert_eq!(b.report().history.unloads[&UnloadReason::Memory], 1);
    // What is used does not go: b waits until its time is over, and a is not sent away for nothing.
    let _also = loader.lease(&a, None).await.unwrap();
    let began = Instant::now();
    let refused = loader.lease(&b, None).await.err().unwrap();
    assert!(refused.to_string().contains("busy in the memory") && began.elapsed() >= Duration::from_secs(30));
    drop(stay);
    let _b = loader.lease(&b, None).await.unwrap();
    assert_eq!(state(&c), LoadState::Unloaded);
}

#[tokio::test(start_paused = true)]
async fn a_busy_model_cannot_keep_another_out_for_ever() {
    let a = lasting("a", 6).await;
    let b = lasting("b", 6).await;
    let loader = loader(10, &[&a, &b]);
    drop(loader.lease(&a, None).await.unwrap());
    // Each request for the first model comes before the one before it ends.
    let requests = (0..12).map(|i| {
        let loader = Arc::clone(&loader);
        let a = Arc::clone(&a);
        tokio::spawn(async move {
            after(2.0 * f64::from(i)).await;
            if let Ok(stay) = loader.lease(&a, None).await {
                after(3.0).await;
                drop(stay);
            }
        })
    });
    let requests: Vec<_> = requests.collect();
    after(1.0).await;
    let began = Instant::now();
    let stay = tokio::time::timeout(Duration::from_secs(20), loader.lease(&b, None)).await;
    drop(stay.expect("its turn came").unwrap());
    assert!(began.elapsed() > YIELD_AFTER);
    join_all(requests).await;
    assert!(a.report().history.n_loads >= 2, "the first one had its turn again");
}

#[tokio::test(start_paused = true)]
async fn a_model_that_cannot_be_loaded_fails_and_takes_no_memory() {
    let broken = model("broken", 6, KeepAlive::Forever, true).await;
    let large = lasting("large", 11).await;
    let other = lasting("other", 6).await;
    let loader = loader(10, &[&broken, &large, &other]);
    for _ in 0..2 {
        let error = loader.lease(&broken, None).await.err().unwrap();
        assert_eq!(error.kind(), RequestErrorKind::Unavailable);
        assert!(error.to_string().contains("broken"), "{error}");
        assert_eq!(broken.report().last_failure.as_deref(), Some("broken"));
        after(1.0).await;
    }
    assert_eq!(state(&broken), LoadState::Failed);
    assert!(loader.lease(&large, None).await.err().unwrap().to_string().contains("does not fit"));
    assert!(loader.lease(&other, None).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_model_that_is_removed_ends_with_its_last_request() {
    let a = lasting("a", 6).await;
    let b = lasting("b", 6).await;
    let loader = loader(10, &[&a]);
    let stay = loader.lease(&a, None).await.unwrap();
    loader.replace(loader.limits(), &[Arc::clone(&b)]);
    after(5.0).await;
    assert_eq!(state(&a), LoadState::Loaded);
    assert!(!loader.lock().models.is_empty(), "its memory counts");
    let (waiting, released) = tokio::join!(loader.lease(&b, None), async {
        after(2.0).await;
        drop(stay);
    });
    assert!(waiting.is_ok());
    let () = released;
    assert!(loader.lease(&a, None).await.is_err());
    assert_eq!(a.report().history.unloads[&UnloadReason::Removed], 1);
    assert_eq!(loader.lock().models.len(), 1);
    tokio::time::timeout(LOAD_TIME, loader.stop()).await.expect("all have ended");
}
