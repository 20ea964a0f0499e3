//! How long a request wants its model to stay in memory, and how far its key may decide that.

use baton_schemas::keep_alive::KeepAlive;

use crate::account::Account;

/// What a request may change of how long its model stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepWish {
    /// Nothing.
    Unsaid,
    /// The model stays so long, which may be shorter than others want, or forever: an operator's wish.
    Exactly(KeepAlive),
    /// The model stays at least so long, up to the configured time: a wish of any other key, since it shares the model.
    AtLeast(KeepAlive),
}

impl KeepWish {
    /// The wish of a caller with this account.
    pub fn of(asked: Option<KeepAlive>, account: &Account) -> KeepWish {
        match asked {
            None => KeepWish::Unsaid,
            Some(time) if account.limits.is_operator => KeepWish::Exactly(time),
            Some(time) => KeepWish::AtLeast(time),
        }
    }

    /// How long the model stays, if it would stay for `now`, and for `configured` without any wish.
    pub(super) fn apply(self, now: KeepAlive, configured: KeepAlive) -> KeepAlive {
        match self {
            KeepWish::Unsaid => now,
            KeepWish::Exactly(time) => time,
            KeepWish::AtLeast(time) => now.longer(time.shorter(configured)),
        }
    }
}

impl From<Option<KeepAlive>> for KeepWish {
    /// The endpoint's own wish.
    fn from(time: Option<KeepAlive>) -> KeepWish {
        time.map_or(KeepWish::Unsaid, KeepWish::Exactly)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::account::KeyLimits;

    #[test]
    fn only_an_operators_key_shortens_or_pins() {
        let time = |seconds| KeepAlive::For(Duration::from_secs(seconds));
        let key = |is_operator| Account::new("k", KeyLimits { is_operator, ..KeyLimits::default() });
        let apply = |asked, is_operator, now| KeepWish::of(asked, &key(is_operator)).apply(now, time(300));
        for (asked, guest, operator) in [
            (None, time(60), time(60)),
            (Some(time(0)), time(60), time(0)),
            (Some(time(120)), time(120), time(120)),
            (Some(time(900)), time(300), time(900)),
            (Some(KeepAlive::Forever), time(300), KeepAlive::Forever),
        ] {
            assert_eq!((apply(asked, false, time(60)), apply(asked, true, time(60))), (guest, operator), "{asked:?}");
        }
        assert_eq!(
            apply(Some(time(0)), false, KeepAlive::Forever),
            KeepAlive::Forever,
            "what an operator pinned stays"
        );
    }
}
