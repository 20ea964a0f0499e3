//! Turns one choice's reply from an upstream into events, and measures it.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use baton_schemas::GenerateRequest;
use baton_schemas::sequence::CachedTokens;
use baton_upstream::{TextDelta, TextEnd, TextStream, UpstreamError, UpstreamFailure};
use futures::future::BoxFuture;
use futures::{FutureExt, Stream, StreamExt};
use tracing::Span;

use super::choice_reader::ChoiceReader;
use super::client_error::broken_reply;
use super::prefill_servers::Transfer;
use super::prompt_estimate::most_tokens;
use super::sent_choice::SentChoice;
use super::{StartedChoice, UpstreamServer};
use crate::choice_clock::ChoiceClock;
use crate::error::RequestError;
use crate::reply_event::{EventKind, ReplyEvent};

/// The measurements of a reply.
pub(crate) struct ReplyMeter {
    /// Counts and times tokens.
    pub(crate) clock: ChoiceClock,
    /// The estimated number of the prompt's tokens.
    pub(crate) n_prompt: u32,
}

/// The events of a choice, once it has started. Dropping the stream closes the connection.
pub(crate) fn text_events(
    choice: u32,
    started: BoxFuture<'static, Result<StartedChoice, RequestError>>,
    request: &GenerateRequest,
    ReplyMeter { clock, n_prompt }: ReplyMeter,
) -> impl Stream<Item = Result<ReplyEvent, RequestError>> + Send + use<> {
    let source = TextSource::Starting(started);
    TextEvents { choice, source, reader: ChoiceReader::new(request), clock, n_prompt, ready: VecDeque::new() }
}

struct TextEvents {
    choice: u32,
    source: TextSource,
    reader: ChoiceReader,
    clock: ChoiceClock,
    /// The estimated number of the prompt's tokens.
    n_prompt: u32,
    /// The events that were not taken yet.
    ready: VecDeque<EventKind>,
}

/// Where a choice's deltas come from.
enum TextSource {
    /// The choice has not started.
    Starting(BoxFuture<'static, Result<StartedChoice, RequestError>>),
    Running(RunningChoice),
    Ended,
}

/// The stream of a choice. Dropping it closes the connection.
struct RunningChoice {
    rest: TextStream,
    /// For counting its tokens at the end.
    transfer: Option<Transfer>,
    /// For noting a failure.
    server: Arc<UpstreamServer>,
    sent: Box<SentChoice>,
    /// When a delta came, until the next one is asked for.
    came_at: Option<Instant>,
    /// Ends with the reply.
    _span: Span,
}

impl Stream for TextEvents {
    type Item = Result<ReplyEvent, RequestError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(event) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(event.of(this.choice))));
            }
            let delta = match &mut this.source {
                TextSource::Ended => return Poll::Ready(None),
                TextSource::Starting(started) => ready!(started.poll_unpin(cx)).map(|started| this.begin(started)),
                TextSource::Running(running) => {
                    if let Some(came_at) = running.came_at.take() {
                        running.sent.unread(came_at.elapsed());
                    }
                    let delta = ready!(running.rest.poll_next_unpin(cx));
                    running.came_at = Some(Instant::now());
                    delta.unwrap_or_else(|| Err(cut_short())).map_err(|error| running.broke_off(error))
                }
            };
            match delta {
                Ok(delta) => this.take(delta),
                Err(error) => {
                    this.source = TextSource::Ended;
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }
}

impl TextEvents {
    /// Returns the first delta.
    fn begin(
        &mut self,
        StartedChoice { first, rest, transfer, server, sent, n_ctx, asked, span, .. }: StartedChoice,
    ) -> TextDelta {
        self.reader.bound(n_ctx);
        self.clock.started_at(asked);
        self.ready.push_back(EventKind::Started(CachedTokens::default()));
        self.ready.extend(transfer.as_ref().map(Transfer::started));
        self.source = TextSource::Running(RunningChoice { rest, transfer, server, sent, came_at: None, _span: span });
        first
    }

    /// Turns a delta into events.
    fn take(&mut self, delta: TextDelta) {
        if let TextDelta::LeftOut(left_out) = delta {
            if let TextSource::Running(RunningChoice { server, .. }) = &self.source {
                server.reports.left_out(server.name(), left_out);
            }
            self.ready.push_back(EventKind::LeftOut(left_out));
            return;
        }
        let step = self.reader.read(delta, &mut self.clock);
        self.ready.extend(step.parts.into_iter().map(EventKind::from));
        if let Some(end) = step.end {
            self.finish(end);
        }
    }

    fn finish(&mut self, TextEnd { reason, unknown, usage }: TextEnd) {
        if let TextSource::Running(RunningChoice { server, transfer, .. }) = &self.source {
            if let Some(word) = unknown {
                server.reports.unknown_end(server.name(), &word);
            }
            if self.reader.is_overlong() {
                tracing::warn!(
                    upstream = server.name(),
                    "an upstream ignores max_tokens or its context's size; Baton ends its reply"
                );
            }
            self.ready.extend(transfer.as_ref().map(|transfer| transfer.ended(usage.n_cached, self.n_prompt)));
        }
        if let Some(n_completion) = usage.n_completion {
            self.clock.correct(self.reader.believable(n_completion));
        }
        if let Some(n_reported) = usage.n_prompt.filter(|_| self.choice == 0) {
            let n_reported = n_reported.min(most_tokens(self.n_prompt));
            let n_cached = usage.n_cached.unwrap_or(0).min(n_reported);
            self.clock.n_computed = n_reported - n_cached;
            let n_estimated = self.n_prompt;
            self.ready.push_back(EventKind::Usage { n_estimated, n_prompt: n_reported, n_cached });
        }
        let timings = self.clock.timings();
        let n_seen = self.reader.at_most_a_byte_each(self.clock.n_tokens);
        if let TextSource::Running(RunningChoice { sent, .. }) = &mut self.source {
            // By its own count it would be as fast as it says.
            sent.ended(&usage, n_seen);
        }
        self.ready.push_back(EventKind::Finished {
            reason,
            stop: self.reader.reply.stop_string(),
            n_completion: self.clock.n_tokens,
            n_reasoning: usage.n_reasoning.unwrap_or(self.reader.reply.n_reasoning()).min(self.clock.n_tokens),
            timings,
        });
        self.source = TextSource::Ended;
    }
}

impl RunningChoice {
    /// Notes that the reply ended too early. Returns the client's error.
    fn broke_off(&self, error: UpstreamError) -> RequestError {
        if let UpstreamError::Failed { failure, .. } = &error {
            self.server.failed(*failure);
        }
        tracing::debug!(upstream = self.server.name(), %error, "an upstream's reply broke off");
        broken_reply(error)
    }
}

fn cut_short() -> UpstreamError {
    UpstreamError::Failed { failure: UpstreamFailure::CutShort, detail: "the reply stopped".to_owned() }
}
