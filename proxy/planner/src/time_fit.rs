//! A line through times by size: a constant part, and one for each unit of the size.

/// A new sample multiplies the weight of earlier ones by this.
const KEPT: f64 = 0.95;

/// Fewer samples show no line.
const MIN_SAMPLES: f64 = 4.0;

/// Sizes that differ less show no line: their variance over the mean square.
const MIN_SPREAD: f64 = 0.05;

/// A least-squares fit of relative errors, in which older samples count less.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TimeFit {
    n_samples: f64,
    weight: f64,
    size: f64,
    time: f64,
    size_size: f64,
    size_time: f64,
}

impl TimeFit {
    /// Adds a time, in seconds. Ignores sizes and times that are not positive and finite.
    pub fn learn(&mut self, size: f64, seconds: f64) {
        if !(size > 0.0 && size.is_finite() && seconds > 0.0 && seconds.is_finite()) {
            return;
        }
        let weight = 1.0 / (seconds * seconds);
        let add = |sum: &mut f64, value: f64| *sum = KEPT * *sum + value;
        add(&mut self.n_samples, 1.0);
        add(&mut self.weight, weight);
        add(&mut self.size, weight * size);
        add(&mut self.time, weight * seconds);
        add(&mut self.size_size, weight * size * size);
        add(&mut self.size_time, weight * size * seconds);
    }

    /// Seconds of the constant part: 0 until the samples show one.
    pub fn constant(&self) -> f64 {
        let determinant = self.weight * self.size_size - self.size * self.size;
        let is_shown = self.n_samples >= MIN_SAMPLES * KEPT && determinant > MIN_SPREAD * self.weight * self.size_size;
        if !is_shown {
            return 0.0;
        }
        let slope = ((self.weight * self.size_time - self.size * self.time) / determinant).max(0.0);
        ((self.time - slope * self.size) / self.weight).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fit(samples: &[(f64, f64)]) -> TimeFit {
        let mut fit = TimeFit::default();
        samples.iter().for_each(|(size, seconds)| fit.learn(*size, *seconds));
        fit
    }

    #[test]
    fn the_constant_part_is_found_without_a_sample_that_has_nothing_else() {
        let line = |size: f64| (size, 0.25 + size / 8_000.0);
        let sizes = [500.0, 4_000.0, 1_000.0, 2_500.0, 700.0];
        assert!((fit(&sizes.map(line)).constant() - 0.25).abs() < 1e-9);
        assert_eq!(fit(&sizes.map(line)[..3]).constant(), 0.0, "too few");
        assert_eq!(fit(&[line(500.0); 9]).constant(), 0.0, "of one size");
        assert!(fit(&sizes.map(|size| (size, size / 8_000.0))).constant() < 1e-9);
        assert_eq!(fit(&sizes.map(|size| (size, size * size / 1e6))).constant(), 0.0, "a curve");
        assert_eq!(fit(&[(f64::NAN, 1.0), (1.0, f64::INFINITY), (0.0, 1.0), (1.0, -1.0)]), TimeFit::default());
    }

    proptest::proptest! {
        #[test]
        fn it_is_never_negative_nor_longer_than_every_sample(
            samples in proptest::collection::vec((1f64..1e5, 1e-4f64..1e3), 1..50),
        ) {
            let constant = fit(&samples).constant();
            let longest = samples.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
            proptest::prop_assert!((0.0..=longest * (1.0 + 1e-6)).contains(&constant), "{constant} {longest}");
        }
    }
}
