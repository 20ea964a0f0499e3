//! Who has to go so that a model fits. Pure.

use tokio::time::Instant;

/// A model, and what it takes now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tenant {
    /// What it takes when it is loaded, bytes.
    pub(super) bytes: u64,
    /// Its process is there, or about to be.
    pub(super) is_in: bool,
    /// It is on its way out.
    pub(super) is_leaving: bool,
    /// Requests use it.
    pub(super) is_used: bool,
    /// When one last did.
    pub(super) last_used: Instant,
}

/// Whether there is room.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// Yes.
    Here,
    /// Once these have gone; of all idle ones those that were used longest ago, and no more than are needed. None, if it
    /// is enough to wait for those that are leaving.
    After(Vec<usize>),
    /// When requests have ended that use what is there now.
    Later,
    /// It is too large by itself.
    Never,
}

/// Looks for `needed` bytes within `budget`.
pub(super) fn find(needed: u64, budget: u64, tenants: &[Tenant]) -> Room {
    if needed > budget {
        return Room::Never;
    }
    let taken = |counts: fn(&Tenant) -> bool| {
        tenants.iter().filter(|tenant| counts(tenant)).fold(0u64, |sum, tenant| sum.saturating_add(tenant.bytes))
    };
    if taken(|tenant| tenant.is_in).saturating_add(needed) <= budget {
        return Room::Here;
    }
    let mut staying = taken(|tenant| tenant.is_in && !tenant.is_leaving);
    let is_idle = |tenant: &Tenant| tenant.is_in && !tenant.is_leaving && !tenant.is_used;
    let mut idle: Vec<usize> = (0..tenants.len()).filter(|&i| is_idle(&tenants[i])).collect();
    idle.sort_by_key(|&i| tenants[i].last_used);
    let mut leaving = Vec::new();
    for i in idle {
        if staying.saturating_add(needed) <= budget {
            break;
        }
        staying = staying.saturating_sub(tenants[i].bytes);
        leaving.push(i);
    }
    // Nobody goes for nothing.
    if staying.saturating_add(needed) <= budget { Room::After(leaving) } else { Room::Later }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn check(needed: u64, tenants: &[(u64, &str, u64)], expected: Room) {
        let start = Instant::now();
        let tenants: Vec<Tenant> = tenants
            .iter()
            .map(|&(bytes, life, last_used)| Tenant {
                bytes,
                is_in: life != "out",
                is_leaving: life == "leaving",
                is_used: life == "used",
                last_used: start + Duration::from_secs(last_used),
            })
            .collect();
        assert_eq!(find(needed, 10, &tenants), expected, "{needed} {tenants:?}");
    }

    #[test]
    fn idle_models_make_room_the_longest_unused_first_and_no_more_than_needed() {
        check(4, &[], Room::Here);
        check(4, &[(6, "used", 0)], Room::Here);
        check(4, &[(9, "out", 0), (6, "idle", 0)], Room::Here);
        check(4, &[(3, "idle", 2), (3, "idle", 1), (3, "idle", 3)], Room::After(vec![1]));
        check(5, &[(3, "idle", 2), (3, "idle", 1), (3, "idle", 3)], Room::After(vec![1, 0]));
        check(10, &[(3, "idle", 2), (3, "idle", 1)], Room::After(vec![1, 0]));
    }

    #[test]
    fn what_is_used_stays_and_what_leaves_is_waited_for() {
        check(5, &[(6, "used", 0)], Room::Later);
        check(5, &[(4, "used", 0), (4, "idle", 1)], Room::After(vec![1]));
        check(7, &[(4, "used", 0), (4, "idle", 1)], Room::Later);
        check(5, &[(6, "leaving", 0)], Room::After(vec![]));
        check(5, &[(4, "leaving", 0), (4, "idle", 1)], Room::After(vec![]));
        check(11, &[], Room::Never);
        check(u64::MAX, &[(u64::MAX, "used", 0)], Room::Never);
    }
}
