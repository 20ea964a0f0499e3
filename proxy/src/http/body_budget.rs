//! The memory and the threads that request bodies may use, for the whole process.
//!
//! A body is charged three times, each time before it costs anything: the bytes that arrive; its size after
//! decompression, from then until its request ends, because the request keeps its texts; and a thread while it is parsed.
//! Of the second budget each key has a share, so that no key can use it up.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use baton_schemas::ErrorCode;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::draining::Awaited;
use super::errors::{HttpFailure, Retry};
use crate::account::Account;

/// Bodies up to this size are parsed at once on the thread that serves their connection: it takes less than a
/// millisecond. They are charged only while they arrive.
pub(super) const SMALL_BODY: usize = 64 << 10;

/// Bytes of bodies that arrive or wait to be parsed: four of the largest size.
const MAX_ARRIVING: usize = 128 << 20;

/// The part of [`MAX_ARRIVING`] that only small bodies use, so that they arrive while large ones fill the rest.
const FOR_SMALL: usize = 32 << 20;

/// Bytes of the large bodies of all running requests, decompressed. A key may use three quarters: see
/// [`Account::open_bodies`].
const MAX_OPEN: usize = 128 << 20;

/// Large bodies parsed at once. More would take processor time from streams, and each takes up to 80 MiB.
const MAX_PARSED_AT_ONCE: usize = 2;

/// How long a large body waits for its turn.
const MAX_WAIT: Duration = Duration::from_secs(30);

const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The budgets, shared by all requests. One permit of the first two is a KiB.
#[derive(Debug, Clone)]
pub struct BodyBudget {
    arriving: Arc<Semaphore>,
    open: Arc<Semaphore>,
    threads: Arc<Semaphore>,
}

impl Default for BodyBudget {
    fn default() -> Self {
        let budget = |n| Arc::new(Semaphore::new(n));
        BodyBudget {
            arriving: budget(kib(MAX_ARRIVING) as usize),
            open: budget(kib(MAX_OPEN) as usize),
            threads: budget(MAX_PARSED_AT_ONCE),
        }
    }
}

impl BodyBudget {
    /// Starts to count the bytes of a body that arrives.
    pub(super) fn arrival(&self) -> Arrival {
        Arrival { budget: Arc::clone(&self.arriving), charged: None }
    }

    /// Waits until a body of at most `n_bytes` may be parsed. Errors: its turn did not come in time.
    pub(super) async fn turn(&self, account: Option<&Account>, n_bytes: usize) -> Result<ParseTurn, HttpFailure> {
        let n_kib = kib(n_bytes);
        let turn = async {
            let share = match account {
                Some(account) => Some(Arc::clone(&account.open_bodies).acquire_many_owned(n_kib).await.ok()?),
                None => None,
            };
            let open = Arc::clone(&self.open).acquire_many_owned(n_kib).await.ok()?;
            let thread = Arc::clone(&self.threads).acquire_owned().await.ok()?;
            Some(ParseTurn { room: OpenBody { open, share }, thread })
        };
        tokio::time::timeout(MAX_WAIT, turn).await.ok().flatten().ok_or_else(busy)
    }
}

/// Permits of a semaphore for this many bytes.
const fn kib(n_bytes: usize) -> u32 {
    n_bytes.div_ceil(1 << 10) as u32
}

/// The charged bytes of a body that arrives.
#[derive(Debug)]
pub(super) struct Arrival {
    budget: Arc<Semaphore>,
    charged: Option<OwnedSemaphorePermit>,
}

impl Arrival {
    /// Charges the body up to `n_bytes`. Does not wait: bodies that wait for each other would all be late. Errors: the
    /// budget is used up.
    pub(super) fn grow_to(&mut self, n_bytes: usize) -> Result<(), HttpFailure> {
        let n_charged = self.charged.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let n_more = (kib(n_bytes) as usize).saturating_sub(n_charged);
        let reserved = if n_bytes > SMALL_BODY { kib(FOR_SMALL) as usize } else { 0 };
        if n_more == 0 {
            return Ok(());
        }
        if self.budget.available_permits() < n_more + reserved {
            return Err(busy());
        }
        let more = Arc::clone(&self.budget).try_acquire_many_owned(n_more as u32).map_err(|_| busy())?;
        match &mut self.charged {
            Some(charged) => charged.merge(more),
            None => self.charged = Some(more),
        }
        Ok(())
    }
}

/// The right to parse a large body now.
#[derive(Debug)]
pub(super) struct ParseTurn {
    room: OpenBody,
    thread: OwnedSemaphorePermit,
}

impl ParseTurn {
    /// Returns what is charged beyond the body's size, once that is known.
    pub(super) fn has_size(&mut self, n_bytes: usize) {
        self.room.shrink_to(if n_bytes <= SMALL_BODY { 0 } else { kib(n_bytes) as usize });
    }

    /// Frees the thread. The rest is kept until the request ends.
    pub(super) fn finish(self) -> OpenBody {
        drop(self.thread);
        self.room
    }
}

/// The charge of a parsed body.
#[derive(Debug)]
pub(super) struct OpenBody {
    open: OwnedSemaphorePermit,
    share: Option<OwnedSemaphorePermit>,
}

impl OpenBody {
    fn shrink_to(&mut self, n_kib: usize) {
        for permit in [Some(&mut self.open), self.share.as_mut()].into_iter().flatten() {
            drop(permit.split(permit.num_permits().saturating_sub(n_kib)));
        }
    }
}

/// Keeps the charge of a request's body until its reply ends. An extension of each request.
#[derive(Debug, Clone, Default)]
pub(super) struct UntilReplyEnds(Arc<OnceLock<OpenBody>>);

impl UntilReplyEnds {
    pub(super) fn keep(&self, body: OpenBody) {
        // A request has one body.
        let _ = self.0.set(body);
    }
}

/// Makes room for the charge of the request's body, and ties it to the reply.
pub(super) async fn hold(mut request: Request, next: Next) -> Response {
    let held = UntilReplyEnds::default();
    request.extensions_mut().insert(held.clone());
    let response = next.run(request).await;
    match held.0.get() {
        Some(_) => response.map(|body| Body::new(Awaited::new(body, held))),
        None => response,
    }
}

fn busy() -> HttpFailure {
    let message = "The server is at its limit of large request bodies. Try again shortly.";
    let error = ErrorBody::new(ErrorKind::Unavailable, message).code(ErrorCode::QueueFull);
    HttpFailure { retry: Retry::After(RETRY_AFTER), ..HttpFailure::new(StatusCode::SERVICE_UNAVAILABLE, error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account::KeyLimits;

    #[test]
    fn arriving_bodies_share_a_budget_and_leave_room_for_small_ones() {
        let budget = BodyBudget::default();
        let mut large: Vec<_> = (0..4).map(|_| budget.arrival()).collect();
        let n_fit = large.iter_mut().filter_map(|body| body.grow_to(32 << 20).ok()).count();
        assert_eq!(n_fit, 3);
        let mut small = budget.arrival();
        small.grow_to(SMALL_BODY).unwrap();
        assert_eq!(small.grow_to(SMALL_BODY + 1).unwrap_err().status, 503);
        drop(large);
        small.grow_to(32 << 20).unwrap();
        drop(small);
        assert_eq!(budget.arriving.available_permits(), 128 << 10);
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_leaves_room_for_others_and_a_turn_comes_in_time_or_not_at_all() {
        let budget = BodyBudget::default();
        let [greedy, other] = ["a", "b"].map(|name| Account::new(name, KeyLimits::default()));
        let mut open = Vec::new();
        for _ in 0..3 {
            open.push(budget.turn(Some(&greedy), 32 << 20).await.unwrap().finish());
        }
        assert_eq!(budget.turn(Some(&greedy), 32 << 20).await.unwrap_err().status, 503);
        let mut turn = budget.turn(Some(&other), 32 << 20).await.unwrap();
        turn.has_size(1 << 20);
        let _second = budget.turn(Some(&other), 31 << 20).await.unwrap();
        assert_eq!(budget.turn(Some(&other), 1).await.unwrap_err().status, 503, "both threads parse");
        drop((turn, open));
        let small = budget.turn(Some(&greedy), 1 << 20).await;
        assert!(small.is_ok());
    }
}
