//! When a draft node is not asked because nothing of it pays. Pure.
//!
//! Its candidates cost this machine nothing, so they are asked for first, and compared. If steps have candidates and verify none of
//! them, the draft node computes for nothing: it is told no more tokens for a while, and then all that it missed.

/// The steps with candidates after which it is decided.
const PERIOD: u32 = 32;

/// The fewest of these steps that must verify some.
const LEAST_USED: u32 = 2;

/// The steps of a rest. After each rest that changed nothing twice as many, up to the second number, as with other trials.
const REST: [u32; 2] = [64, 2_048];

/// The steps of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rests {
    /// Steps of this period with candidates, and those of them that verified some.
    n_offered: u32,
    n_used: u32,
    /// Steps until the end of a rest.
    left: u32,
    /// Steps of the next one.
    next: u32,
}

impl Default for Rests {
    fn default() -> Self {
        let [shortest, _] = REST;
        Rests { n_offered: 0, n_used: 0, left: 0, next: shortest }
    }
}

impl Rests {
    /// Returns true while it is not asked.
    pub(super) fn is_resting(&self) -> bool {
        self.left > 0
    }

    /// A step begins.
    pub(super) fn step(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    /// A step had candidates, and verified some or none.
    pub(super) fn offered(&mut self, is_used: bool) {
        let [shortest, longest] = REST;
        self.n_offered += 1;
        self.n_used += u32::from(is_used);
        if self.n_used >= LEAST_USED {
            *self = Rests::default();
        } else if self.n_offered >= PERIOD {
            let next = (2 * self.next).clamp(shortest, longest);
            *self = Rests { n_offered: 0, n_used: 0, left: self.next, next };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps of each rest while no step verifies a candidate, but those that `uses` says.
    fn rests(n_steps: u32, uses: impl Fn(u32) -> bool) -> Vec<u32> {
        let mut subject = Rests::default();
        let mut found = Vec::new();
        let mut was_resting = false;
        for n in 0..n_steps {
            subject.step();
            let is_resting = subject.is_resting();
            match found.last_mut() {
                Some(last) if is_resting && was_resting => *last += 1,
                _ if is_resting => found.push(1),
                _ => subject.offered(uses(n)),
            }
            was_resting = is_resting;
        }
        found
    }

    #[test]
    fn a_draft_node_that_pays_is_always_asked_and_another_one_ever_less() {
        assert_eq!(rests(1_000, |_| true), [0; 0]);
        assert_eq!(rests(1_000, |n| n % 9 == 0), [0; 0]);
        let found = rests(20_000, |_| false);
        assert_eq!(&found[..7], [63, 127, 255, 511, 1_023, 2_047, 2_047]);
        // A trial now and then is no use.
        assert!(rests(1_000, |n| n % 40 == 0).len() >= 3);
    }

    #[test]
    fn one_that_begins_to_pay_is_asked_as_at_first() {
        let mut subject = Rests::default();
        (0..PERIOD).for_each(|_| subject.offered(false));
        assert!(subject.is_resting());
        (0..REST[0]).for_each(|_| subject.step());
        assert!(!subject.is_resting());
        subject.offered(true);
        subject.offered(true);
        assert_eq!(subject, Rests::default());
    }
}
