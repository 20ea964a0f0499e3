//! The requests that an upstream has and those that wait for it, in their order, and the time that its replies share.
//!
//! An upstream is seen as computing one prompt after another, in the order in which they were sent. The caller says when each
//! request is sent, begins and ends, in seconds of a clock of its own.

use std::collections::BTreeMap;

/// More requests than these are planned by their number alone: following each of them would take too long.
pub const MAX_FOLLOWED: usize = 32;

/// A request that an upstream has, or that waits for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FollowedRequest {
    /// Tokens of its prompt that the upstream probably has to compute.
    pub n_missing: f64,
    /// Tokens that its reply is expected to have.
    pub n_output: f64,
    pub stage: RequestStage,
}

/// The stage of a request at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RequestStage {
    /// It waits for a slot.
    Waiting,
    /// It was sent `seconds` ago. Its prompt has been computed for `computed` seconds of these.
    Sent { seconds: f64, computed: f64 },
    /// Its reply has begun.
    Generating(GeneratedTime),
}

/// The time from a reply's first token to its end, or to the present.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GeneratedTime {
    pub seconds: f64,
    /// Replies that were generated together, on average, with this one.
    pub n_together: f64,
    /// The part of the seconds in which a prompt was computed.
    pub prompt_seconds: f64,
}

/// The requests of one model at one upstream.
#[derive(Debug, Clone, Default)]
pub struct UpstreamWork {
    waiting: BTreeMap<u64, RequestWork>,
    sent: BTreeMap<u64, (RequestWork, f64)>,
    generating: BTreeMap<u64, ReplyMarks>,
    /// Seconds of all replies together until `changed_at`, and of prompts that were computed.
    reply_seconds: f64,
    prompt_seconds: f64,
    changed_at: f64,
    /// When a prompt was computed last.
    begun_at: f64,
}

#[derive(Debug, Clone, Copy)]
struct RequestWork {
    n_missing: f64,
    n_output: f64,
}

/// A reply that has begun, and the sums at that moment.
#[derive(Debug, Clone, Copy)]
struct ReplyMarks {
    n_output: f64,
    at: f64,
    reply_seconds: f64,
    prompt_seconds: f64,
}

impl UpstreamWork {
    /// A request waits for a slot. Requests with smaller ids come before it.
    pub fn wait(&mut self, id: u64, n_missing: f64, n_output: f64) {
        self.waiting.insert(id, RequestWork { n_missing, n_output });
    }

    /// A request is sent.
    pub fn send(&mut self, id: u64, n_missing: f64, n_output: f64, now: f64) {
        self.waiting.remove(&id);
        self.sent.insert(id, (RequestWork { n_missing, n_output }, now));
    }

    /// The first token of a request has come. `constant`: seconds from a request to the begin of its work.
    pub fn begin(&mut self, id: u64, now: f64, constant: f64) {
        let Some((request, sent_at)) = self.sent.remove(&id) else { return };
        self.prompt_seconds += self.computed(sent_at, now, constant);
        self.settle(now);
        self.begun_at = now;
        let RequestWork { n_output, .. } = request;
        let UpstreamWork { reply_seconds, prompt_seconds, .. } = *self;
        self.generating.insert(id, ReplyMarks { n_output, at: now, reply_seconds, prompt_seconds });
    }

    /// A request has ended, at whatever stage. Returns the time since its first token, if that has come.
    pub fn end(&mut self, id: u64, now: f64, constant: f64) -> Option<GeneratedTime> {
        self.waiting.remove(&id);
        self.sent.remove(&id);
        let begun = *self.generating.get(&id)?;
        let time = self.generated(&begun, now, constant);
        self.settle(now);
        self.generating.remove(&id);
        Some(time)
    }

    /// Tokens to compute of each prompt that was sent and is not computed.
    pub fn sent_prompts(&self) -> impl Iterator<Item = f64> {
        self.sent.values().map(|(request, _)| request.n_missing)
    }

    /// Tokens of all prompts that are not computed, also of requests that wait.
    pub fn n_backlog(&self) -> f64 {
        self.sent_prompts().chain(self.waiting.values().map(|request| request.n_missing)).sum()
    }

    /// All requests, in the order in which they are done. None if they are more than [`MAX_FOLLOWED`].
    pub fn open(&self, now: f64, constant: f64) -> Vec<FollowedRequest> {
        if self.generating.len() + self.sent.len() + self.waiting.len() > MAX_FOLLOWED {
            return Vec::new();
        }
        let generating = self.generating.values().map(|begun| FollowedRequest {
            n_missing: 0.0,
            n_output: begun.n_output,
            stage: RequestStage::Generating(self.generated(begun, now, constant)),
        });
        let sent = self.sent.values().enumerate().map(|(i, (request, sent_at))| {
            let computed = if i == 0 { self.computed(*sent_at, now, constant) } else { 0.0 };
            let stage = RequestStage::Sent { seconds: (now - sent_at).max(0.0), computed };
            FollowedRequest { n_missing: request.n_missing, n_output: request.n_output, stage }
        });
        let waiting = self.waiting.values().map(|request| FollowedRequest {
            n_missing: request.n_missing,
            n_output: request.n_output,
            stage: RequestStage::Waiting,
        });
        generating.chain(sent).chain(waiting).collect()
    }

    /// Seconds for which the prompt that was sent at `sent_at` is the first one.
    fn computed(&self, sent_at: f64, now: f64, constant: f64) -> f64 {
        (now - (sent_at + constant).max(self.begun_at)).max(0.0)
    }

    fn generated(&self, begun: &ReplyMarks, now: f64, constant: f64) -> GeneratedTime {
        let seconds = (now - begun.at).max(0.0);
        let first = self.sent.values().next();
        let under_way = first.map_or(0.0, |(_, sent_at)| self.computed(*sent_at, now, constant));
        let of_replies = self.reply_seconds_at(now) - begun.reply_seconds;
        let of_prompts = self.prompt_seconds + under_way - begun.prompt_seconds;
        GeneratedTime {
            seconds,
            n_together: if seconds > 0.0 { (of_replies / seconds).max(1.0) } else { self.generating.len() as f64 },
            prompt_seconds: of_prompts.clamp(0.0, seconds),
        }
    }

    fn reply_seconds_at(&self, now: f64) -> f64 {
        self.reply_seconds + self.generating.len() as f64 * (now - self.changed_at).max(0.0)
    }

    fn settle(&mut self, now: f64) {
        self.reply_seconds = self.reply_seconds_at(now);
        self.changed_at = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_share_the_time_that_they_were_there_together() {
        let mut work = UpstreamWork::default();
        for id in 0..2 {
            work.send(id, 100.0, 50.0, 0.0);
        }
        // The first prompt takes 0.9 s after 0.1 s of latency, the second 1 s more.
        work.begin(0, 1.0, 0.1);
        work.begin(1, 2.0, 0.1);
        let FollowedRequest { stage, .. } = work.open(3.0, 0.1)[0];
        let RequestStage::Generating(so_far) = stage else { panic!("{stage:?}") };
        let both = work.end(0, 3.0, 0.1).unwrap();
        assert_eq!(both, so_far);
        let GeneratedTime { seconds, n_together, prompt_seconds } = both;
        assert!((seconds, n_together) == (2.0, 1.5) && (prompt_seconds - 1.0).abs() < 1e-9, "{both:?}");
        let alone = work.end(1, 5.0, 0.1).unwrap();
        assert_eq!((alone.seconds, alone.prompt_seconds), (3.0, 0.0));
        assert!((alone.n_together - 4.0 / 3.0).abs() < 1e-9, "{alone:?}");
    }

    #[test]
    fn a_request_is_followed_from_its_wait_to_its_end() {
        let mut work = UpstreamWork::default();
        work.wait(3, 300.0, 9.0);
        work.send(1, 100.0, 9.0, 10.0);
        work.send(2, 200.0, 9.0, 10.5);
        assert_eq!((work.sent_prompts().sum::<f64>(), work.n_backlog()), (300.0, 600.0));
        let stages: Vec<RequestStage> = work.open(11.0, 0.25).iter().map(|open| open.stage).collect();
        let sent = |seconds, computed| RequestStage::Sent { seconds, computed };
        assert_eq!(stages, [sent(1.0, 0.75), sent(0.5, 0.0), RequestStage::Waiting]);
        assert_eq!(work.end(1, 11.0, 0.25), None, "it was cancelled");
        assert_eq!(work.end(3, 11.0, 0.25), None);
        assert_eq!((work.n_backlog(), work.open(11.0, 0.25).len()), (200.0, 1));
        work.begin(7, 11.0, 0.25);
        assert_eq!(work.end(7, 12.0, 0.25), None, "nobody sent it");
    }

    #[test]
    fn too_many_requests_are_only_counted() {
        let mut work = UpstreamWork::default();
        (0..=MAX_FOLLOWED as u64).for_each(|id| work.send(id, 1.0, 1.0, 0.0));
        assert!(work.open(1.0, 0.0).is_empty());
        assert_eq!(work.n_backlog(), MAX_FOLLOWED as f64 + 1.0);
    }
}
