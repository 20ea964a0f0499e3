//! How far medians of rounds lie apart by chance.
//!
//! The spread of a figure is the median absolute deviation of its rounds, which one disturbed round does not move. Few rounds
//! underestimate it by luck, so it is at least the typical relative spread of all figures of both reports.

use baton_tryout::stats::median;

/// A figure with fewer rounds shows nothing of its spread.
pub(super) const LEAST_ROUNDS: usize = 3;

/// A change counts beyond so many standard errors of the two medians' difference.
const STANDARD_ERRORS: f64 = 3.0;

/// The standard deviation of a normal distribution ÷ its median absolute deviation.
const DEVIATION_OF_MAD: f64 = 1.4826;

/// The standard error of a median ÷ that of a mean, for a normal distribution.
const ERROR_OF_MEDIAN: f64 = 1.2533;

/// The rounds of a figure, summed up.
#[derive(Debug, Clone, Copy)]
pub(super) struct RoundSpread {
    pub(super) median: f64,
    /// An estimate of the standard deviation.
    deviation: f64,
    pub(super) n: usize,
}

impl RoundSpread {
    pub(super) fn of(rounds: &[f64]) -> RoundSpread {
        let middle = median(rounds);
        let distances: Vec<f64> = rounds.iter().map(|value| (value - middle).abs()).collect();
        let deviation = DEVIATION_OF_MAD * small_sample_factor(rounds.len()) * median(&distances);
        RoundSpread { median: middle, deviation, n: rounds.len() }
    }

    fn relative(&self) -> Option<f64> {
        let relative = self.deviation / self.median.abs();
        (self.n >= LEAST_ROUNDS && relative.is_finite()).then_some(relative)
    }

    /// The standard error of the median.
    fn error(&self, typical: f64) -> f64 {
        let deviation = self.deviation.max(typical * self.median.abs());
        ERROR_OF_MEDIAN * deviation / (self.n.max(1) as f64).sqrt()
    }
}

/// The typical relative spread of many figures, 0 without any.
pub(super) fn typical(spreads: &[RoundSpread]) -> f64 {
    let relative: Vec<f64> = spreads.iter().filter_map(RoundSpread::relative).collect();
    if relative.is_empty() { 0.0 } else { median(&relative) }
}

/// The difference of two medians that chance explains.
pub(super) fn by_chance(old: RoundSpread, new: RoundSpread, typical: f64) -> f64 {
    STANDARD_ERRORS * old.error(typical).hypot(new.error(typical))
}

/// By how much the median absolute deviation of so many values is too small on average: Croux and Rousseeuw, "Time-efficient
/// algorithms for two highly robust estimators of scale" (1992), section 5.
fn small_sample_factor(n: usize) -> f64 {
    match n {
        0..=2 => 1.196,
        3 => 1.495,
        4 => 1.363,
        5 => 1.206,
        6 => 1.200,
        7 => 1.140,
        8 => 1.129,
        9 => 1.107,
        n => n as f64 / (n as f64 - 0.8),
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    #[test]
    fn one_disturbed_round_does_not_widen_the_noise() {
        let [steady, disturbed] =
            [[99.0, 100.0, 101.0, 100.5, 99.5], [99.0, 100.0, 101.0, 100.5, 10.0]].map(|r| RoundSpread::of(&r));
        assert!((steady.median - 100.0).abs() < 1e-9 && (disturbed.median - 100.0).abs() < 1e-9);
        assert!(by_chance(steady, disturbed, 0.0) < 5.0);
        // Without any spread, that of other figures counts.
        let same = RoundSpread::of(&[100.0; 3]);
        assert_eq!(by_chance(same, same, 0.0), 0.0);
        assert!(by_chance(same, same, 0.02) > 5.0);
        assert_eq!(typical(&[RoundSpread::of(&[1.0]), RoundSpread::of(&[0.0; 3])]), 0.0);
    }

    /// Rounds around `mean`, with 2 % of noise.
    fn rounds(random: &mut StdRng, mean: f64) -> RoundSpread {
        // A sum of 12 uniform numbers is nearly normal, with a deviation of 1.
        let mut normal = || (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0;
        RoundSpread::of(&[(); 5].map(|()| mean * (1.0 + 0.02 * normal())))
    }

    #[test]
    fn noise_is_seldom_taken_for_a_change_and_a_change_seldom_for_noise() {
        let mut random = StdRng::seed_from_u64(7);
        let mut beyond = |change: f64| {
            let pairs: Vec<_> =
                (0..2_000).map(|_| (rounds(&mut random, 100.0), rounds(&mut random, 100.0 + change))).collect();
            let all: Vec<RoundSpread> = pairs.iter().flat_map(|(old, new)| [*old, *new]).collect();
            let typical = typical(&all);
            let is_beyond = |(old, new): &&(RoundSpread, RoundSpread)| {
                (old.median - new.median).abs() > by_chance(*old, *new, typical)
            };
            pairs.iter().filter(is_beyond).count()
        };
        let (by_chance, of_changes) = (beyond(0.0), beyond(12.0));
        assert!(by_chance < 20, "{by_chance} of 2,000 are taken for a change");
        assert!(of_changes > 1_900, "{of_changes} of 2,000 changes are seen");
    }
}
