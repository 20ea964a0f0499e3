//! Sends one request, reads its reply, and records both.

use std::time::{Duration, Instant};

use baton_link::lines::LineBuffer;
use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;

use super::check::{ReplyCheck, Seen};
use super::connection::whole;
use super::fault::{ReplyFault, RequestFailure, quoted};
use super::load::{RequestStart, RoundLoad};
use super::settings::AskedForm;
use super::stamps::clock_ns;
use super::tally::{LatencyKind, Tally};

/// The longest JSON reply that is read, and the longest message of an error.
const MAX_BODY_BYTES: usize = 64 << 20;
const MAX_ERROR_BYTES: usize = 4 << 10;

/// A request without a complete reply, and what the server said.
struct FailedRequest {
    failure: RequestFailure,
    detail: String,
}

impl From<RequestFailure> for FailedRequest {
    fn from(failure: RequestFailure) -> Self {
        FailedRequest { failure, detail: String::new() }
    }
}

/// When the text of a reply arrived.
#[derive(Default)]
struct TextTimes {
    first: Option<Instant>,
    last: Option<Instant>,
    /// Chunks with text in the measured time.
    n_in_time: u64,
}

impl TextTimes {
    fn chunk(&mut self, now: Instant, tally: &mut Tally) {
        let is_in_time = tally.time.contains(now);
        if is_in_time {
            self.n_in_time += 1;
        }
        match self.last {
            None => self.first = Some(now),
            Some(last) if is_in_time => tally.latency(LatencyKind::Itl, now - last),
            Some(_) => {}
        }
        self.last = Some(now);
    }
}

impl RoundLoad {
    /// Runs a request to its end or its deadline. Returns false if it failed.
    pub(super) async fn request(&self, start: RequestStart) -> bool {
        let mut check = ReplyCheck::new(self.server.asked);
        let mut times = TextTimes::default();
        let reading = self.exchange(&start, &mut check, &mut times);
        let done = tokio::time::timeout(self.settings.timeout, reading).await;
        let done = done.unwrap_or_else(|_| Err(RequestFailure::TimedOut.into()));
        self.record(&start, check, &times, done)
    }

    /// Returns what follows the reply's last line.
    async fn exchange(
        &self,
        start: &RequestStart,
        check: &mut ReplyCheck,
        times: &mut TextTimes,
    ) -> Result<Vec<u8>, FailedRequest> {
        let body = self.server.bodies.body(start.prompt);
        let sending = self.server.connections.send(Method::POST, self.server.path(), body);
        let (connection, response) = sending.await?;
        let (head, body) = response.into_parts();
        if !head.status.is_success() {
            let message = whole(body, MAX_ERROR_BYTES).await.unwrap_or_default();
            let failure = RequestFailure::Status(head.status.as_u16());
            return Err(FailedRequest { failure, detail: quoted(&message) });
        }
        check.content_type(head.headers.get(CONTENT_TYPE).map_or(b"", |value| value.as_bytes()));
        let rest = match self.settings.reply {
            AskedForm::Stream => self.stream(body, check, times).await?,
            AskedForm::Json => {
                let body = whole(body, MAX_BODY_BYTES).await?;
                let seen = check.event(&body, |_| ());
                seen.map_err(|failure| FailedRequest { failure, detail: quoted(&body) })?;
                Vec::new()
            }
        };
        self.server.connections.keep(connection);
        Ok(rest)
    }

    async fn stream(
        &self,
        mut body: Incoming,
        check: &mut ReplyCheck,
        times: &mut TextTimes,
    ) -> Result<Vec<u8>, FailedRequest> {
        let mut lines = LineBuffer::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| RequestFailure::ConnectionLost)?;
            let Ok(bytes) = frame.into_data() else { continue };
            let now = Instant::now();
            let now_ns = if self.settings.checks.stamps { clock_ns() } else { 0 };
            let mut tally = self.tally.borrow_mut();
            let is_in_time = tally.time.contains(now);
            lines.push(bytes);
            while let Some(line) = lines.next_line().map_err(|_| RequestFailure::TooLong)? {
                let stamp = |ns: u64| {
                    if is_in_time {
                        tally.latency_ns(LatencyKind::Delay, now_ns.saturating_sub(ns));
                    }
                };
                match check.line(line, stamp) {
                    Ok(Seen::Text) => times.chunk(now, &mut tally),
                    Ok(Seen::NoText) => {}
                    Err(failure) => return Err(FailedRequest { failure, detail: quoted(line) }),
                }
            }
        }
        Ok(lines.rest().to_vec())
    }

    fn record(
        &self,
        start: &RequestStart,
        mut check: ReplyCheck,
        times: &TextTimes,
        done: Result<Vec<u8>, FailedRequest>,
    ) -> bool {
        let ended = Instant::now();
        let mut tally = self.tally.borrow_mut();
        let rest = match done {
            Ok(rest) => rest,
            Err(FailedRequest { failure, detail }) => {
                tally.n_failed_chunks += times.n_in_time;
                tally.failure(failure, &detail);
                tally.faults(check.faults);
                return false;
            }
        };
        if let Some(digest) = check.end(&rest)
            && self.server.first_replies.borrow_mut().entry(start.prompt).or_insert(digest) != &digest
        {
            let prompt = format!("prompt {}", start.prompt);
            check.faults.add(ReplyFault::TextDiffers, prompt.as_bytes());
        }
        let is_in_time = tally.time.contains(ended);
        let n_claimed = check.usage.map(|usage| usage.completion_tokens);
        tally.n_checked += 1;
        tally.n_replies += u64::from(is_in_time);
        tally.n_tokens += match self.settings.reply {
            AskedForm::Json if is_in_time => n_claimed.unwrap_or(0) as f64,
            AskedForm::Json => 0.0,
            // A chunk may hold several tokens: those of the measured time are as many of all as its chunks are.
            AskedForm::Stream => {
                let per_chunk = n_claimed.map_or(1.0, |n| n as f64 / check.n_chunks.max(1) as f64);
                times.n_in_time as f64 * per_chunk
            }
        };
        if start.is_measured {
            tally.latency(LatencyKind::EndToEnd, ended - start.at);
            if let (Some(first), Some(last)) = (times.first, times.last) {
                tally.latency(LatencyKind::Ttft, first.saturating_duration_since(start.at));
                let n_after_first = n_claimed.unwrap_or(check.n_chunks).saturating_sub(1);
                if let Some(tpot) = per_token(last - first, n_after_first) {
                    tally.latency(LatencyKind::Tpot, tpot);
                }
            }
            if let Some(usage) = check.usage {
                tally.usage(usage.prompt_tokens, usage.completion_tokens);
            }
        }
        tally.faults(check.faults);
        true
    }
}

fn per_token(time: Duration, n: u64) -> Option<Duration> {
    (n > 0).then(|| Duration::from_nanos((time.as_nanos() / u128::from(n)) as u64))
}
