//! How many of a model's first layers a worker computes of prompts, while the machine that holds the whole model computes the
//! others.
//!
//! The two compute different batches of a step at the same time, so the slower one decides; it waits for the first batch, or computes
//! the last one alone. The KV of the lent layers crosses the link after the step, while both wait. With `k` of `n` layers lent and `b`
//! batches in a step, a token takes
//!
//! ```text
//! (k · worker + (n − k) · own + (b − 1) · max(k · worker, (n − k) · own)) / b + k · link
//! ```
//!
//! `own` is measured with no layers lent, the other two with some: one number shows their sum, a second one tells them apart.

/// The most numbers of layers that are tried: for each, the weights travel anew.
pub const MAX_TRIED: usize = 3;

/// The most changes of the number: back to one that was better, too.
pub const MAX_CHANGES: usize = MAX_TRIED + 1;

/// The longest time with lent layers, in relation to that without, for which they are lent: a gain of 5 %.
const WORTH_LENDING: f64 = 1.0 / 1.05;

/// The same for another number of layers, in relation to that with the best so far.
const WORTH_CHANGING: f64 = 1.0 / 1.02;

/// Steps between a link that costs nothing and one that costs all, of which the likeliest is found.
const LINK_STEPS: u32 = 100;

/// A prefill rate that was measured with some layers lent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredSplit {
    /// The number of lent layers, at least one.
    pub n_lent: u32,
    /// Tokens per second of both machines together.
    pub tps: f64,
}

/// The machine that holds the whole model, and what it may lend.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerSplit {
    /// Layers of the model, at least one.
    pub n_layers: u32,
    /// The most layers that the worker's memory holds.
    pub most: u32,
    /// The prefill rate of the machine alone, tokens per second.
    pub own_tps: f64,
    /// Batches of a step, at least one.
    pub n_batches: u32,
}

/// Seconds that one layer takes for a token.
#[derive(Debug, Clone, Copy)]
struct LayerCosts {
    worker: f64,
    link: f64,
    own: f64,
}

impl LayerSplit {
    /// The number of layers to lend after `n_lent`, 0 if none pays. `measured` has each number that was tried once. What is no measurement
    /// changes nothing.
    pub fn next(&self, n_lent: u32, measured: &[MeasuredSplit]) -> u32 {
        let Some(now) = measured.iter().find(|split| split.n_lent == n_lent) else { return n_lent };
        let is_rate = |tps: f64| tps.is_finite() && tps > 0.0;
        let is_number = |n: u32| (1..=self.n_layers).contains(&n);
        if !is_rate(self.own_tps) || measured.iter().any(|split| !is_rate(split.tps) || !is_number(split.n_lent)) {
            return n_lent;
        }
        let alone = 1.0 / self.own_tps;
        let fastest = measured.iter().max_by(|a, b| a.tps.total_cmp(&b.tps)).unwrap_or(now);
        if measured.len() < MAX_TRIED {
            let costs = self.costs(measured, now);
            let most = self.most.clamp(1, self.n_layers);
            let seconds = |n_lent: u32| self.seconds(n_lent, costs);
            let best = (1..=most).min_by(|a, b| seconds(*a).total_cmp(&seconds(*b))).unwrap_or(most);
            let known = alone.min(1.0 / fastest.tps);
            if measured.iter().all(|split| split.n_lent != best) && seconds(best) < WORTH_CHANGING * known {
                return best;
            }
        }
        match 1.0 / fastest.tps {
            seconds if seconds > WORTH_LENDING * alone => 0,
            seconds if seconds > WORTH_CHANGING / now.tps => n_lent,
            _ => fastest.n_lent,
        }
    }

    /// The numbers that are lent one after another, if `tps` is measured with each: at first as many as the worker's memory holds.
    pub fn all(&self, tps: impl Fn(u32) -> f64) -> Vec<u32> {
        let (mut all, mut measured, mut now) = (vec![self.most], Vec::<MeasuredSplit>::new(), self.most);
        while now > 0 && all.len() <= MAX_CHANGES {
            if measured.iter().all(|split| split.n_lent != now) {
                measured.push(MeasuredSplit { n_lent: now, tps: tps(now) });
            }
            match self.next(now, &measured) {
                next if next == now => break,
                next => now = next,
            }
            all.push(now);
        }
        all
    }

    /// The costs that explain the measurements best.
    fn costs(&self, measured: &[MeasuredSplit], now: &MeasuredSplit) -> LayerCosts {
        // With the most layers lent, the worker shows most.
        let shown = measured.iter().max_by_key(|split| split.n_lent).unwrap_or(now);
        // One measurement does not tell a slow worker from a slow link. A worker would make the next one worth more.
        let steps = if measured.len() == 1 { 0 } else { LINK_STEPS };
        let with_link = |step: u32| {
            let link = 1.0 / shown.tps / f64::from(shown.n_lent) * f64::from(step) / f64::from(LINK_STEPS);
            self.with_link(shown, link)
        };
        let error = |costs: &LayerCosts| -> f64 {
            measured.iter().map(|split| (self.seconds(split.n_lent, *costs) * split.tps - 1.0).powi(2)).sum()
        };
        let all = (0..=steps).map(with_link);
        all.min_by(|a, b| error(a).total_cmp(&error(b))).unwrap_or_else(|| with_link(0))
    }

    /// The costs by one measurement, if the link's are these.
    fn with_link(&self, shown: &MeasuredSplit, link: f64) -> LayerCosts {
        let own = 1.0 / self.own_tps / f64::from(self.n_layers);
        let (lent, batches) = (f64::from(shown.n_lent), f64::from(self.n_batches.max(1)));
        let of_own = f64::from(self.n_layers - shown.n_lent) * own;
        let seconds = 1.0 / shown.tps - lent * link;
        let of_worker = match seconds - of_own / batches {
            waited_for if waited_for >= of_own => waited_for,
            _ => (batches * (seconds - of_own)).max(0.0),
        };
        LayerCosts { worker: of_worker / lent, link, own }
    }

    fn seconds(&self, n_lent: u32, costs: LayerCosts) -> f64 {
        let (lent, batches) = (f64::from(n_lent), f64::from(self.n_batches.max(1)));
        let (of_worker, of_own) = (lent * costs.worker, f64::from(self.n_layers - n_lent) * costs.own);
        (of_worker + of_own + (batches - 1.0) * of_worker.max(of_own)) / batches + lent * costs.link
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Batches of a step.
    const N_BATCHES: u32 = 8;

    /// By the rates of two machines that each compute all 32 layers, and seconds for a layer of a token on the link.
    #[derive(Clone, Copy)]
    struct TwoMachines {
        worker_tps: f64,
        own_tps: f64,
        link: f64,
    }

    impl TwoMachines {
        fn split(self, most: u32) -> LayerSplit {
            LayerSplit { n_layers: 32, most, own_tps: self.own_tps, n_batches: N_BATCHES }
        }

        fn seconds(self, n_lent: u32) -> f64 {
            let of_all = |tps: f64| 1.0 / tps / 32.0;
            let costs = LayerCosts { worker: of_all(self.worker_tps), link: self.link, own: of_all(self.own_tps) };
            if n_lent == 0 { 1.0 / self.own_tps } else { self.split(32).seconds(n_lent, costs) }
        }

        /// The numbers that are lent one after another, the first ones by memory.
        fn tried(self, most: u32) -> Vec<u32> {
            let tried = self.split(most).all(|n_lent| 1.0 / self.seconds(n_lent));
            assert!(tried.len() <= MAX_CHANGES, "it comes to an end: {tried:?}");
            tried
        }
    }

    /// A DGX Spark and an M3 Ultra, as published for Llama 3.1 8B.
    const SPARK_AND_MAC: TwoMachines = TwoMachines { worker_tps: 5_570.0, own_tps: 1_470.0, link: 0.0 };

    const EQUAL: TwoMachines = TwoMachines { worker_tps: 1_000.0, own_tps: 1_000.0, link: 0.0 };

    #[test]
    fn the_layers_are_balanced_by_measured_rates() {
        assert_eq!(SPARK_AND_MAC.tried(32), [32, 26]);
        assert_eq!(EQUAL.tried(32), [32, 16]);
        assert_eq!(EQUAL.tried(20), [20, 16]);
        // Memory for fewer: the own machine decides, and the worker has time to spare.
        assert_eq!(SPARK_AND_MAC.tried(12), [12]);
        assert_eq!(SPARK_AND_MAC.tried(26), [26]);
    }

    #[test]
    fn a_slow_link_is_told_from_a_slow_worker_by_a_second_number() {
        let tried = TwoMachines { link: 1.3e-5, ..SPARK_AND_MAC }.tried(32);
        assert!(tried.len() == 3 && tried[1] < 20 && tried[2] > 23, "{tried:?}");
        assert_eq!(TwoMachines { link: 3e-5, ..SPARK_AND_MAC }.tried(32).last(), Some(&0));
    }

    #[test]
    fn the_last_number_is_nearly_the_best() {
        for link in [0.0, 1e-6, 3e-6, 1e-5, 2e-5, 4e-5] {
            for worker_tps in [500.0, 1_000.0, 2_000.0, 5_000.0, 20_000.0] {
                for most in [1, 4, 8, 12, 16, 20, 24, 28, 32] {
                    let machines = TwoMachines { worker_tps, own_tps: 1_000.0, link };
                    let tried = machines.tried(most);
                    let last = machines.seconds(tried[tried.len() - 1]);
                    let best = (0..=most).map(|n| machines.seconds(n)).fold(f64::INFINITY, f64::min);
                    assert!(last <= 1.051 * best, "{worker_tps} {link} {most}: {tried:?} {last} {best}");
                }
            }
        }
    }

    #[test]
    fn none_is_lent_to_a_worker_that_does_not_help() {
        assert_eq!(TwoMachines { worker_tps: 50.0, ..SPARK_AND_MAC }.tried(32).last(), Some(&0));
        assert_eq!(EQUAL.tried(1), [1, 0], "one layer in 32 gains less than it is worth");
    }

    #[test]
    fn a_number_that_was_better_is_taken_again() {
        let split = EQUAL.split(32);
        let measured = [(32, 1_500.0), (14, 1_200.0), (22, 1_300.0)];
        let measured = measured.map(|(n_lent, tps)| MeasuredSplit { n_lent, tps });
        assert_eq!(split.next(22, &measured), 32);
        let nearly = [MeasuredSplit { n_lent: 32, tps: 1_310.0 }, measured[1], measured[2]];
        assert_eq!(split.next(22, &nearly), 22, "what gains little changes nothing");
    }

    #[test]
    fn what_is_no_measurement_changes_nothing() {
        let split = EQUAL.split(32);
        let measured = MeasuredSplit { n_lent: 20, tps: 1_500.0 };
        assert_eq!(LayerSplit { own_tps: 0.0, ..split }.next(20, &[measured]), 20);
        assert_eq!(LayerSplit { own_tps: f64::NAN, ..split }.next(20, &[measured]), 20);
        assert_eq!(LayerSplit { n_layers: 10, ..split }.next(20, &[measured]), 20);
        assert_eq!(split.next(20, &[MeasuredSplit { tps: f64::INFINITY, ..measured }]), 20);
        assert_eq!(split.next(7, &[measured]), 7, "it was not measured yet");
    }
}
