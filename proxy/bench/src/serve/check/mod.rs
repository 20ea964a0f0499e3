//! Checks a reply while it arrives: order of chunks, JSON, finish reason, usage, and that no text is lost.

use baton_schemas::counted::counted;

use crate::serve::fault::{ReplyFault, ReplyFaults, RequestFailure};
use crate::serve::settings::{AskedForm, CalledApi, ReplyChecks};
use crate::serve::stamps::StampReader;
use crate::serve::wire::{CheckedEvent, ClaimedFinish, ClaimedUsage, EventChoice};

/// What a request asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestedReply {
    pub(super) api: CalledApi,
    pub(super) form: AskedForm,
    pub(super) max_tokens: u32,
    pub(super) ignore_eos: bool,
    pub(super) checks: ReplyChecks,
}

/// The effect of a line or body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// A comment, an empty line, or a chunk without text.
    NoText,
    Text,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReplyStage {
    /// No role yet.
    Head,
    Text,
    Finished,
    Done,
}

/// The state of one reply.
#[derive(Debug)]
pub(super) struct ReplyCheck {
    asked: RequestedReply,
    stage: ReplyStage,
    /// The first chunk's.
    id: Option<String>,
    finish: Option<ClaimedFinish>,
    stamps: Option<StampReader>,
    /// Of the text, if replies to a prompt must be the same.
    digest: Option<Box<blake3::Hasher>>,
    pub(super) usage: Option<ClaimedUsage>,
    /// Chunks with text, reasoning or a tool call.
    pub(super) n_chunks: u64,
    pub(super) faults: ReplyFaults,
}

impl ReplyCheck {
    pub(super) fn new(asked: RequestedReply) -> ReplyCheck {
        ReplyCheck {
            asked,
            stage: match asked.api {
                CalledApi::Chat => ReplyStage::Head,
                CalledApi::Completions => ReplyStage::Text,
            },
            id: None,
            finish: None,
            stamps: asked.checks.stamps.then(StampReader::new),
            digest: asked.checks.same_replies.then(Box::default),
            usage: None,
            n_chunks: 0,
            faults: ReplyFaults::default(),
        }
    }

    /// Checks the head's content type.
    pub(super) fn content_type(&mut self, value: &[u8]) {
        let expected: &[u8] = match self.asked.form {
            AskedForm::Stream => b"text/event-stream",
            AskedForm::Json => b"application/json",
        };
        if !value.get(..expected.len()).is_some_and(|start| start.eq_ignore_ascii_case(expected)) {
            self.faults.add(ReplyFault::ContentType, value);
        }
    }

    /// Checks a line of a stream. `stamp` gets the time of each of the mock's tokens. Errors: the server reports one.
    pub(super) fn line(&mut self, line: &[u8], stamp: impl FnMut(u64)) -> Result<Seen, RequestFailure> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let Some(data) = line.strip_prefix(b"data:") else {
            let is_field =
                line.is_empty() || [&b":"[..], b"event:", b"id:", b"retry:"].iter().any(|f| line.starts_with(f));
            if !is_field {
                self.faults.add(ReplyFault::InvalidLine, line);
            }
            return Ok(Seen::NoText);
        };
        let data = data.strip_prefix(b" ").unwrap_or(data);
        if self.stage == ReplyStage::Done {
            self.faults.add(ReplyFault::EventAfterDone, data);
        }
        if data == b"[DONE]" {
            self.stage = ReplyStage::Done;
            return Ok(Seen::NoText);
        }
        self.event(data, stamp)
    }

    /// Checks a chunk, or the body of a JSON reply. Errors: the server reports one.
    pub(super) fn event(&mut self, data: &[u8], mut stamp: impl FnMut(u64)) -> Result<Seen, RequestFailure> {
        let event: CheckedEvent<'_> = match serde_json::from_slice(data) {
            Ok(event) => event,
            Err(_) => {
                self.faults.add(ReplyFault::InvalidJson, data);
                return Ok(Seen::NoText);
            }
        };
        if event.error.is_some() {
            return Err(RequestFailure::ErrorEvent);
        }
        if let Some(id) = &event.id
            && *self.id.get_or_insert_with(|| id.0.to_string()) != id.0
        {
            self.faults.add(ReplyFault::IdChanged, data);
        }
        let mut seen = Seen::NoText;
        for choice in &event.choices {
            if self.choice(choice, data, &mut stamp) == Seen::Text {
                seen = Seen::Text;
            }
        }
        if seen == Seen::Text {
            self.n_chunks += 1;
        }
        self.usage = event.usage.or(self.usage);
        Ok(seen)
    }

    fn choice(&mut self, choice: &EventChoice<'_>, data: &[u8], stamp: &mut impl FnMut(u64)) -> Seen {
        if self.stage == ReplyStage::Head && choice.chat().is_some_and(|message| message.role.is_some()) {
            self.stage = ReplyStage::Text;
        }
        let mut seen = if choice.has_tool_call() { Seen::Text } else { Seen::NoText };
        for text in choice.texts() {
            seen = Seen::Text;
            if let Some(reader) = &mut self.stamps {
                reader.read(text, &mut *stamp);
            }
            if let Some(digest) = &mut self.digest {
                digest.update(text.as_bytes());
            }
        }
        match (seen, self.stage) {
            (Seen::Text, ReplyStage::Head) => self.faults.add(ReplyFault::NoRole, data),
            (Seen::Text, ReplyStage::Finished) => self.faults.add(ReplyFault::TextAfterFinish, data),
            // After [DONE] any event is a fault already.
            (Seen::Text, ReplyStage::Done | ReplyStage::Text) | (Seen::NoText, _) => {}
        }
        if let Some(finish) = choice.finish_reason {
            if self.finish.replace(finish).is_some() {
                self.faults.add(ReplyFault::FinishTwice, data);
            }
            if finish == ClaimedFinish::Unknown {
                self.faults.add(ReplyFault::UnknownFinish, data);
            }
            if self.stage != ReplyStage::Done {
                self.stage = ReplyStage::Finished;
            }
        }
        seen
    }

    /// Checks what only the end shows. Returns the digest of the text, if replies to a prompt must be the same.
    pub(super) fn end(&mut self, rest: &[u8]) -> Option<blake3::Hash> {
        if self.asked.form == AskedForm::Stream && (self.stage != ReplyStage::Done || !rest.is_empty()) {
            self.faults.add(ReplyFault::NoDone, rest);
        }
        if self.n_chunks == 0 {
            self.faults.add(ReplyFault::NoText, b"");
        }
        if self.finish.is_none() {
            self.faults.add(ReplyFault::NoFinish, b"");
        }
        self.check_usage();
        let n_claimed = self.usage.map(|usage| usage.completion_tokens);
        if let Some(stamps) = &self.stamps
            && !(stamps.is_whole() && n_claimed.is_none_or(|n| n == stamps.n_tokens))
        {
            let arrived = counted(stamps.n_tokens, "token");
            let found = match n_claimed {
                Some(n) => format!("{arrived} arrived whole, and usage counts {n}"),
                None => format!("{arrived} arrived whole, and there are gaps"),
            };
            self.faults.add(ReplyFault::TextLost, found.as_bytes());
        }
        self.digest.as_ref().map(|digest| digest.finalize())
    }

    fn check_usage(&mut self) {
        let Some(usage) = self.usage else { return self.faults.add(ReplyFault::NoUsage, b"") };
        let ClaimedUsage { prompt_tokens, completion_tokens: n, total_tokens } = usage;
        let finish = self.finish.map_or("no finish_reason", ClaimedFinish::as_str);
        let shown = format!(
            "usage of {prompt_tokens} + {n} tokens, {total_tokens} in total; {finish}; {}",
            counted(self.n_chunks, "chunk")
        );
        if total_tokens != prompt_tokens.saturating_add(n) || (n == 0 && self.n_chunks > 0) {
            self.faults.add(ReplyFault::WrongUsage, shown.as_bytes());
        }
        let RequestedReply { max_tokens, ignore_eos, .. } = self.asked;
        let most = u64::from(max_tokens);
        let contradicts = match self.finish {
            Some(ClaimedFinish::Length) => n != most,
            Some(_) => n > most || ignore_eos,
            None => false,
        };
        if contradicts {
            self.faults.add(ReplyFault::WrongFinish, shown.as_bytes());
        }
        if self.asked.checks.token_per_chunk && self.asked.form == AskedForm::Stream && n != self.n_chunks {
            self.faults.add(ReplyFault::UsageIsNotChunks, shown.as_bytes());
        }
    }
}

#[cfg(test)]
mod tests;
