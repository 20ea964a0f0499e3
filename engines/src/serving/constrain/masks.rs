//! Computes a sequence's masks on a thread of its own, while the model computes its next step.
//!
//! In an ambiguous grammar a mask takes up to a second, and the scheduler's thread must wait for none: it asks whether the
//! mask is known, and a sequence whose mask is not sits out steps. With a thread for each sequence, cheap masks do not
//! queue behind expensive ones. A thread ends with its sequence, at the latest after the mask that it computes.

use std::mem;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use baton_schemas::Token;
use toktrie::SimpleVob;

use super::super::wake::Wake;
use super::progress::{Constrained, Following, NoToken};

/// If the last mask took no longer, the scheduler takes the token that follows it itself: it learns at once whether the
/// text is complete, and saves a step.
const QUICK: Duration = Duration::from_millis(1);

/// The masks of a sequence.
pub(crate) struct Masks {
    state: MaskState,
    wake: Wake,
    thread: Option<MaskThread>,
    /// Each mask is awaited, so that the steps of a test do not depend on how busy its machine is.
    #[cfg(test)]
    is_awaited: bool,
}

enum MaskState {
    /// No mask was asked for yet.
    New(Constrained),
    /// The thread works on it. `is_token_taken`: it is known that the text is not complete.
    Computing {
        is_token_taken: bool,
    },
    Known(Constrained, SimpleVob),
    /// The mask was used for a draw.
    Used(Constrained),
    Complete,
    Nothing(NoToken),
}

/// A constraint, and the token by which it advances before its mask is computed.
type MaskQuestion = (Constrained, Option<Token>);

struct MaskThread {
    questions: SyncSender<MaskQuestion>,
    answers: Receiver<(Constrained, Following)>,
}

impl Masks {
    /// `wake` tells the scheduler that a mask is known.
    pub(crate) fn new(constrained: Constrained, wake: Wake) -> Self {
        Masks {
            state: MaskState::New(constrained),
            wake,
            thread: None,
            #[cfg(test)]
            is_awaited: false,
        }
    }

    #[cfg(test)]
    pub(crate) fn awaited(self) -> Self {
        Masks { is_awaited: true, ..self }
    }

    /// Asks for the first mask. A sequence that starts again has one already.
    pub(crate) fn begin(&mut self) {
        match self.take_state() {
            MaskState::New(constrained) => self.ask(constrained, None),
            state => self.state = state,
        }
    }

    /// Looks whether the thread has an answer. Returns false while it computes.
    pub(crate) fn poll(&mut self) -> bool {
        let MaskState::Computing { .. } = self.state else { return true };
        #[cfg(test)]
        if let Some(thread) = self.thread.as_ref().filter(|_| self.is_awaited) {
            let answer = thread.answers.recv().map_err(|_| TryRecvError::Disconnected);
            return self.settle(answer);
        }
        let answer = self.thread.as_ref().map_or(Err(TryRecvError::Disconnected), |thread| thread.answers.try_recv());
        self.settle(answer)
    }

    /// Waits for an answer until `deadline`, if the last mask was cheap.
    pub(crate) fn wait(&mut self, deadline: Instant) {
        if let (MaskState::Computing { is_token_taken: true }, Some(thread)) = (&self.state, &self.thread) {
            let answer = thread.answers.recv_timeout(deadline.saturating_duration_since(Instant::now()));
            self.settle(answer.map_err(|error| match error {
                RecvTimeoutError::Timeout => TryRecvError::Empty,
                RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
            }));
        }
    }

    /// Takes an answer. Returns false if there is none yet.
    fn settle(&mut self, answer: Result<(Constrained, Following), TryRecvError>) -> bool {
        self.state = match answer {
            Err(TryRecvError::Empty) => return false,
            Err(TryRecvError::Disconnected) => MaskState::Nothing(NoToken::NoThread),
            Ok((constrained, Following::Allowed(mask))) => MaskState::Known(constrained, mask),
            Ok((_, Following::Complete)) => MaskState::Complete,
            Ok((_, Following::Nothing(none))) => MaskState::Nothing(none),
        };
        true
    }

    /// Returns true if the text is complete: no token can follow.
    pub(crate) fn is_complete(&self) -> bool {
        matches!(self.state, MaskState::Complete)
    }

    /// Returns true while it is not known whether the last token completes the text.
    pub(crate) fn may_be_complete(&self) -> bool {
        matches!(self.state, MaskState::Computing { is_token_taken: false })
    }

    /// The tokens that may come next, at least one. Only once [`Masks::poll`] has returned true.
    pub(crate) fn allowed(&mut self) -> Result<SimpleVob, NoToken> {
        match self.take_state() {
            MaskState::Known(constrained, mask) => {
                self.state = MaskState::Used(constrained);
                Ok(mask)
            }
            MaskState::Nothing(none) => Err(none),
            _ => Err(NoToken::DeadEnd),
        }
    }

    /// Advances by the token that was drawn from the last mask, and asks for the next one.
    pub(crate) fn accept(&mut self, drawn: Token) {
        let MaskState::Used(mut constrained) = self.take_state() else { return };
        if constrained.cost() > QUICK {
            return self.ask(constrained, Some(drawn));
        }
        constrained.accept(drawn);
        match constrained.is_complete() {
            true => self.state = MaskState::Complete,
            false => self.ask(constrained, None),
        }
    }

    fn take_state(&mut self) -> MaskState {
        mem::replace(&mut self.state, MaskState::Nothing(NoToken::DeadEnd))
    }

    fn ask(&mut self, constrained: Constrained, drawn: Option<Token>) {
        if self.thread.is_none() {
            self.thread = start(self.wake.clone());
        }
        let is_token_taken = drawn.is_none();
        let is_asked = self.thread.as_ref().is_some_and(|thread| thread.questions.send((constrained, drawn)).is_ok());
        self.state = match is_asked {
            true => MaskState::Computing { is_token_taken },
            false => MaskState::Nothing(NoToken::NoThread),
        };
    }
}

/// Starts a thread that answers until its sequence ends. `None`: this process has too many.
fn start(wake: Wake) -> Option<MaskThread> {
    // A sequence has one question at a time, so that nothing waits for room.
    let (questions, asked) = sync_channel::<MaskQuestion>(1);
    let (answer, answers) = sync_channel(1);
    let run = move || {
        for (mut constrained, drawn) in asked {
            let next = constrained.next(drawn);
            if answer.send((constrained, next)).is_err() {
                return;
            }
            wake();
        }
    };
    match thread::Builder::new().name("masks".into()).spawn(run) {
        Ok(_) => Some(MaskThread { questions, answers }),
        Err(error) => {
            tracing::error!(%error, "no thread can be started for a constraint; its sequence fails");
            None
        }
    }
}
