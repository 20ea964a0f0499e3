//! Chooses the models to unload so that another one fits into memory. Pure.

use tokio::time::Instant;

/// A model and its use of memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryUse {
    /// Bytes that it uses when it is loaded.
    pub(super) bytes: u64,
    /// Its process is running, or about to start.
    pub(super) is_in: bool,
    /// Its process is ending.
    pub(super) is_leaving: bool,
    /// Requests use it.
    pub(super) is_used: bool,
    /// The time of its last use.
    pub(super) last_used: Instant,
}

/// When a model fits into the budget.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum MemoryFit {
    /// It fits now.
    Now,
    /// It fits once these models, by index, are unloaded: the idle ones with the oldest use, no more than needed. Empty if
    /// the processes that are already ending free enough.
    AfterUnloading(Vec<usize>),
    /// It fits once requests on the loaded models have ended.
    Later,
    /// It is larger than the budget.
    Never,
}

/// Looks for `needed` bytes within `budget` bytes.
pub(super) fn find(needed: u64, budget: u64, uses: &[MemoryUse]) -> MemoryFit {
    if needed > budget {
        return MemoryFit::Never;
    }
    let taken = |counts: fn(&MemoryUse) -> bool| {
        uses.iter().filter(|used| counts(used)).fold(0u64, |sum, used| sum.saturating_add(used.bytes))
    };
    if taken(|used| used.is_in).saturating_add(needed) <= budget {
        return MemoryFit::Now;
    }
    let mut staying = taken(|used| used.is_in && !used.is_leaving);
    let is_idle = |used: &MemoryUse| used.is_in && !used.is_leaving && !used.is_used;
    let mut idle: Vec<usize> = (0..uses.len()).filter(|&i| is_idle(&uses[i])).collect();
    idle.sort_by_key(|&i| uses[i].last_used);
    let mut leaving = Vec::new();
    for i in idle {
        if staying.saturating_add(needed) <= budget {
            break;
        }
        staying = staying.saturating_sub(uses[i].bytes);
        leaving.push(i);
    }
    // No model is unloaded if that does not free enough.
    if staying.saturating_add(needed) <= budget { MemoryFit::AfterUnloading(leaving) } else { MemoryFit::Later }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use self::Life::{Idle, Leaving, Out, Used};
    use super::*;

    enum Life {
        Out,
        Idle,
        Used,
        Leaving,
    }

    fn check(needed: u64, uses: &[(u64, Life, u64)], expected: MemoryFit) {
        let start = Instant::now();
        let uses: Vec<MemoryUse> = uses
            .iter()
            .map(|(bytes, life, last_used)| MemoryUse {
                bytes: *bytes,
                is_in: !matches!(life, Out),
                is_leaving: matches!(life, Leaving),
                is_used: matches!(life, Used),
                last_used: start + Duration::from_secs(*last_used),
            })
            .collect();
        assert_eq!(find(needed, 10, &uses), expected, "{needed} {uses:?}");
    }

    #[test]
    fn idle_models_make_room_the_longest_unused_first_and_no_more_than_needed() {
        check(4, &[], MemoryFit::Now);
        check(4, &[(6, Used, 0)], MemoryFit::Now);
        check(4, &[(9, Out, 0), (6, Idle, 0)], MemoryFit::Now);
        check(4, &[(3, Idle, 2), (3, Idle, 1), (3, Idle, 3)], MemoryFit::AfterUnloading(vec![1]));
        check(5, &[(3, Idle, 2), (3, Idle, 1), (3, Idle, 3)], MemoryFit::AfterUnloading(vec![1, 0]));
        check(10, &[(3, Idle, 2), (3, Idle, 1)], MemoryFit::AfterUnloading(vec![1, 0]));
    }

    #[test]
    fn used_models_stay_and_leaving_ones_are_awaited() {
        check(5, &[(6, Used, 0)], MemoryFit::Later);
        check(5, &[(4, Used, 0), (4, Idle, 1)], MemoryFit::AfterUnloading(vec![1]));
        check(7, &[(4, Used, 0), (4, Idle, 1)], MemoryFit::Later);
        check(5, &[(6, Leaving, 0)], MemoryFit::AfterUnloading(vec![]));
        check(5, &[(4, Leaving, 0), (4, Idle, 1)], MemoryFit::AfterUnloading(vec![]));
        check(11, &[], MemoryFit::Never);
        check(u64::MAX, &[(u64::MAX, Used, 0)], MemoryFit::Never);
    }
}
