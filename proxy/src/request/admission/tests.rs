use std::time::Duration;

use futures::FutureExt;

use super::limits::WITHOUT_SLOTS;
use super::*;
use crate::account::KeyLimits;
use crate::error::RateUnit;

fn account(name: &str, limits: KeyLimits) -> Arc<Account> {
    Arc::new(Account::new(name, limits))
}

fn free(name: &str) -> Arc<Account> {
    account(name, KeyLimits::default())
}

fn door(max_requests: usize, max_waiting: usize) -> Admission {
    Admission::new(AdmissionLimits { max_requests: Some(max_requests), max_waiting, max_wait: Duration::from_secs(5) })
}

async fn enter(door: &Admission, account: &Arc<Account>) -> Result<Permit, RequestError> {
    door.admit(account, &QueuePlace::default()).await
}

#[tokio::test]
async fn a_place_is_free_again_when_its_permit_is_dropped() {
    let door = door(1, 0);
    let anna = free("anna");
    let permit = enter(&door, &anna).await.unwrap();
    assert!(matches!(enter(&door, &anna).await, Err(RequestError::Overloaded { limit: 1, .. })));
    assert_eq!(door.n_admitted(), 1);
    drop(permit);
    assert!(enter(&door, &anna).await.is_ok());
    assert_eq!(door.n_admitted(), 0);
}

/// Fills a admission with one place, lets these wait, and says in which order they get in.
async fn order(waiting: &[&Arc<Account>]) -> String {
    let door = door(1, 100);
    let first = enter(&door, &free("first")).await.unwrap();
    let (tell, mut entered) = tokio::sync::mpsc::unbounded_channel();
    let mut tasks = Vec::new();
    let door = Arc::new(door);
    for account in waiting {
        let door = Arc::clone(&door);
        let account = Arc::clone(account);
        let tell = tell.clone();
        tasks.push(tokio::spawn(async move {
            let permit = enter(&door, &account).await.unwrap();
            tell.send(account.name.clone()).unwrap();
            permit
        }));
        // Each is in the queue before the next one comes.
        tokio::task::yield_now().await;
    }
    drop((first, tell));
    let mut names = String::new();
    while let Some(name) = entered.recv().await {
        names += &name;
        let done = tasks.iter().position(|task| task.is_finished());
        if let Some(done) = done {
            drop(tasks.swap_remove(done).await);
        }
        tokio::task::yield_now().await;
    }
    names
}

#[tokio::test(start_paused = true)]
async fn the_longest_waiting_goes_first_and_a_higher_priority_before_it() {
    let a = free("a");
    let b = free("b");
    assert_eq!(order(&[&a, &b, &a]).await, "aba");
    let urgent = account("u", KeyLimits { priority: 9, ..KeyLimits::default() });
    assert_eq!(order(&[&a, &b, &urgent]).await, "uab");
}

#[tokio::test(start_paused = true)]
async fn a_key_with_many_requests_delays_another_by_one() {
    let door = door(2, 100);
    let greedy = free("greedy");
    let modest = free("modest");
    let running = [enter(&door, &greedy).await.unwrap(), enter(&door, &greedy).await.unwrap()];
    let place = QueuePlace::default();
    let mut waiting: Vec<_> = (0..10).map(|_| Box::pin(enter(&door, &greedy))).collect();
    for wait in &mut waiting {
        assert!(wait.now_or_never().is_none());
    }
    let mut late = Box::pin(door.admit(&modest, &place));
    assert!((&mut late).now_or_never().is_none());
    assert_eq!((place.get(), door.n_waiting()), (Some(11), 11));
    let [one, other] = running;
    drop(one);
    let permit = late.await.unwrap();
    assert_eq!((place.get(), permit.account.name.as_str()), (None, "modest"));
    drop((other, permit, waiting));
    assert_eq!((door.n_admitted(), door.n_waiting()), (0, 0), "a client that leaves frees its place");
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_is_shared_between_keys() {
    let door = door(1, 4);
    let greedy = free("greedy");
    let modest = free("modest");
    let _running = enter(&door, &greedy).await.unwrap();
    let mut waiting: Vec<_> = (0..4).map(|_| Box::pin(enter(&door, &greedy))).collect();
    for wait in &mut waiting {
        assert!(wait.now_or_never().is_none());
    }
    assert!(matches!(enter(&door, &greedy).await, Err(RequestError::Overloaded { .. })));
    let mut modest = Box::pin(enter(&door, &modest));
    assert!((&mut modest).now_or_never().is_none(), "it takes the place of the last one");
    let displaced = waiting.pop().unwrap().now_or_never();
    assert!(matches!(displaced, Some(Err(RequestError::Overloaded { .. }))));
}

#[tokio::test(start_paused = true)]
async fn waiting_ends_at_the_deadline_with_the_reason() {
    let admission = door(1, 4);
    let _running = enter(&admission, &free("a")).await.unwrap();
    assert!(matches!(enter(&admission, &free("b")).await, Err(RequestError::Overloaded { limit: 1, .. })));
    let admission = door(9, 4);
    let one = account("one", KeyLimits { max_concurrent: Some(1), ..KeyLimits::default() });
    let _running = enter(&admission, &one).await.unwrap();
    assert!(matches!(enter(&admission, &one).await, Err(RequestError::TooManyAtOnce { limit: 1, .. })));
    assert!(enter(&admission, &free("other")).await.is_ok(), "one key's limit is no other's");
}

#[tokio::test]
async fn tokens_are_charged_when_they_are_known() {
    let door = door(9, 0);
    let limits = KeyLimits { tokens_per_minute: Some(100), requests_per_minute: Some(10), ..KeyLimits::default() };
    let key = account("k", limits);
    let permit = enter(&door, &key).await.unwrap();
    permit.charge_prompt(60);
    permit.meter().fetch_add(80, Ordering::Relaxed);
    assert!(enter(&door, &key).await.is_ok(), "not known yet");
    drop(permit);
    let Err(RequestError::RateLimited { unit, limit, retry_after }) = enter(&door, &key).await else { panic!() };
    assert_eq!((unit, limit), (RateUnit::Tokens, 100));
    assert!(retry_after > Duration::from_secs(15) && retry_after <= Duration::from_secs(24), "{retry_after:?}");
    let left: Vec<_> = key.quotas().map(|(unit, quota)| (unit, quota.remaining)).collect();
    assert_eq!(left, [(RateUnit::Requests, 8), (RateUnit::Tokens, 0)]);
}

#[tokio::test]
async fn requests_are_limited_by_the_minute() {
    let door = door(9, 9);
    let key = account("k", KeyLimits { requests_per_minute: Some(2), ..KeyLimits::default() });
    for _ in 0..2 {
        drop(enter(&door, &key).await.unwrap());
    }
    let refused = enter(&door, &key).await;
    assert!(
        matches!(refused, Err(RequestError::RateLimited { unit: RateUnit::Requests, limit: 2, .. })),
        "{refused:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn as_many_are_let_in_as_the_engines_have_room_for() {
    let door = Admission::new(AdmissionLimits { max_waiting: 9, ..AdmissionLimits::default() });
    assert_eq!(door.limit(), WITHOUT_SLOTS, "no engine is ready yet");
    let key = free("k");
    let mut inside = Vec::new();
    for _ in 0..WITHOUT_SLOTS {
        inside.push(enter(&door, &key).await.unwrap());
    }
    let mut next = Box::pin(enter(&door, &key));
    assert!((&mut next).now_or_never().is_none());
    door.set_slots(WITHOUT_SLOTS);
    assert_eq!(door.limit(), WITHOUT_SLOTS * REQUESTS_PER_SLOT);
    assert!(next.await.is_ok(), "room that comes is used at once");
}

#[tokio::test(start_paused = true)]
async fn with_few_slots_a_high_priority_overtakes_all_who_wait() {
    for n_slots in [1, 4] {
        let door = Admission::new(AdmissionLimits::default());
        door.set_slots(n_slots);
        let low = free("low");
        let modest = free("modest");
        let high = account("high", KeyLimits { priority: 9, ..KeyLimits::default() });
        let mut running = Vec::new();
        for _ in 0..n_slots * REQUESTS_PER_SLOT {
            running.push(enter(&door, &low).await.unwrap());
        }
        let mut waiting: Vec<_> = (0..16).map(|_| Box::pin(enter(&door, &low))).collect();
        for wait in &mut waiting {
            assert!(wait.now_or_never().is_none(), "{n_slots} slots");
        }
        let mut modest = Box::pin(enter(&door, &modest));
        assert!((&mut modest).now_or_never().is_none());
        let mut high = Box::pin(enter(&door, &high));
        assert!((&mut high).now_or_never().is_none());
        running.pop();
        let _high = high.now_or_never().expect("the next place is the high priority's").unwrap();
        assert!((&mut modest).now_or_never().is_none());
        running.pop();
        // With one slot nobody's requests are running, and the first in the queue is next.
        let modest = modest.now_or_never();
        assert_eq!(modest.is_some(), n_slots > 1, "then the key's that has the fewest running");
        let waiting = &mut waiting[usize::from(n_slots == 1)..];
        assert!(waiting.iter_mut().all(|wait| wait.now_or_never().is_none()));
    }
}

#[tokio::test]
async fn what_generates_nothing_passes_the_queue_and_counts_for_its_key() {
    let door = door(1, 0);
    let _running = enter(&door, &free("a")).await.unwrap();
    let key = account("k", KeyLimits { requests_per_minute: Some(1), ..KeyLimits::default() });
    let _brief = door.admit_brief(&key).unwrap();
    assert!(matches!(door.admit_brief(&key), Err(RequestError::RateLimited { .. })));
    let many: Vec<_> = (1..MAX_BRIEF).map(|_| door.admit_brief(&free("b")).unwrap()).collect();
    assert!(matches!(door.admit_brief(&free("b")), Err(RequestError::Overloaded { limit: MAX_BRIEF, .. })));
    drop(many);
}
