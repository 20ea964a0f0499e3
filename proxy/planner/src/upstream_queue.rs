//! Predicts when an upstream will have answered one more request, if no other comes after it.
//!
//! It is played through event by event: prompts are computed one after another, replies share steps and wait while a prompt is
//! computed, and requests without a slot get one when a reply ends.

use std::collections::VecDeque;

use crate::upstream_rates::UpstreamRates;
use crate::upstream_work::{FollowedRequest, RequestStage};

/// A request that would be sent now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NewRequest {
    /// Seconds in which its own prompt is computed, with what other replies cost it.
    pub prompt_seconds: f64,
    /// Tokens that its reply is expected to have.
    pub n_output: f64,
}

/// An upstream's present work, and how fast it does it.
#[derive(Debug, Clone, Copy)]
pub struct QueuedWork<'a> {
    pub n_slots: u32,
    pub rates: &'a UpstreamRates,
    /// In the order in which they are done.
    pub open: &'a [FollowedRequest],
    /// Further replies of which only the number is known.
    pub n_unknown: u32,
}

/// Seconds until a request's first and its last token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueuedTimes {
    pub first: f64,
    pub last: f64,
}

/// A reply that is longer than expected has at least this share of the expected tokens before it.
const LEAST_LEFT: f64 = 0.25;

/// Tokens per second until a rate is measured: no time, so that it is measured.
const UNMEASURED: f64 = 1e9;

/// Less of a second or a token counts as none.
const TINY: f64 = 1e-9;

/// A prompt that is to be computed.
#[derive(Debug, Clone, Copy)]
struct QueuedPrompt {
    seconds: f64,
    /// When its work can begin.
    ready: f64,
    n_output: f64,
    is_new: bool,
}

/// A reply that is generated.
#[derive(Debug, Clone, Copy)]
struct QueuedReply {
    /// It ends when each reply has got so many tokens since the start.
    ends_at: f64,
    is_new: bool,
}

/// The state between two events.
struct Queue<'a> {
    work: QueuedWork<'a>,
    now: f64,
    waiting: VecDeque<QueuedPrompt>,
    /// The first one is computed, once it is ready.
    sent: VecDeque<QueuedPrompt>,
    /// The last one ends first.
    replies: Vec<QueuedReply>,
    /// Tokens that each reply would have got since the start: all have the same pace.
    n_generated: f64,
}

/// The times of a new request behind this work.
pub fn times(work: QueuedWork<'_>, new: NewRequest) -> QueuedTimes {
    let mut queue = Queue::behind(work, new);
    let mut first = 0.0;
    // Each request is sent, ready, computed and ended once.
    for _ in 0..4 * (work.open.len() + work.n_unknown as usize + 1) {
        let (prompt, reply) = queue.advance();
        if prompt.is_some_and(|prompt| prompt.is_new) {
            first = queue.now;
        }
        if reply {
            break;
        }
    }
    QueuedTimes { first, last: queue.now.max(first) }
}

/// Tokens that a reply generates after these.
fn n_left(n_output: f64, n_generated: f64) -> f64 {
    (n_output - n_generated).max(LEAST_LEFT * n_output).max(1.0)
}

impl<'a> Queue<'a> {
    fn behind(work: QueuedWork<'a>, new: NewRequest) -> Queue<'a> {
        let mut queue = Queue {
            work,
            now: 0.0,
            waiting: VecDeque::new(),
            sent: VecDeque::new(),
            replies: Vec::new(),
            n_generated: 0.0,
        };
        let constant = work.rates.constant_seconds();
        for open in work.open {
            let n_output = open.n_output.max(1.0);
            let prompt = |computed: f64, ready: f64| {
                let seconds = (work.rates.prompt_seconds(open.n_missing) - computed).max(0.0);
                QueuedPrompt { seconds, ready, n_output, is_new: false }
            };
            match open.stage {
                RequestStage::Waiting => queue.waiting.push_back(prompt(0.0, constant)),
                RequestStage::Sent { seconds, computed } => {
                    queue.sent.push_back(prompt(computed, (constant - seconds).max(0.0)));
                }
                RequestStage::Generating(time) => {
                    queue.begin(n_left(n_output, work.rates.n_generated(&time)), false);
                }
            }
        }
        let half_done = (new.n_output / 2.0).max(1.0);
        (0..work.n_unknown).for_each(|_| queue.begin(half_done, false));
        queue.waiting.push_back(QueuedPrompt {
            seconds: new.prompt_seconds.max(0.0),
            ready: constant,
            n_output: new.n_output.max(1.0),
            is_new: true,
        });
        queue.fill_slots();
        queue
    }

    fn fill_slots(&mut self) {
        while self.sent.len() + self.replies.len() < self.work.n_slots.max(1) as usize
            && let Some(prompt) = self.waiting.pop_front()
        {
            self.sent.push_back(QueuedPrompt { ready: self.now + self.work.rates.constant_seconds(), ..prompt });
        }
    }

    /// A reply begins, with so many tokens to come.
    fn begin(&mut self, n_left: f64, is_new: bool) {
        let ends_at = self.n_generated + n_left;
        let place = self.replies.partition_point(|reply| reply.ends_at > ends_at);
        self.replies.insert(place, QueuedReply { ends_at, is_new });
    }

    /// Goes to the next event. Returns the prompt that was computed, and whether the new request's reply has ended.
    fn advance(&mut self) -> (Option<QueuedPrompt>, bool) {
        let front = self.sent.front().copied();
        let is_computing = front.is_some_and(|prompt| prompt.ready <= self.now + TINY);
        let kept = if is_computing { 1.0 - self.work.rates.stall() } else { 1.0 };
        let step = self.work.rates.step(self.replies.len() as u32);
        let pace = if step > 0.0 { (kept / step).max(TINY) } else { UNMEASURED };
        let until_prompt = front.map(|prompt| if is_computing { prompt.seconds } else { prompt.ready - self.now });
        let until_reply = self.replies.last().map(|reply| (reply.ends_at - self.n_generated) / pace);
        let Some(seconds) = until_prompt.into_iter().chain(until_reply).reduce(f64::min) else { return (None, false) };
        let seconds = seconds.max(0.0);
        self.now += seconds;
        self.n_generated += seconds * pace;
        let mut is_new_done = false;
        while let Some(reply) = self.replies.last()
            && reply.ends_at <= self.n_generated + TINY.max(TINY * self.n_generated)
        {
            is_new_done |= reply.is_new;
            self.replies.pop();
        }
        let begun = if is_computing { self.compute(seconds) } else { None };
        if let Some(QueuedPrompt { n_output, is_new, .. }) = begun {
            match n_output - 1.0 > TINY {
                true => self.begin(n_output - 1.0, is_new),
                false => is_new_done |= is_new,
            }
        }
        self.fill_slots();
        (begun, is_new_done)
    }

    /// The first prompt is computed for so long. Returns it if that is its end.
    fn compute(&mut self, seconds: f64) -> Option<QueuedPrompt> {
        let front = self.sent.front_mut()?;
        front.seconds -= seconds;
        if front.seconds <= TINY { self.sent.pop_front() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rates::Curve;
    use crate::upstream_work::GeneratedTime;

    /// 1,000 prompt tokens a second, 10 tokens a second for each reply, 0.1 s to reach it; a prompt halves the pace of replies.
    fn rates() -> UpstreamRates {
        UpstreamRates {
            constant: 0.1,
            prefill: Curve::constant(1_000.0),
            decode: Curve::constant(10.0),
            prompt_stall: 0.5,
            ..UpstreamRates::default()
        }
    }

    const NEW: NewRequest = NewRequest { prompt_seconds: 1.0, n_output: 11.0 };

    fn at(n_slots: u32, open: &[FollowedRequest]) -> QueuedTimes {
        times(QueuedWork { n_slots, rates: &rates(), open, n_unknown: 0 }, NEW)
    }

    fn open(n_missing: f64, stage: RequestStage) -> FollowedRequest {
        FollowedRequest { n_missing, n_output: 11.0, stage }
    }

    const SENT: RequestStage = RequestStage::Sent { seconds: 0.0, computed: 0.0 };

    fn close(found: QueuedTimes, [first, last]: [f64; 2]) {
        assert!((found.first - first).abs() < 1e-6 && (found.last - last).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn requests_that_were_placed_at_the_same_moment_count_before_anything_is_measured_of_them() {
        close(at(4, &[]), [1.1, 2.1]);
        close(at(4, &[open(1_000.0, SENT)]), [2.1, 3.1]);
        close(at(4, &[open(1_000.0, RequestStage::Waiting)]), [2.1, 3.1]);
        close(at(1, &[open(1_000.0, RequestStage::Waiting)]), [1.1 + 1.0 + 1.1, 4.2]);
        let three = [open(1_000.0, SENT), open(500.0, SENT), open(500.0, RequestStage::Waiting)];
        // Both slots get free: after 1.1 s and half a second in which the first one generates 2.5 tokens, and so on.
        let found = at(2, &three);
        assert!(found.first > 3.0 && found.first < 4.5, "{found:?}");
    }

    #[test]
    fn what_is_done_already_is_no_wait() {
        close(at(4, &[open(1_000.0, RequestStage::Sent { seconds: 0.7, computed: 0.6 })]), [1.4, 2.4]);
        let time = GeneratedTime { seconds: 0.5, n_together: 1.0, prompt_seconds: 0.0 };
        // One slot: five of its eleven tokens are left.
        close(at(1, &[open(0.0, RequestStage::Generating(time))]), [0.5 + 1.1, 2.6]);
        let stalled = GeneratedTime { prompt_seconds: 0.4, ..time };
        close(at(1, &[open(0.0, RequestStage::Generating(stalled))]), [0.7 + 1.1, 2.8]);
        let longer = GeneratedTime { seconds: 60.0, ..time };
        close(at(1, &[open(0.0, RequestStage::Generating(longer))]), [0.275 + 1.1, 2.375]);
    }

    #[test]
    fn replies_of_which_only_the_number_is_known_are_half_done() {
        let work = QueuedWork { n_slots: 1, rates: &rates(), open: &[], n_unknown: 1 };
        close(times(work, NEW), [0.55 + 1.1, 2.65]);
    }

    #[test]
    fn an_upstream_of_which_nothing_is_measured_takes_no_time() {
        let unknown = UpstreamRates::default();
        let work = QueuedWork { n_slots: 1, rates: &unknown, open: &[open(9.0, SENT)], n_unknown: 2 };
        let found = times(work, NewRequest { prompt_seconds: 0.0, n_output: 100.0 });
        assert!(found.last < 1e-3, "{found:?}");
    }

    proptest::proptest! {
        /// Where prompts slow replies down, more work may end a request earlier: replies that end before a long prompt begins
        /// leave their slots to others (Graham, "Bounds on multiprocessing timing anomalies", 1969).
        #[test]
        fn more_work_before_a_request_never_ends_it_earlier_unless_prompts_slow_replies_down(
            prompts in proptest::collection::vec((0f64..5_000.0, 1f64..300.0, 0u8..3), 0..12),
            more in (0f64..5_000.0, 1f64..300.0, 0u8..3), n_slots in 1u32..6, n_unknown in 0u32..4,
            stall in proptest::option::of(0.05f64..1.0),
        ) {
            let rates = UpstreamRates { prompt_stall: stall.unwrap_or(TINY), ..rates() };
            let request = |(n_missing, n_output, stage): (f64, f64, u8)| {
                let stage = match stage {
                    0 => RequestStage::Waiting,
                    1 => SENT,
                    _ => RequestStage::Generating(GeneratedTime::default()),
                };
                FollowedRequest { n_missing, n_output, stage }
            };
            let before: Vec<FollowedRequest> = prompts.into_iter().map(request).collect();
            let mut after = before.clone();
            after.push(request(more));
            let of = |open: &[FollowedRequest]| {
                times(QueuedWork { n_slots, rates: &rates, open, n_unknown }, NEW)
            };
            let (fewer, more) = (of(&before), of(&after));
            for found in [fewer, more] {
                proptest::prop_assert!(found.first.is_finite() && found.first > 0.0 && found.last >= found.first, "{found:?}");
            }
            proptest::prop_assert!(stall.is_some() || more.first >= fewer.first - 1e-6, "{fewer:?} {more:?}");
        }
    }
}
