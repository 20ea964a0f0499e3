//! An endpoint as its clients know it: where it is, what they do when it is full, and which of their requests are under way.

use std::collections::BTreeSet;
use std::fmt::{Display, Formatter};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use harness::Answer;
use reqwest::RequestBuilder;

/// After this time a request hangs. The longest legitimate wait is several silences of 5 s.
pub(crate) const HUNG: Duration = Duration::from_secs(120);

/// How often OpenAI's SDKs ask again.
const SDK_RETRIES: u32 = 2;

/// The longest wait that these SDKs take from an answer.
const LONGEST_SDK_WAIT: Duration = Duration::from_secs(60);

/// The time between two looks at the requests under way.
const PAUSE: Duration = Duration::from_millis(20);

/// What a client does about a 503 for a full queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WhenFull {
    /// The request has failed.
    Fail,
    /// It asks again after the time that the answer gives, at most twice, as OpenAI's SDKs do.
    AskAgain,
}

/// An endpoint, and the requests that a run sends there.
#[derive(Debug)]
pub(crate) struct Service {
    /// `http://127.0.0.1:PORT`
    pub(crate) base: String,
    pub(crate) underway: Underway,
    when_full: WhenFull,
    n_asked_again: AtomicUsize,
}

/// Why a request has no complete reply.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// A 503 for a full queue, and after how long to ask again.
    Full(String, Duration),
    /// Another status than 200.
    Refused(u16, String),
    /// A stream ended with an error event.
    ErrorEvent(String),
    /// The reply broke off, or nobody can read it.
    Broken(String),
    /// No end of the reply within [`HUNG`].
    Hung,
}

/// The requests under way, by the order of their starts.
#[derive(Debug, Default)]
pub(crate) struct Underway(Mutex<Starts>);

#[derive(Debug, Default)]
struct Starts {
    n_begun: u64,
    running: BTreeSet<u64>,
}

/// A request under way, until this is dropped.
struct Running<'a>(&'a Underway, u64);

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Full(text, _) => write!(f, "HTTP 503: {text}"),
            Failure::Refused(status, text) => write!(f, "HTTP {status}: {text}"),
            Failure::ErrorEvent(text) => write!(f, "an error event: {text}"),
            Failure::Broken(problem) => write!(f, "{problem}"),
            Failure::Hung => write!(f, "hung for {HUNG:?}"),
        }
    }
}

impl Service {
    pub(crate) fn new(base: &str, when_full: WhenFull) -> Service {
        Service { base: base.to_owned(), when_full, underway: Underway::default(), n_asked_again: AtomicUsize::new(0) }
    }

    /// How often a request was refused for a full queue and sent again.
    pub(crate) fn n_asked_again(&self) -> usize {
        self.n_asked_again.load(Ordering::Relaxed)
    }

    /// Sends a request, and reads its answer. `read` makes a reply of an answer with status 200.
    pub(crate) async fn ask<T>(
        &self,
        request: RequestBuilder,
        read: impl Fn(Answer) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let _running = self.underway.begin();
        let attempts = async {
            let mut n_left = if self.when_full == WhenFull::AskAgain { SDK_RETRIES } else { 0 };
            loop {
                match exchange(request.try_clone().unwrap()).await {
                    Err(Failure::Full(_, after)) if n_left > 0 => {
                        n_left -= 1;
                        self.n_asked_again.fetch_add(1, Ordering::Relaxed);
                        tokio::time::sleep(after).await;
                    }
                    answer => return answer.and_then(&read),
                }
            }
        };
        tokio::time::timeout(HUNG, attempts).await.unwrap_or(Err(Failure::Hung))
    }
}

/// Sends a request once. Errors: anything but status 200 and a whole body.
pub(crate) async fn exchange(request: RequestBuilder) -> Result<Answer, Failure> {
    let response = request.send().await.map_err(|e| Failure::Broken(format!("not sent: {e}")))?;
    let header = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    let status = response.status().as_u16();
    let retry_after = header("retry-after");
    let route = header("x-baton-route").unwrap_or_default();
    let warning = header("x-baton-warning").unwrap_or_default();
    let text = response.text().await.map_err(|e| Failure::Broken(format!("HTTP {status}, broken off: {e}")))?;
    if status == 200 {
        return Ok(Answer { status, route, retry_after, warning, text });
    }
    let after = retry_after.and_then(|seconds| seconds.parse().ok()).map(Duration::from_secs);
    match after.filter(|after| *after <= LONGEST_SDK_WAIT) {
        // Only OpenAI's dialects have a code for it.
        Some(after) if status == 503 && text.contains(" is full: ") => Err(Failure::Full(text, after)),
        _ => Err(Failure::Refused(status, text)),
    }
}

impl Underway {
    fn lock(&self) -> MutexGuard<'_, Starts> {
        self.0.lock().unwrap()
    }

    fn begin(&self) -> Running<'_> {
        let mut starts = self.lock();
        let own = starts.n_begun;
        starts.n_begun += 1;
        starts.running.insert(own);
        Running(self, own)
    }

    /// The requests so far.
    pub(crate) fn n_begun(&self) -> u64 {
        self.lock().n_begun
    }

    /// Waits until the first `n` requests have ended. None takes longer than [`HUNG`].
    pub(crate) async fn ended(&self, n: u64) {
        let deadline = Instant::now() + HUNG;
        while self.lock().running.first().is_some_and(|oldest| *oldest < n) && Instant::now() < deadline {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.lock().running.remove(&self.1);
    }
}
