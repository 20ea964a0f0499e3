use std::sync::atomic::Ordering;
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
    enter_as(door, account, PlaceNeed::ONE).await
}

async fn enter_as(door: &Admission, account: &Arc<Account>, need: PlaceNeed) -> Result<Permit, RequestError> {
    let place = RequestAdmission::default();
    place.charge(account, need.n_sequences).await?;
    door.admit(account, &place, need).await
}

#[tokio::test]
async fn a_place_is_free_again_when_its_permit_is_dropped() {
    let door = door(1, 0);
    let anna = free("anna");
    let permit = enter(&door, &anna).await.unwrap();
    assert!(matches!(enter(&door, &anna).await, Err(RequestError::Overloaded { n_running: 1, n_waiting: 0, .. })));
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
    let place = RequestAdmission::default();
    let mut waiting: Vec<_> = (0..10).map(|_| Box::pin(enter(&door, &greedy))).collect();
    for wait in &mut waiting {
        assert!(wait.now_or_never().is_none());
    }
    let mut late = Box::pin(door.admit(&modest, &place, PlaceNeed::ONE));
    assert!((&mut late).now_or_never().is_none());
    assert_eq!((place.position(), door.n_waiting()), (Some(11), 11));
    let [one, other] = running;
    drop(one);
    let permit = late.await.unwrap();
    assert_eq!((place.position(), permit.key()), (None, "modest"));
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
    let full = enter(&door, &greedy).await.unwrap_err().to_string();
    assert_eq!(full, "The server is full: 1 running and 4 waiting. Try again shortly.");
    let mut modest = Box::pin(enter(&door, &modest));
    assert!((&mut modest).now_or_never().is_none(), "it takes the place of the last one");
    let displaced = waiting.pop().unwrap().now_or_never();
    assert!(matches!(displaced, Some(Err(RequestError::Overloaded { .. }))));
}

#[tokio::test(start_paused = true)]
async fn waiting_ends_at_the_deadline_with_the_reason() {
    let admission = door(1, 4);
    let _running = enter(&admission, &free("a")).await.unwrap();
    assert!(matches!(enter(&admission, &free("b")).await, Err(RequestError::Overloaded { n_running: 1, .. })));
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
    assert_eq!(door.limit(), WITHOUT_SLOTS * PLACES_PER_SLOT);
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
        for _ in 0..n_slots * PLACES_PER_SLOT {
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
async fn what_generates_nothing_passes_the_queue_up_to_a_limit() {
    let door = door(1, 0);
    let _running = enter(&door, &free("a")).await.unwrap();
    let many: Vec<_> = (0..MAX_BRIEF).map(|_| door.admit_brief().unwrap()).collect();
    assert!(matches!(door.admit_brief(), Err(RequestError::Overloaded { n_running: MAX_BRIEF, .. })));
    drop(many);
}

/// Starts sequences as their places come, and returns them.
fn running(permit: &Permit) -> Vec<Place> {
    std::iter::from_fn(|| permit.places().try_next()).collect()
}

fn each(n: usize, at_once: usize) -> PlaceNeed {
    PlaceNeed { n_sequences: n, at_once }
}

#[tokio::test(start_paused = true)]
async fn a_request_with_many_choices_leaves_places_to_others_and_uses_them_while_nobody_waits() {
    let door = door(8, 100);
    let greedy = free("greedy");
    let permit = enter_as(&door, &greedy, each(16, 4)).await.unwrap();
    let mut sequences = running(&permit);
    assert_eq!((sequences.len(), door.n_places(), door.n_admitted()), (4, 4, 1), "as many as the engine runs at once");
    let modest = free("modest");
    let others: Vec<_> = (0..4).map(|_| enter(&door, &modest).now_or_never().unwrap().unwrap()).collect();
    // With everything taken, a second request of a third key gets the next place, before the ten other choices.
    let third = free("late");
    let mut late = Box::pin(enter(&door, &third));
    assert!((&mut late).now_or_never().is_none());
    sequences.pop();
    let late = late.now_or_never().unwrap().unwrap();
    assert!(running(&permit).is_empty());
    // What becomes free while nobody waits goes to the next choices, up to four at once.
    drop((late, others));
    let next = running(&permit);
    assert_eq!((next.len(), door.n_places()), (1, 4));
    sequences.extend(next);
    for _ in 5..16 {
        sequences.remove(0);
        sequences.extend(running(&permit));
        assert_eq!(sequences.len(), 4);
    }
    for n_left in (0..4).rev() {
        sequences.remove(0);
        assert_eq!((running(&permit).len(), door.n_places()), (0, n_left), "all choices have started");
    }
    drop(permit);
    assert_eq!((door.n_admitted(), door.n_places()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_keeps_its_last_place_until_all_its_choices_have_run() {
    let door = door(2, 100);
    let permit = enter_as(&door, &free("greedy"), each(5, 2)).await.unwrap();
    let mut sequences = running(&permit);
    let urgent = account("urgent", KeyLimits { priority: 9, ..KeyLimits::default() });
    let mut waiting: Vec<_> = (0..9).map(|_| Box::pin(enter(&door, &urgent))).collect();
    assert!(waiting.iter_mut().all(|wait| wait.now_or_never().is_none()));
    sequences.pop();
    let first = waiting.remove(0).now_or_never().unwrap().unwrap();
    let mut n_run = 2;
    while n_run < 5 {
        sequences.pop();
        sequences.extend(running(&permit));
        assert_eq!((sequences.len(), door.n_places()), (1, 2), "after {n_run}");
        n_run += 1;
    }
    drop(sequences);
    let second = waiting.remove(0).now_or_never().unwrap().unwrap();
    drop((first, second, waiting, permit));
    assert_eq!((door.n_admitted(), door.n_places(), door.n_waiting()), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn the_choices_of_a_request_stay_within_the_limits_of_its_key() {
    let door = door(8, 100);
    let limits = KeyLimits { max_concurrent: Some(2), requests_per_minute: Some(10), ..KeyLimits::default() };
    let key = account("k", limits);
    let place = RequestAdmission::default();
    place.charge(&key, 16).await.unwrap();
    let refused = place.charge(&key, 1).await;
    assert!(
        matches!(refused, Err(RequestError::RateLimited { unit: RateUnit::Requests, limit: 10, .. })),
        "each choice counts, and what exceeds the rate is a debt: {refused:?}"
    );
    let permit = door.admit(&key, &place, each(16, 4)).await.unwrap();
    let mut sequences = running(&permit);
    for _ in 2..16 {
        assert_eq!((sequences.len(), door.n_places()), (2, 2));
        sequences.remove(0);
        sequences.extend(running(&permit));
    }
}

#[tokio::test(start_paused = true)]
async fn prompts_that_share_a_place_are_charged_and_admitted_once() {
    let door = door(2, 0);
    let key = account("k", KeyLimits { requests_per_minute: Some(4), ..KeyLimits::default() });
    let place = RequestAdmission::of_prompts(3);
    let mut permits = Vec::new();
    for _ in 0..3 {
        place.charge(&key, 1).await.unwrap();
        permits.push(door.admit(&key, &place, each(1, 4)).await.unwrap());
    }
    assert_eq!(key.quotas().next().unwrap().1.remaining, 1);
    assert_eq!((door.n_admitted(), door.n_places()), (1, 2));
    let mut sequences: Vec<_> = permits.iter().flat_map(running).collect();
    assert_eq!(sequences.len(), 2);
    sequences.pop();
    assert_eq!(running(&permits[2]).len(), 1);
    drop((sequences, permits));
    assert_eq!(door.n_admitted(), 1, "until its last part is gone");
    drop(place);
    assert_eq!((door.n_admitted(), door.n_places()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn those_behind_a_request_with_an_old_limit_enter_when_it_leaves() {
    let door = door(9, 9);
    let limited = |n| account("k", KeyLimits { max_concurrent: Some(n), ..KeyLimits::default() });
    let _running = enter(&door, &limited(1)).await.unwrap();
    let old = limited(1);
    let mut first = Box::pin(enter(&door, &old));
    assert!((&mut first).now_or_never().is_none());
    // The configuration was loaded again.
    let new = limited(2);
    let mut second = Box::pin(enter(&door, &new));
    assert!((&mut second).now_or_never().is_none());
    drop(first);
    assert!(second.now_or_never().is_some_and(|entered| entered.is_ok()));
}
