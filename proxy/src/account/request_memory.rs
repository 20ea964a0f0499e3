//! The memory that requests hold, all of it in one account with a limit for the process and one for each key.
//!
//! Charged are a body's bytes while they arrive and are decompressed. Then what they became is charged (texts, images,
//! values, schemas, grammars), until no part of the request needs them, and a reply that is collected before it is sent.
//! Not charged are tokens and KV, which places bound.
//!
//! Memory has two parts. The first MiB of each charge comes from one, the rest of large ones from the other. So
//! requests of an ordinary size have room however many large ones there are. Nothing waits for memory: a request that holds
//! some while it waits for more would keep others waiting.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::error::RequestError;

/// Charges up to this size have memory that larger ones leave.
pub(crate) const SMALL_BODY: usize = 64 << 10;

/// Larger bodies take their further bytes from the part for large bodies. A long conversation has less.
pub(crate) const ORDINARY_BODY: usize = 1 << 20;

/// The bytes left in the first part that only small bodies may take.
const FOR_SMALL: usize = 32 << 20;

/// Bytes that requests may still take.
#[derive(Debug)]
pub struct RequestMemory {
    ordinary: AtomicUsize,
    large: AtomicUsize,
    limit: usize,
    n_refused: AtomicU64,
}

/// The message to clients whose requests find no memory.
pub(crate) const FULL: &str =
    "The requests of this server, or of this key, hold as much memory as they may. Try again shortly.";

/// There is no memory for a request now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryFull;

impl From<MemoryFull> for RequestError {
    fn from(_: MemoryFull) -> RequestError {
        RequestError::unavailable(FULL, Duration::from_secs(1))
    }
}

/// What requests hold of a memory now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryInUse {
    /// Bytes that requests hold.
    pub held: usize,
    /// The most bytes that they may hold.
    pub limit: usize,
    /// How often there was no memory for a request, in its key's share or in all, since the start.
    pub n_refused: u64,
}

impl RequestMemory {
    /// Memory of these sizes, for requests of an ordinary size and for the rest of large ones.
    pub(crate) fn new(ordinary: usize, large: usize) -> Arc<RequestMemory> {
        let (limit, n_refused) = (ordinary + large, AtomicU64::new(0));
        let (ordinary, large) = (AtomicUsize::new(ordinary), AtomicUsize::new(large));
        Arc::new(RequestMemory { ordinary, large, limit, n_refused })
    }

    /// The memory of an endpoint: for 5,000 bodies of 100 KB, or 500 agents whose tools and histories become 1 MiB, and for
    /// two bodies of the largest size.
    pub(crate) fn of_endpoint() -> Arc<RequestMemory> {
        RequestMemory::new(512 << 20, 80 << 20)
    }

    /// The share of one key: it leaves room for others.
    pub(crate) fn of_key() -> Arc<RequestMemory> {
        RequestMemory::new(384 << 20, 48 << 20)
    }

    /// Returns what requests hold now.
    pub fn in_use(&self) -> MemoryInUse {
        let left = self.ordinary.load(Ordering::Relaxed) + self.large.load(Ordering::Relaxed);
        let n_refused = self.n_refused.load(Ordering::Relaxed);
        MemoryInUse { held: self.limit.saturating_sub(left), limit: self.limit, n_refused }
    }

    /// The bytes left of the part for large charges.
    #[cfg(test)]
    pub(crate) fn large_left(&self) -> usize {
        self.large.load(Ordering::Relaxed)
    }

    /// Takes what a charge of `from` bytes needs to grow to `to` bytes.
    fn take(&self, from: usize, to: usize) -> Result<(), MemoryFull> {
        let reserved = if to > SMALL_BODY { FOR_SMALL } else { 0 };
        let (n_ordinary, n_large) = parts(from, to);
        take(&self.ordinary, n_ordinary, reserved)?;
        take(&self.large, n_large, 0).inspect_err(|_full| {
            self.ordinary.fetch_add(n_ordinary, Ordering::Relaxed);
        })
    }

    /// Undoes [`take`](Self::take).
    fn give_back(&self, from: usize, to: usize) {
        let (n_ordinary, n_large) = parts(from, to);
        self.ordinary.fetch_add(n_ordinary, Ordering::Relaxed);
        self.large.fetch_add(n_large, Ordering::Relaxed);
    }
}

/// The bytes of each part by which a charge of `from` bytes grows to `to` bytes.
fn parts(from: usize, to: usize) -> (usize, usize) {
    let (ordinary_before, ordinary) = (from.min(ORDINARY_BODY), to.min(ORDINARY_BODY));
    (ordinary - ordinary_before, (to - ordinary) - (from - ordinary_before))
}

fn take(left: &AtomicUsize, n: usize, reserved: usize) -> Result<(), MemoryFull> {
    if n == 0 {
        return Ok(());
    }
    let taken = |left: usize| left.checked_sub(n).filter(|left| *left >= reserved);
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).map(drop).map_err(|_left| MemoryFull)
}

/// Memory of one request. Dropping it gives the memory back.
#[derive(Debug)]
pub(crate) struct MemoryCharge {
    endpoint: Arc<RequestMemory>,
    /// The share of the request's key.
    key: Option<Arc<RequestMemory>>,
    n_bytes: usize,
}

impl MemoryCharge {
    /// A charge without bytes.
    pub(crate) fn new(endpoint: Arc<RequestMemory>, key: Option<Arc<RequestMemory>>) -> MemoryCharge {
        MemoryCharge { endpoint, key, n_bytes: 0 }
    }

    /// A further charge of the same key, without bytes.
    pub(crate) fn another(&self) -> MemoryCharge {
        MemoryCharge::new(Arc::clone(&self.endpoint), self.key.clone())
    }

    /// Charges `n_bytes` in all, if that is more. Errors: the endpoint's memory or the key's share is used up.
    pub(crate) fn grow_to(&mut self, n_bytes: usize) -> Result<(), MemoryFull> {
        if n_bytes <= self.n_bytes {
            return Ok(());
        }
        let taken = self.take_of_key(n_bytes);
        if taken.is_err() {
            self.endpoint.n_refused.fetch_add(1, Ordering::Relaxed);
        }
        taken.map(|()| self.n_bytes = n_bytes)
    }

    /// Takes memory of the key's share and of the endpoint, or of neither.
    fn take_of_key(&self, n_bytes: usize) -> Result<(), MemoryFull> {
        let Some(key) = &self.key else { return self.endpoint.take(self.n_bytes, n_bytes) };
        key.take(self.n_bytes, n_bytes)?;
        let taken = self.endpoint.take(self.n_bytes, n_bytes);
        taken.inspect_err(|_full| key.give_back(self.n_bytes, n_bytes))
    }

    /// Gives back what exceeds `n_bytes`.
    pub(crate) fn shrink_to(&mut self, n_bytes: usize) {
        if n_bytes < self.n_bytes {
            for memory in [Some(&self.endpoint), self.key.as_ref()].into_iter().flatten() {
                memory.give_back(n_bytes, self.n_bytes);
            }
            self.n_bytes = n_bytes;
        }
    }
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// The memory of a request, and how long its body waited for the parser. All clones are of the same request.
#[derive(Debug, Clone, Default)]
pub struct RequestHold(Arc<HeldRequest>);

#[derive(Debug, Default)]
struct HeldRequest {
    memory: Mutex<HeldMemory>,
    waited: OnceLock<Duration>,
}

#[derive(Debug, Default)]
struct HeldMemory {
    charge: Option<MemoryCharge>,
    /// Of a reply.
    collected: Option<MemoryCharge>,
    /// The sum of what all [`HeldPart`] need.
    n_needed: usize,
}

impl RequestHold {
    /// Keeps the charge of what the body became until the last [`HeldPart`] is dropped, or without any, the last clone of
    /// this. `waited` is the time from the body's arrival until it was parsed.
    pub(crate) fn keep(&self, charge: MemoryCharge, waited: Duration) {
        self.lock().charge = Some(charge);
        // A request has one body.
        let _ = self.0.waited.set(waited);
    }

    /// Keeps the memory for somebody who has a part of the request.
    pub(crate) fn part(&self) -> HeldPart {
        let mut memory = self.lock();
        let n_bytes = memory.charge.as_ref().map_or(0, |charge| charge.n_bytes);
        memory.n_needed += n_bytes;
        drop(memory);
        HeldPart { request: self.clone(), n_bytes }
    }

    /// Charges so many more bytes of a reply that is collected before it is sent, until the last clone of this is dropped.
    /// A request without a body collects nothing.
    pub(crate) fn collect(&self, n_more: usize) -> Result<(), MemoryFull> {
        let mut memory = self.lock();
        let HeldMemory { charge, collected, .. } = &mut *memory;
        let Some(charge) = charge else { return Ok(()) };
        let collected = collected.get_or_insert_with(|| charge.another());
        collected.grow_to(collected.n_bytes.saturating_add(n_more))
    }

    /// Charges so many more bytes, until the charge is dropped. A request without a body needs none.
    pub(crate) fn more(&self, n_bytes: usize) -> Result<Option<MemoryCharge>, MemoryFull> {
        let more = self.lock().charge.as_ref().map(MemoryCharge::another);
        more.map(|mut more| more.grow_to(n_bytes).map(|()| more)).transpose()
    }

    /// Returns the time from the body's arrival until it was parsed.
    pub(crate) fn waited(&self) -> Duration {
        self.0.waited.get().copied().unwrap_or_default()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HeldMemory> {
        self.0.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the memory of a request while somebody has a part of it.
#[derive(Debug)]
pub(crate) struct HeldPart {
    request: RequestHold,
    n_bytes: usize,
}

impl HeldPart {
    /// Gives back what exceeds `n_bytes`, as far as no other part of the request needs it.
    pub(crate) fn shrink_to(&mut self, n_bytes: usize) {
        let mut memory = self.request.lock();
        let n_left = n_bytes.min(self.n_bytes);
        memory.n_needed -= self.n_bytes - n_left;
        self.n_bytes = n_left;
        let n_needed = memory.n_needed;
        if let Some(charge) = &mut memory.charge {
            charge.shrink_to(n_needed);
        }
    }
}

impl Drop for HeldPart {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn charge(endpoint: &Arc<RequestMemory>, key: Option<&Arc<RequestMemory>>) -> MemoryCharge {
        MemoryCharge::new(Arc::clone(endpoint), key.cloned())
    }

    fn left(memory: &RequestMemory) -> (usize, usize) {
        (memory.ordinary.load(Ordering::Relaxed), memory.large.load(Ordering::Relaxed))
    }

    #[test]
    fn large_bodies_leave_room_for_ordinary_ones_and_these_for_small_ones() {
        let endpoint = RequestMemory::of_endpoint();
        let mut large: Vec<_> = (0..8).map(|_| charge(&endpoint, None)).collect();
        assert_eq!(large.iter_mut().filter_map(|body| body.grow_to(32 * MIB).ok()).count(), 2);
        let mut ordinary: Vec<_> = (0..600).map(|_| charge(&endpoint, None)).collect();
        let n_fit = ordinary.iter_mut().filter_map(|body| body.grow_to(MIB).ok()).count();
        assert_eq!(n_fit, 512 - 32 - 2);
        let mut small = charge(&endpoint, None);
        small.grow_to(SMALL_BODY).unwrap();
        assert_eq!(small.grow_to(SMALL_BODY + 1), Err(MemoryFull));
        drop((large, ordinary, small));
        assert_eq!(left(&endpoint), (512 * MIB, 80 * MIB));
    }

    #[test]
    fn a_key_leaves_room_for_others() {
        let endpoint = RequestMemory::of_endpoint();
        let [greedy, other] = [RequestMemory::of_key(), RequestMemory::of_key()];
        let mut stalled: Vec<_> = (0..4).map(|_| charge(&endpoint, Some(&greedy))).collect();
        assert_eq!(stalled.iter_mut().filter_map(|body| body.grow_to(32 * MIB).ok()).count(), 1);
        charge(&endpoint, Some(&other)).grow_to(32 * MIB).unwrap();
        let mut small: Vec<_> = (0..10_000).map(|_| charge(&endpoint, Some(&greedy))).collect();
        assert!(small.iter_mut().any(|body| body.grow_to(SMALL_BODY).is_err()));
        charge(&endpoint, Some(&other)).grow_to(32 * MIB).unwrap();
        drop((stalled, small));
        for memory in [&greedy, &other] {
            assert_eq!(left(memory), (384 * MIB, 48 * MIB));
        }
        assert_eq!(left(&endpoint), (512 * MIB, 80 * MIB));
    }

    #[test]
    fn two_thousand_histories_of_100_kb_fit_at_once() {
        let (endpoint, key) = (RequestMemory::of_endpoint(), RequestMemory::of_key());
        let mut bodies: Vec<_> = (0..2_000).map(|_| charge(&endpoint, Some(&key))).collect();
        for body in &mut bodies {
            body.grow_to(100_000).unwrap();
        }
    }

    #[test]
    fn a_body_takes_what_is_left_of_its_texts() {
        let endpoint = RequestMemory::of_endpoint();
        let mut body = charge(&endpoint, None);
        body.grow_to(2 * MIB).unwrap();
        body.shrink_to(MIB + 1);
        assert_eq!(left(&endpoint), (511 * MIB, 80 * MIB - 1));
        let hold = RequestHold::default();
        hold.keep(body, Duration::ZERO);
        let more = hold.more(5).unwrap();
        assert_eq!(left(&endpoint), (511 * MIB - 5, 80 * MIB - 1));
        drop(more);
        let (mut first, second) = (hold.part(), hold.part());
        first.shrink_to(10);
        assert_eq!(left(&endpoint), (511 * MIB, 80 * MIB - 1), "the second prompt waits with its text");
        drop(second);
        assert_eq!(left(&endpoint), (512 * MIB - 10, 80 * MIB));
        drop(first);
        assert_eq!(left(&endpoint), (512 * MIB, 80 * MIB), "although the caller has a clone of the hold");
        drop(hold);
    }
}
