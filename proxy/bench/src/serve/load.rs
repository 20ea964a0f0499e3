//! The load of one round: which requests it has, and what it counts.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use baton_proxy::serve::CommandFailure;

use super::server::MeasuredServer;
use super::settings::{LoadSettings, RoundLength};
use super::tally::Tally;

/// A request to send.
pub(super) struct RequestStart {
    /// When it was due; in a closed loop, now.
    pub(super) at: Instant,
    /// The number of its prompt.
    pub(super) prompt: u64,
    pub(super) is_measured: bool,
}

/// The load of one round.
pub(super) struct RoundLoad {
    pub(super) server: Rc<MeasuredServer>,
    pub(super) settings: Rc<LoadSettings>,
    pub(super) tally: RefCell<Tally>,
    /// When the measured time begins.
    from: Instant,
    /// When it ends, unless it ends after a number of requests.
    pub(super) until: Option<Instant>,
    n_measured: Cell<u64>,
}

impl RoundLoad {
    pub(super) fn new(
        server: &Rc<MeasuredServer>,
        settings: &Rc<LoadSettings>,
        from: Instant,
    ) -> Result<Self, CommandFailure> {
        let until = match settings.length {
            RoundLength::Time(time) => Some(from + time),
            RoundLength::Requests(_) => None,
        };
        let mut tally = Tally::new(from)?;
        tally.time.until = until;
        let tally = RefCell::new(tally);
        let n_measured = Cell::new(0);
        Ok(RoundLoad { server: Rc::clone(server), settings: Rc::clone(settings), tally, from, until, n_measured })
    }

    /// The next request, due `at`. `None` after the round's end.
    pub(super) fn next_request(&self, at: Instant) -> Option<RequestStart> {
        if self.until.is_some_and(|until| Instant::now() >= until) {
            return None;
        }
        let is_measured = at >= self.from;
        if is_measured {
            let n = self.n_measured.get();
            if let RoundLength::Requests(most) = self.settings.length
                && n >= most
            {
                return None;
            }
            self.n_measured.set(n + 1);
        }
        let n = self.server.n_started.get();
        self.server.n_started.set(n + 1);
        let prompt = n.wrapping_add(self.settings.seed.wrapping_mul(1_000_003));
        let prompt = self.settings.prompts.map_or(prompt, |prompts| prompt % u64::from(prompts));
        Some(RequestStart { at, prompt, is_measured })
    }

    /// Ends the measured time now, if it has not ended yet. Returns its end.
    pub(super) fn end_measuring(&self) -> Instant {
        let now = Instant::now();
        let ended = self.until.map_or(now, |until| until.min(now));
        self.tally.borrow_mut().time.until = Some(ended);
        ended
    }
}
