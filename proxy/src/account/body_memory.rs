//! The memory that request bodies take: while they arrive, while they are decompressed and parsed, and until their
//! requests no longer need their texts.
//!
//! Memory has two parts. The first MiB of each body comes from one, the rest of large bodies from the other, so that
//! bodies of an ordinary size have room however many large ones there are. Nothing waits for memory: a body that holds
//! some while it waits for more would keep others waiting.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Bodies up to this size take memory only while they arrive.
pub(crate) const SMALL_BODY: usize = 64 << 10;

/// Larger bodies take their further bytes from the part for large bodies. A long conversation has less.
pub(crate) const ORDINARY_BODY: usize = 1 << 20;

/// The bytes left in the first part that only small bodies may take.
const FOR_SMALL: usize = 32 << 20;

/// Bytes that bodies may still take.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    ordinary: AtomicUsize,
    large: AtomicUsize,
}

/// There is no memory for a body now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BodyMemoryFull;

impl BodyMemory {
    fn new(ordinary: usize, large: usize) -> Arc<BodyMemory> {
        Arc::new(BodyMemory { ordinary: AtomicUsize::new(ordinary), large: AtomicUsize::new(large) })
    }

    /// The memory of an endpoint: for 3,000 bodies of 100 KB or 320 of 1 MiB, and for four of the largest size.
    pub(crate) fn of_endpoint() -> Arc<BodyMemory> {
        BodyMemory::new(320 << 20, 128 << 20)
    }

    /// The share of one key: it leaves room for others.
    pub(crate) fn of_key() -> Arc<BodyMemory> {
        BodyMemory::new(256 << 20, 96 << 20)
    }

    /// The bytes left for large bodies.
    #[cfg(test)]
    pub(crate) fn large_left(&self) -> usize {
        self.large.load(Ordering::Relaxed)
    }

    /// Takes what a body of `from` bytes needs to grow to `to` bytes.
    fn take(&self, from: usize, to: usize) -> Result<(), BodyMemoryFull> {
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

/// The bytes of each part by which a body of `from` bytes grows to `to` bytes.
fn parts(from: usize, to: usize) -> (usize, usize) {
    let (ordinary_before, ordinary) = (from.min(ORDINARY_BODY), to.min(ORDINARY_BODY));
    (ordinary - ordinary_before, (to - ordinary) - (from - ordinary_before))
}

fn take(left: &AtomicUsize, n: usize, reserved: usize) -> Result<(), BodyMemoryFull> {
    if n == 0 {
        return Ok(());
    }
    let taken = |left: usize| left.checked_sub(n).filter(|left| *left >= reserved);
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).map(drop).map_err(|_left| BodyMemoryFull)
}

/// The memory of one body. Dropping it gives the memory back.
#[derive(Debug)]
pub(crate) struct BodyCharge {
    endpoint: Arc<BodyMemory>,
    /// The share of the body's key.
    key: Option<Arc<BodyMemory>>,
    n_bytes: usize,
}

impl BodyCharge {
    /// The charge of a body that has no bytes yet.
    pub(crate) fn new(endpoint: Arc<BodyMemory>, key: Option<Arc<BodyMemory>>) -> BodyCharge {
        BodyCharge { endpoint, key, n_bytes: 0 }
    }

    /// The charge of a further copy, which has no bytes yet.
    pub(crate) fn of_copy(&self) -> BodyCharge {
        BodyCharge::new(Arc::clone(&self.endpoint), self.key.clone())
    }

    /// Charges the body up to `n_bytes`. Errors: the endpoint's memory or the key's share is used up.
    pub(crate) fn grow_to(&mut self, n_bytes: usize) -> Result<(), BodyMemoryFull> {
        if n_bytes <= self.n_bytes {
            return Ok(());
        }
        if let Some(key) = &self.key {
            key.take(self.n_bytes, n_bytes)?;
        }
        if let Err(full) = self.endpoint.take(self.n_bytes, n_bytes) {
            if let Some(key) = &self.key {
                key.give_back(self.n_bytes, n_bytes);
            }
            return Err(full);
        }
        self.n_bytes = n_bytes;
        Ok(())
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

impl Drop for BodyCharge {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// The memory of a request's body, and how long the body waited for its parser. All clones are of the same request.
#[derive(Debug, Clone, Default)]
pub struct BodyHold(Arc<HeldBody>);

#[derive(Debug, Default)]
struct HeldBody {
    memory: Mutex<HeldMemory>,
    waited: OnceLock<Duration>,
}

#[derive(Debug, Default)]
struct HeldMemory {
    charge: Option<BodyCharge>,
    /// The sum of what all [`BodyTexts`] need.
    n_needed: usize,
}

impl BodyHold {
    /// Keeps a body's charge until the last [`BodyTexts`] is dropped, or without any, the last clone of this. `waited`
    /// is the time from the body's arrival until it was parsed.
    pub(crate) fn keep(&self, charge: BodyCharge, waited: Duration) {
        self.lock().charge = Some(charge);
        // A request has one body.
        let _ = self.0.waited.set(waited);
    }

    /// Keeps the memory for somebody who has texts of the body.
    pub(crate) fn texts(&self) -> BodyTexts {
        let mut memory = self.lock();
        let n_bytes = memory.charge.as_ref().map_or(0, |charge| charge.n_bytes);
        memory.n_needed += n_bytes;
        drop(memory);
        BodyTexts { body: self.clone(), n_bytes }
    }

    /// Returns the time from the body's arrival until it was parsed.
    pub(crate) fn waited(&self) -> Duration {
        self.0.waited.get().copied().unwrap_or_default()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HeldMemory> {
        self.0.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the memory of a body while somebody has texts of it.
#[derive(Debug)]
pub(crate) struct BodyTexts {
    body: BodyHold,
    n_bytes: usize,
}

impl BodyTexts {
    /// Gives back what exceeds `n_bytes`, as far as no other part of the request needs it.
    pub(crate) fn shrink_to(&mut self, n_bytes: usize) {
        let mut memory = self.body.lock();
        let n_left = n_bytes.min(self.n_bytes);
        memory.n_needed -= self.n_bytes - n_left;
        self.n_bytes = n_left;
        let n_needed = memory.n_needed;
        if let Some(charge) = &mut memory.charge {
            charge.shrink_to(n_needed);
        }
    }
}

impl Drop for BodyTexts {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn charge(endpoint: &Arc<BodyMemory>, key: Option<&Arc<BodyMemory>>) -> BodyCharge {
        BodyCharge::new(Arc::clone(endpoint), key.cloned())
    }

    fn left(memory: &BodyMemory) -> (usize, usize) {
        (memory.ordinary.load(Ordering::Relaxed), memory.large.load(Ordering::Relaxed))
    }

    #[test]
    fn large_bodies_leave_room_for_ordinary_ones_and_these_for_small_ones() {
        let endpoint = BodyMemory::of_endpoint();
        let mut large: Vec<_> = (0..8).map(|_| charge(&endpoint, None)).collect();
        assert_eq!(large.iter_mut().filter_map(|body| body.grow_to(32 * MIB).ok()).count(), 4);
        let mut ordinary: Vec<_> = (0..400).map(|_| charge(&endpoint, None)).collect();
        let n_fit = ordinary.iter_mut().filter_map(|body| body.grow_to(MIB).ok()).count();
        assert_eq!(n_fit, 320 - 32 - 4);
        let mut small = charge(&endpoint, None);
        small.grow_to(SMALL_BODY).unwrap();
        assert_eq!(small.grow_to(SMALL_BODY + 1), Err(BodyMemoryFull));
        drop((large, ordinary, small));
        assert_eq!(left(&endpoint), (320 * MIB, 128 * MIB));
    }

    #[test]
    fn a_key_leaves_room_for_others() {
        let endpoint = BodyMemory::of_endpoint();
        let [greedy, other] = [BodyMemory::of_key(), BodyMemory::of_key()];
        let mut stalled: Vec<_> = (0..4).map(|_| charge(&endpoint, Some(&greedy))).collect();
        assert_eq!(stalled.iter_mut().filter_map(|body| body.grow_to(32 * MIB).ok()).count(), 3);
        charge(&endpoint, Some(&other)).grow_to(32 * MIB).unwrap();
        let mut small: Vec<_> = (0..10_000).map(|_| charge(&endpoint, Some(&greedy))).collect();
        assert!(small.iter_mut().any(|body| body.grow_to(SMALL_BODY).is_err()));
        charge(&endpoint, Some(&other)).grow_to(32 * MIB).unwrap();
        drop((stalled, small));
        for memory in [&greedy, &other] {
            assert_eq!(left(memory), (256 * MIB, 96 * MIB));
        }
        assert_eq!(left(&endpoint), (320 * MIB, 128 * MIB));
    }

    #[test]
    fn two_thousand_histories_of_100_kb_fit_at_once() {
        let (endpoint, key) = (BodyMemory::of_endpoint(), BodyMemory::of_key());
        let mut bodies: Vec<_> = (0..2_000).map(|_| charge(&endpoint, Some(&key))).collect();
        for body in &mut bodies {
            body.grow_to(100_000).unwrap();
        }
    }

    #[test]
    fn a_body_takes_what_is_left_of_its_texts() {
        let endpoint = BodyMemory::of_endpoint();
        let mut body = charge(&endpoint, None);
        body.grow_to(2 * MIB).unwrap();
        body.shrink_to(MIB + 1);
        assert_eq!(left(&endpoint), (319 * MIB, 128 * MIB - 1));
        let hold = BodyHold::default();
        hold.keep(body, Duration::ZERO);
        let (mut first, second) = (hold.texts(), hold.texts());
        first.shrink_to(10);
        assert_eq!(left(&endpoint), (319 * MIB, 128 * MIB - 1), "the second prompt waits with its text");
        drop(second);
        assert_eq!(left(&endpoint), (320 * MIB - 10, 128 * MIB));
        drop(first);
        assert_eq!(left(&endpoint), (320 * MIB, 128 * MIB), "although the caller has a clone of the hold");
        drop(hold);
    }
}
