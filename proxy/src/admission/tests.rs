use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::FutureExt;

use super::*;
use crate::account::{BRIEF_SHARE, KeyLimits};
use crate::error::RateUnit;

fn account(name: &str, limits: KeyLimits) -> Arc<Account> {
    Arc::new(Account::new(name, limits))
}

fn free(name: &str) -> Arc<Account> {
    account(name, KeyLimits::default())
}

fn priority(name: &str, priority: u8) -> Arc<Account> {
    account(name, KeyLimits { priority, ..KeyLimits::default() })
}

/// Admission to one target.
struct Door {
    admission: Admission,
    target: Arc<TargetPlaces>,
}

/// A door with so many places, and so many requests that may wait.
fn door(n_places: usize, max_waiting: usize) -> Door {
    let limits = AdmissionLimits { max_waiting, max_wait: Duration::from_secs(5), ..AdmissionLimits::default() };
    let target = TargetPlaces::new(n_places);
    let admission = Admission::new(limits);
    admission.set_targets(vec![Arc::clone(&target)]);
    Door { admission, target }
}

/// A request with its first place.
#[derive(Debug)]
struct Entered {
    _place: Place,
    permit: Permit,
}

impl Door {
    async fn enter(&self, account: &Arc<Account>) -> Result<Entered, RequestError> {
        self.enter_as(account, &RequestAdmission::default()).await
    }

    async fn enter_as(&self, account: &Arc<Account>, admission: &RequestAdmission) -> Result<Entered, RequestError> {
        admission.charge(account, 1).await?;
        let permit = self.admission.enter(account, admission);
        Ok(Entered { _place: permit.places(&Arc::default()).next(std::slice::from_ref(&self.target)).await?, permit })
    }

    /// Takes the places that are free for a request.
    fn more(&self, permit: &Permit) -> Vec<Place> {
        std::iter::from_fn(|| permit.places(&Arc::default()).try_next(&self.target)).collect()
    }

    /// Admitted requests, their places, and waiting requests.
    fn counts(&self) -> (usize, usize, usize) {
        (self.admission.n_admitted(), self.target.n_taken().min(self.target.n_places()), self.admission.n_waiting())
    }
}

#[tokio::test]
async fn a_place_is_free_again_when_it_is_dropped() {
    let door = door(1, 0);
    let anna = free("anna");
    let entered = door.enter(&anna).await.unwrap();
    assert!(matches!(door.enter(&anna).await, Err(RequestError::Overloaded { n_running: 1, n_waiting: 0, .. })));
    assert_eq!(door.counts(), (1, 1, 0));
    drop(entered);
    assert!(door.enter(&anna).await.is_ok());
    assert_eq!((door.counts(), door.target.n_taken(), door.target.n_wanted()), ((0, 0, 0), 0, 0));
}

/// Fills a door with one place, lets these wait, and says in which order they get in.
async fn order(waiting: &[&Arc<Account>]) -> String {
    let door = Arc::new(door(1, 100));
    let first = door.enter(&free("first")).await.unwrap();
    let (tell, mut entered) = tokio::sync::mpsc::unbounded_channel();
    for account in waiting {
        let (door, account, tell) = (Arc::clone(&door), Arc::clone(account), tell.clone());
        tokio::spawn(async move {
            let _entered = door.enter(&account).await.unwrap();
            tell.send(account.name.clone()).unwrap();
        });
        // Each is in the queue before the next one comes.
        tokio::task::yield_now().await;
    }
    drop((first, tell));
    let mut names = String::new();
    while let Some(name) = entered.recv().await {
        names += &name;
    }
    names
}

#[tokio::test(start_paused = true)]
async fn the_longest_waiting_goes_first_and_a_higher_priority_before_it() {
    let a = free("a");
    let b = free("b");
    assert_eq!(order(&[&a, &b, &a]).await, "aba");
    assert_eq!(order(&[&a, &b, &priority("u", 9)]).await, "uab");
}

#[tokio::test(start_paused = true)]
async fn after_24_of_priority_1_one_of_priority_9_is_next() {
    let (low, high) = (priority("l", 1), priority("h", 9));
    let waiting = [vec![&low; 24], vec![&high]].concat();
    assert_eq!(order(&waiting).await, format!("h{}", "l".repeat(24)));
}

#[tokio::test(start_paused = true)]
async fn a_key_with_many_requests_delays_another_by_one() {
    let door = door(2, 100);
    let greedy = free("greedy");
    let modest = free("modest");
    let running = [door.enter(&greedy).await.unwrap(), door.enter(&greedy).await.unwrap()];
    let mut waiting: Vec<_> = (0..10).map(|_| Box::pin(door.enter(&greedy))).collect();
    for wait in &mut waiting {
        assert!(wait.now_or_never().is_none());
    }
    let admission = RequestAdmission::default();
    let mut late = Box::pin(door.enter_as(&modest, &admission));
    assert!((&mut late).now_or_never().is_none());
    assert_eq!((admission.position(), door.counts().2, door.target.n_wanted()), (Some(11), 11, 11));
    let [one, other] = running;
    drop(one);
    let entered = late.now_or_never().unwrap().unwrap();
    assert_eq!((admission.position(), door.target.n_taken()), (None, 2));
    drop((other, entered, waiting));
    assert_eq!(door.counts(), (0, 0, 0), "a client that leaves frees its place");
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_is_shared_between_keys() {
    let door = door(1, 4);
    let greedy = free("greedy");
    let modest = free("modest");
    let _running = door.enter(&greedy).await.unwrap();
    let mut waiting: Vec<_> = (0..4).map(|_| Box::pin(door.enter(&greedy))).collect();
    for wait in &mut waiting {
        assert!(wait.now_or_never().is_none());
    }
    let full = door.enter(&greedy).await.unwrap_err().to_string();
    assert_eq!(full, "The server is full: 1 running and 4 waiting. Try again shortly.");
    let mut modest = Box::pin(door.enter(&modest));
    assert!((&mut modest).now_or_never().is_none(), "it takes the place of the last one");
    let displaced = waiting.pop().unwrap().now_or_never();
    assert!(matches!(displaced, Some(Err(RequestError::Overloaded { .. }))));
    assert_eq!(door.counts(), (1, 1, 4));
}

#[tokio::test(start_paused = true)]
async fn waiting_ends_at_the_deadline_with_the_reason() {
    let full = door(1, 4);
    let _running = full.enter(&free("a")).await.unwrap();
    assert!(matches!(full.enter(&free("b")).await, Err(RequestError::Overloaded { n_running: 1, .. })));
    let roomy = door(9, 4);
    let one = account("one", KeyLimits { max_concurrent: Some(1), ..KeyLimits::default() });
    let _running = roomy.enter(&one).await.unwrap();
    assert!(matches!(roomy.enter(&one).await, Err(RequestError::TooManyAtOnce { limit: 1, .. })));
    assert!(roomy.enter(&free("other")).await.is_ok(), "one key's limit is no other's");
}

#[tokio::test]
async fn tokens_are_charged_when_they_are_known() {
    let door = door(9, 0);
    let limits = KeyLimits { tokens_per_minute: Some(100), requests_per_minute: Some(10), ..KeyLimits::default() };
    let key = account("k", limits);
    let Entered { permit, .. } = door.enter(&key).await.unwrap();
    permit.charge_prompt(60);
    permit.meter().fetch_add(80, Ordering::Relaxed);
    assert!(door.enter(&key).await.is_ok(), "not known yet");
    drop(permit);
    let Err(RequestError::RateLimited { unit, limit, retry_after }) = door.enter(&key).await else { panic!() };
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
        drop(door.enter(&key).await.unwrap());
    }
    let refused = door.enter(&key).await;
    assert!(
        matches!(refused, Err(RequestError::RateLimited { unit: RateUnit::Requests, limit: 2, .. })),
        "{refused:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn room_that_comes_is_used_at_once() {
    let door = door(0, 9);
    let key = free("k");
    let mut waiting: Vec<_> = (0..3).map(|_| Box::pin(door.enter(&key))).collect();
    assert!(waiting.iter_mut().all(|wait| wait.now_or_never().is_none()), "no engine is ready yet");
    door.target.set(2);
    door.admission.set_targets(vec![Arc::clone(&door.target)]);
    assert_eq!((door.admission.limit(), door.counts()), (2, (2, 2, 1)));
}

#[tokio::test(start_paused = true)]
async fn what_generates_nothing_passes_the_queue_up_to_a_limit() {
    let door = door(1, 0);
    let _running = door.enter(&free("a")).await.unwrap();
    let everyone = Account::of_everyone();
    let mut many = Vec::new();
    for _ in 0..MAX_BRIEF {
        many.push(door.admission.admit_brief(&everyone).await.unwrap());
    }
    let refused = door.admission.admit_brief(&everyone).await;
    assert!(matches!(refused, Err(RequestError::Overloaded { n_running: MAX_BRIEF, .. })));
}

#[tokio::test(start_paused = true)]
async fn a_key_that_counts_long_texts_leaves_others_room_to_count() {
    let door = door(1, 0);
    let (greedy, modest) = (free("greedy"), free("modest"));
    let mut running = Vec::new();
    for _ in 0..BRIEF_SHARE {
        running.push(door.admission.admit_brief(&greedy).await.unwrap());
    }
    let mut more: Vec<_> = (0..MAX_BRIEF).map(|_| Box::pin(door.admission.admit_brief(&greedy))).collect();
    assert!(more.iter_mut().all(|wait| wait.now_or_never().is_none()), "they wait");
    assert!(door.admission.admit_brief(&modest).now_or_never().unwrap().is_ok());
    running.pop();
    assert!(more.remove(0).await.is_ok(), "in their order");
}

#[tokio::test(start_paused = true)]
async fn a_target_that_gives_no_place_back_keeps_nobody_from_another() {
    let hung = TargetPlaces::new(8);
    let others: Vec<_> = (0..3).map(|_| TargetPlaces::new(2)).collect();
    let Door { admission, .. } = door(0, 100);
    let (greedy, modest) = (free("greedy"), free("modest"));
    let permits: Vec<_> =
        (0..40).map(|_| admission.enter(&greedy, &RequestAdmission::default()).places(&Arc::default())).collect();
    let mut waiting: Vec<_> = permits.iter().map(|places| Box::pin(places.next(std::slice::from_ref(&hung)))).collect();
    let held: Vec<_> = waiting.iter_mut().filter_map(|wait| wait.now_or_never()).collect();
    assert_eq!((held.len(), admission.n_waiting()), (8, 32));
    for other in &others {
        for key in [&greedy, &modest] {
            let places = admission.enter(key, &RequestAdmission::default()).places(&Arc::default());
            assert!(places.next(std::slice::from_ref(other)).now_or_never().unwrap().is_ok());
        }
    }
    // One that can go to either of two goes to the one that has room.
    let both = [Arc::clone(&hung), Arc::clone(&others[0])];
    let place =
        admission.enter(&modest, &RequestAdmission::default()).places(&Arc::default()).next(&both).await.unwrap();
    assert!(place.is_at(&others[0]));
}

#[tokio::test(start_paused = true)]
async fn one_that_can_go_anywhere_gets_the_place_that_is_free_first() {
    let targets = [TargetPlaces::new(1), TargetPlaces::new(1)];
    let Door { admission, .. } = door(0, 100);
    let places = || admission.enter(&free("k"), &RequestAdmission::default()).places(&Arc::default());
    let first = places().next(&targets).await.unwrap();
    let second = places().next(&targets).await.unwrap();
    assert!(first.is_at(&targets[0]) && second.is_at(&targets[1]), "equally loaded ones take turns");
    let third = places();
    let mut third = Box::pin(third.next(&targets));
    assert!((&mut third).now_or_never().is_none());
    drop(second);
    assert!(third.now_or_never().unwrap().unwrap().is_at(&targets[1]));
}

#[tokio::test(start_paused = true)]
async fn a_limit_of_all_places_leaves_each_target_one() {
    let targets: Vec<_> = (0..3).map(|_| TargetPlaces::new(8)).collect();
    let Door { admission, .. } = door(0, 100);
    admission.set_limits(AdmissionLimits { max_requests: Some(5), ..AdmissionLimits::default() });
    admission.set_targets(targets.clone());
    assert_eq!(admission.limit(), 5);
    let take = |target: &Arc<TargetPlaces>| {
        let places = admission.enter(&free("k"), &RequestAdmission::default()).places(&Arc::default());
        places.next(std::slice::from_ref(target)).now_or_never().map(Result::unwrap)
    };
    let greedy: Vec<_> = std::iter::from_fn(|| take(&targets[0])).collect();
    assert_eq!(greedy.len(), 3, "one is left for each of the others");
    let others = [take(&targets[1]).unwrap(), take(&targets[2]).unwrap()];
    assert!(take(&targets[1]).is_none());
    drop((greedy, others));
    // With fewer places than targets, whoever comes first has them.
    admission.set_limits(AdmissionLimits { max_requests: Some(1), ..AdmissionLimits::default() });
    let only = take(&targets[2]).unwrap();
    assert!(take(&targets[0]).is_none());
    drop(only);
    // A key's limit holds over all targets.
    admission.set_limits(AdmissionLimits::default());
    let two = account("two", KeyLimits { max_concurrent: Some(2), ..KeyLimits::default() });
    let places: Vec<_> =
        (0..3).map(|_| admission.enter(&two, &RequestAdmission::default()).places(&Arc::default())).collect();
    let got: Vec<_> = targets
        .iter()
        .zip(&places)
        .filter_map(|(target, places)| places.next(std::slice::from_ref(target)).now_or_never())
        .collect();
    assert_eq!(got.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_request_with_many_choices_leaves_places_to_others_and_uses_them_while_nobody_waits() {
    let door = door(4, 100);
    let first = door.enter(&free("greedy")).await.unwrap();
    let mut sequences = door.more(&first.permit);
    assert_eq!((sequences.len(), door.counts()), (3, (1, 4, 0)));
    let places = first.permit.places(&Arc::default());
    // The twelve choices that are left wait beside it.
    let mut later: Vec<_> = (0..12).map(|_| Box::pin(places.next(std::slice::from_ref(&door.target)))).collect();
    assert!(later.iter_mut().all(|wait| wait.now_or_never().is_none()));
    assert_eq!(door.counts(), (1, 4, 0), "a request that runs does not wait");
    // Another key's request gets the next place, before the twelve.
    let keys = [free("late"), free("later")];
    let mut other = Box::pin(door.enter(&keys[0]));
    let mut last = Box::pin(door.enter(&keys[1]));
    assert!((&mut other).now_or_never().is_none() && (&mut last).now_or_never().is_none());
    sequences.pop();
    let other = other.now_or_never().unwrap().unwrap();
    sequences.pop();
    let last = last.now_or_never().unwrap().unwrap();
    assert!(later.iter_mut().all(|wait| wait.now_or_never().is_none()));
    // A place that becomes free while nobody waits goes to the next choice.
    drop((other, last));
    let next: Vec<_> = later.iter_mut().filter_map(|wait| wait.now_or_never()).collect();
    assert_eq!((next.len(), door.counts()), (2, (1, 4, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_request_keeps_its_last_place_until_all_its_choices_have_run() {
    let door = door(2, 100);
    let permit = door.admission.enter(&free("greedy"), &RequestAdmission::default());
    let places = permit.places(&Arc::default());
    let target = std::slice::from_ref(&door.target);
    let mut choices: Vec<_> = (0..5).map(|_| Box::pin(places.next(target))).collect();
    let mut running: Vec<Place> =
        choices.iter_mut().filter_map(|wait| wait.now_or_never()).map(Result::unwrap).collect();
    choices.drain(..2);
    let urgent = priority("urgent", 9);
    let mut waiting: Vec<_> = (0..9).map(|_| Box::pin(door.enter(&urgent))).collect();
    assert!(waiting.iter_mut().all(|wait| wait.now_or_never().is_none()));
    running.pop();
    let first = waiting.remove(0).now_or_never().unwrap().unwrap();
    for n_left in (0..3).rev() {
        running.pop();
        running.push(choices.remove(0).now_or_never().unwrap().unwrap());
        assert_eq!((choices.len(), door.counts().1), (n_left, 2));
        assert!(waiting.iter_mut().all(|wait| wait.now_or_never().is_none()));
    }
    drop(running);
    let second = waiting.remove(0).now_or_never().unwrap().unwrap();
    drop((first, second, waiting, choices));
    drop((places, permit));
    assert_eq!(door.counts(), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_goes_elsewhere_holds_no_place_while_it_waits() {
    let targets = [TargetPlaces::new(1), TargetPlaces::new(1)];
    let Door { admission, .. } = door(0, 1);
    let places = |name: &str| admission.enter(&free(name), &RequestAdmission::default()).places(&Arc::default());
    let _running = places("b").next(&targets[1..]).await.unwrap();
    let moving = places("a");
    let mut place = moving.next(&targets[..1]).await.unwrap();
    // What gave it up waits like everyone: it counts, and the queue is bounded.
    drop(place);
    let mut elsewhere = Box::pin(moving.next(&targets[1..]));
    assert!((&mut elsewhere).now_or_never().is_none());
    assert_eq!((admission.n_waiting(), admission.n_admitted(), targets[0].n_taken()), (1, 1, 0));
    place = places("c").next(&targets[..1]).now_or_never().unwrap().unwrap();
    let full = places("a").next(&targets[..1]).now_or_never();
    assert!(matches!(full, Some(Err(RequestError::Overloaded { n_running: 2, n_waiting: 1, .. }))), "{full:?}");
    drop((place, elsewhere));
}

#[tokio::test(start_paused = true)]
async fn the_choices_of_a_request_stay_within_the_limits_of_its_key() {
    let door = door(8, 100);
    let limits = KeyLimits { max_concurrent: Some(2), requests_per_minute: Some(10), ..KeyLimits::default() };
    let key = account("k", limits);
    let admission = RequestAdmission::default();
    admission.charge(&key, 16).await.unwrap();
    let refused = admission.charge(&key, 1).await;
    assert!(
        matches!(refused, Err(RequestError::RateLimited { unit: RateUnit::Requests, limit: 10, .. })),
        "each choice counts, and what exceeds the rate is a debt: {refused:?}"
    );
    let permit = door.admission.enter(&key, &admission);
    let mut sequences = door.more(&permit);
    for _ in 2..16 {
        assert_eq!((sequences.len(), door.counts().1), (2, 2));
        sequences.remove(0);
        sequences.extend(door.more(&permit));
    }
}

#[tokio::test(start_paused = true)]
async fn prompts_that_share_an_admission_are_charged_and_admitted_once() {
    let door = door(2, 0);
    let key = account("k", KeyLimits { requests_per_minute: Some(4), ..KeyLimits::default() });
    let admission = RequestAdmission::of_prompts(3);
    let mut permits = Vec::new();
    for _ in 0..3 {
        admission.charge(&key, 1).await.unwrap();
        permits.push(door.admission.enter(&key, &admission));
    }
    assert_eq!(key.quotas().next().unwrap().1.remaining, 1);
    let mut sequences: Vec<_> = permits.iter().flat_map(|permit| door.more(permit)).collect();
    assert_eq!((sequences.len(), door.counts()), (2, (1, 2, 0)));
    sequences.pop();
    assert_eq!(door.more(&permits[2]).len(), 1);
    drop((sequences, permits));
    assert_eq!(door.counts().0, 1, "until its last part is gone");
    drop(admission);
    assert_eq!(door.counts(), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_with_an_old_limit_keeps_nobody_behind_it() {
    let door = door(9, 9);
    let limited = |n| account("k", KeyLimits { max_concurrent: Some(n), ..KeyLimits::default() });
    let _running = door.enter(&limited(1)).await.unwrap();
    let old = limited(1);
    let mut first = Box::pin(door.enter(&old));
    assert!((&mut first).now_or_never().is_none());
    // The configuration was loaded again.
    let new = limited(2);
    assert!(door.enter(&new).now_or_never().unwrap().is_ok());
    assert!((&mut first).now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn places_are_exact_whatever_leaves_when() {
    let door = Arc::new(door(3, 50));
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let tasks: Vec<_> = (0..60_u64)
        .map(|i| {
            let (door, seen) = (Arc::clone(&door), Arc::clone(&seen));
            tokio::spawn(async move {
                let key = priority(&format!("k{}", i % 5), (i % 3) as u8);
                let entered = tokio::time::timeout(Duration::from_millis(i % 7 * 10), door.enter(&key)).await;
                seen.lock().unwrap().insert(door.target.n_taken());
                if let Ok(Ok(_entered)) = entered {
                    tokio::time::sleep(Duration::from_millis(i % 11)).await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(seen.lock().unwrap().last(), Some(&3));
    assert_eq!((door.counts(), door.target.n_taken(), door.target.n_wanted()), ((0, 0, 0), 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_place_begins_without_a_slot_and_a_request_is_served_while_an_engine_works_for_one_of_its_sequences() {
    let door = door(2, 0);
    let permit = door.admission.enter(&free("k"), &RequestAdmission::default());
    let work = Arc::<EngineWork>::default();
    let places = permit.places(&work);
    let mut first = places.try_next(&door.target).unwrap();
    let mut second = places.try_next(&door.target).unwrap();
    let counts = || (door.admission.n_places(), matches!(work.phase(), WorkPhase::WorksSince(_)));
    assert_eq!((counts(), door.target.n_taken()), ((0, false), 2), "the prompt is being prepared");
    first.note(SlotUse::PromptWaits);
    assert_eq!(counts(), (1, false), "a slot whose prompt waits at another node");
    first.note(SlotUse::Working);
    second.note(SlotUse::Working);
    assert_eq!(counts(), (2, true));
    drop(first);
    assert_eq!(counts(), (1, true));
    second.note(SlotUse::NoSlot);
    assert_eq!(counts(), (0, false), "its engine was lost");
    drop(second);
    assert_eq!((counts(), door.target.n_taken()), ((0, false), 0));
}
