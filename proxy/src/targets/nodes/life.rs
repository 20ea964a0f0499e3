//! Where a node is in its life, what is learned of it, and what follows.
//!
//! ```text
//!             Answers            Misses             Misses
//! Starting ───────────► Ready ───────────► Suspect ────────► Down
//!     ▲                  │  ▲  Answers        │               │
//!     │ Loads            │  └─────────────────┘◄──────────────┘ Answers
//!     │                  │ Stops
//!  (from anywhere)       └──────► Draining ──── Misses ─────► Down
//! ```
//!
//! Besides, a node that answers and whose breaker is open is suspect, until the breaker closes; and an own model that nobody
//! needs is unloaded, from anywhere, until it loads again.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where a node is in its life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Life {
    /// Nobody needs its model now: there is no process.
    Unloaded,
    /// It has not answered yet, its process is starting, or its model is loading.
    #[default]
    Starting,
    /// Requests can be sent.
    Ready,
    /// It was told to stop: what it runs goes on, and it gets nothing new.
    Draining,
    /// It left a question unanswered, or requests to it fail: it gets something only where nobody else can.
    Suspect,
    /// It cannot be used.
    Down,
}

impl Life {
    /// All of them.
    pub const ALL: [Life; 6] = [Life::Unloaded, Life::Starting, Life::Ready, Life::Draining, Life::Suspect, Life::Down];

    /// As it is shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Life::Unloaded => "unloaded",
            Life::Starting => "starting",
            Life::Ready => "ready",
            Life::Draining => "draining",
            Life::Suspect => "suspect",
            Life::Down => "down",
        }
    }
}

/// What is learned of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    /// Its process is starting, or its model is loading.
    Loads,
    /// Its process has ended, since nobody needs its model.
    Unloads,
    /// It has answered, and serves.
    Answers,
    /// It was told to stop, and says so.
    Stops,
    /// It left a question unanswered. The second time in a row it is down, and the first time if it has never answered.
    Misses,
    /// The same of a node that runs: the stream of its loads has ended, or it does not say what its load is. Of any
    /// other that says nothing.
    Quiets,
    /// It cannot be used, and there is nothing to wait for: it refuses us, or cannot start.
    Fails,
    /// The process that is known has shown that it lives: of one that is silent that it answers, and of others nothing.
    Lives,
    /// Its breaker has opened.
    Opens,
    /// Its breaker has closed.
    Closes,
}

/// The state, and what it follows from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Machine {
    reach: Reach,
    breaker_is_open: bool,
}

/// What its answers show.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Reach {
    Unloaded,
    #[default]
    Starting,
    Answering,
    Stopping,
    Silent,
    Gone,
}

impl Machine {
    /// Where the node is in its life.
    pub(super) fn life(self) -> Life {
        match self.reach {
            Reach::Unloaded => Life::Unloaded,
            Reach::Starting => Life::Starting,
            Reach::Answering if self.breaker_is_open => Life::Suspect,
            Reach::Answering => Life::Ready,
            Reach::Stopping => Life::Draining,
            Reach::Silent => Life::Suspect,
            Reach::Gone => Life::Down,
        }
    }

    /// Whether it has left its last question unanswered, and is not known to be gone.
    pub(super) fn is_silent(self) -> bool {
        self.reach == Reach::Silent
    }

    /// What is known once this is.
    #[must_use]
    pub(super) fn learn(self, news: News) -> Machine {
        let reach = match (self.reach, news) {
            (_, News::Loads) => Reach::Starting,
            (_, News::Unloads) => Reach::Unloaded,
            (_, News::Answers) | (Reach::Silent, News::Lives) => Reach::Answering,
            // The last words of a process that has ended.
            (Reach::Unloaded, _) => Reach::Unloaded,
            (_, News::Stops) => Reach::Stopping,
            (_, News::Fails) => Reach::Gone,
            (Reach::Answering, News::Misses | News::Quiets) => Reach::Silent,
            (Reach::Starting, News::Quiets) => Reach::Starting,
            (_, News::Misses | News::Quiets) => Reach::Gone,
            (reach, News::Lives | News::Opens | News::Closes) => reach,
        };
        let breaker_is_open = match news {
            News::Opens => true,
            News::Closes => false,
            _ => self.breaker_is_open,
        };
        Machine { reach, breaker_is_open }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The states that follow from `from` by each news, in the order of [`ALL_NEWS`].
    fn check(path: &[News], from: Life, expected: [Life; 9]) {
        let machine = path.iter().fold(Machine::default(), |machine, news| machine.learn(*news));
        assert_eq!(machine.life(), from, "{path:?}");
        for (news, expected) in ALL_NEWS.into_iter().zip(expected) {
            assert_eq!(machine.learn(news).life(), expected, "{path:?}, then {news:?}");
        }
    }

    const ALL_NEWS: [News; 9] = [
        News::Unloads,
        News::Loads,
        News::Answers,
        News::Stops,
        News::Misses,
        News::Quiets,
        News::Fails,
        News::Opens,
        News::Closes,
    ];

    #[test]
    fn every_state_and_everything_that_can_be_learned_in_it() {
        use Life::{Down, Draining, Ready, Starting, Suspect, Unloaded};
        use News::{Answers, Fails, Loads, Misses, Opens, Stops, Unloads};
        let after = |rest: [Life; 8]| {
            let mut all = [Unloaded; 9];
            all[1..].copy_from_slice(&rest);
            all
        };
        check(&[], Starting, after([Starting, Ready, Draining, Down, Starting, Down, Starting, Starting]));
        check(&[Answers], Ready, after([Starting, Ready, Draining, Suspect, Suspect, Down, Suspect, Ready]));
        check(&[Answers, Stops], Draining, after([Starting, Ready, Draining, Down, Down, Down, Draining, Draining]));
        check(&[Answers, Misses], Suspect, after([Starting, Ready, Draining, Down, Down, Down, Suspect, Suspect]));
        check(&[Answers, Opens], Suspect, after([Starting, Suspect, Draining, Suspect, Suspect, Down, Suspect, Ready]));
        check(
            &[Answers, Opens, Misses],
            Suspect,
            after([Starting, Suspect, Draining, Down, Down, Down, Suspect, Suspect]),
        );
        check(&[Answers, Misses, Misses], Down, after([Starting, Ready, Draining, Down, Down, Down, Down, Down]));
        check(&[Fails], Down, after([Starting, Ready, Draining, Down, Down, Down, Down, Down]));
        check(
            &[Answers, Loads],
            Starting,
            after([Starting, Ready, Draining, Down, Starting, Down, Starting, Starting]),
        );
        // A node that was lost in the middle of a request and is back: a request has to go well first.
        let lost = [Answers, Opens, Misses, Misses];
        check(&lost, Down, after([Starting, Suspect, Draining, Down, Down, Down, Down, Down]));
        // What a process that has ended still had on its tongue changes nothing.
        let nothing = [Starting, Ready, Unloaded, Unloaded, Unloaded, Unloaded, Unloaded, Unloaded];
        check(&[Answers, Stops, Unloads], Unloaded, after(nothing));
    }

    #[test]
    fn a_sign_of_life_is_news_of_a_silent_node_alone() {
        use News::{Answers, Fails, Lives, Loads, Misses, Stops, Unloads};
        let lives = |path: &[News]| {
            let machine = path.iter().fold(Machine::default(), |machine, news| machine.learn(*news));
            (machine.life(), machine.learn(Lives).life())
        };
        assert_eq!(lives(&[Answers, Misses]), (Life::Suspect, Life::Ready));
        for path in [&[][..], &[Answers], &[Answers, Stops], &[Answers, Misses, Misses], &[Fails], &[Loads], &[Unloads]]
        {
            let (before, after) = lives(path);
            assert_eq!(before, after, "{path:?}");
        }
    }
}
