//! What was learned about a model's routes: links, how long replies are, and by how much predictions were wrong.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_planner::rates::{Curve, LinkRates, ewma};
use tokio::time::Instant;

/// Output length expected before any reply was seen.
const FIRST_GUESS_TOKENS: f64 = 256.0;

/// Corrections stay within these: a factor beyond them is no error of the model but an outage.
const CORRECTIONS: std::ops::RangeInclusive<f64> = 0.2..=5.0;

/// See the module. Nodes are named by their places in the model's lists.
#[derive(Debug)]
pub struct Routes {
    learned: Mutex<Learned>,
    turns: AtomicU64,
}

#[derive(Debug, Clone)]
struct Learned {
    links: Vec<Vec<LinkRates>>,
    corrections: Vec<Vec<Correction>>,
    /// Tokens of a reply, by the most that its client would take.
    n_output: Curve,
    /// Mean of |ln(actual ÷ predicted)| of the time to first token, over the last predictions.
    error: f64,
}

/// What a route's predictions have been wrong by. It fades, so that a route which is avoided for what happened once is
/// tried again.
#[derive(Debug, Clone, Copy)]
struct Correction {
    /// Of the factor, when it was learned.
    ln: f64,
    at: Instant,
}

impl Correction {
    fn none() -> Correction {
        Correction { ln: 0.0, at: Instant::now() }
    }

    fn ln_now(&self) -> f64 {
        self.ln * 0.5f64.powf(self.at.elapsed().as_secs_f64() / HALF_LIFE.as_secs_f64())
    }
}

/// A copy of what is known, for a snapshot.
#[derive(Debug, Clone)]
pub struct RoutesView {
    /// `[prefill][decode]`.
    pub links: Vec<Vec<LinkRates>>,
    /// See [`Snapshot`](baton_planner::snapshot::Snapshot).
    pub corrections: Vec<Vec<f64>>,
    /// Tokens of a reply, by the most that its client would take; see [`expected_output`].
    pub n_output: Curve,
    /// Mean absolute error of predicted times to first token, as a factor's logarithm.
    pub error: f64,
}

impl Routes {
    /// Nothing known of so many nodes.
    pub fn new(n_prefill: usize, n_decode: usize) -> Routes {
        let learned = Learned {
            links: vec![vec![LinkRates::default(); n_decode]; n_prefill],
            corrections: vec![vec![Correction::none(); n_decode]; n_prefill + 1],
            n_output: Curve::default(),
            error: 0.0,
        };
        Routes { learned: Mutex::new(learned), turns: AtomicU64::new(0) }
    }

    /// What is known now.
    pub fn view(&self) -> RoutesView {
        let Learned { links, corrections, n_output, error } = self.lock().clone();
        let factors = |row: &Vec<Correction>| row.iter().map(|correction| correction.ln_now().exp()).collect();
        let corrections = corrections.iter().map(factors).collect();
        RoutesView { links, corrections, n_output, error }
    }

    /// The number that the next request will have.
    pub fn turn(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// The next request's number.
    pub fn next_turn(&self) -> u64 {
        self.turns.fetch_add(1, Ordering::Relaxed)
    }

    /// Takes a measurement of a link into account.
    pub fn learn_link(&self, prefill: usize, decode: usize, update: impl FnOnce(&mut LinkRates)) {
        if let Some(link) = self.lock().links.get_mut(prefill).and_then(|row| row.get_mut(decode)) {
            update(link);
        }
    }

    /// A reply had this many tokens, of at most `max_tokens`.
    pub fn learn_output(&self, max_tokens: Option<u32>, n_tokens: u32) {
        self.lock().n_output.learn(limit(max_tokens), f64::from(n_tokens.max(1)));
    }

    /// A request's first token came after `actual_ms`, where `predicted_ms` was predicted.
    pub fn note_error(&self, predicted_ms: f64, actual_ms: f64) {
        if let Some(ln) = ln_ratio(predicted_ms, actual_ms) {
            let mut learned = self.lock();
            learned.error = ewma(learned.error, ln.abs().max(1e-6));
        }
    }

    /// A route's own part of the time to a first token, without waiting for other requests, was `actual_ms`, where
    /// `predicted_ms` was predicted with all corrections.
    pub fn correct(&self, prefill: Option<usize>, decode: usize, predicted_ms: f64, actual_ms: f64) {
        let Some(ln) = ln_ratio(predicted_ms, actual_ms) else { return };
        let row = prefill.map_or(0, |p| 1 + p);
        if let Some(correction) = self.lock().corrections.get_mut(row).and_then(|row| row.get_mut(decode)) {
            // In logarithms, so that twice and half are equally far from right.
            let ln = (correction.ln_now() + LEARNING_RATE * ln).clamp(CORRECTIONS.start().ln(), CORRECTIONS.end().ln());
            *correction = Correction { ln, at: Instant::now() };
        }
    }

    fn lock(&self) -> MutexGuard<'_, Learned> {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The logarithm of what a prediction was wrong by. `None` for nonsense.
fn ln_ratio(predicted_ms: f64, actual_ms: f64) -> Option<f64> {
    let ratio = (actual_ms + NOISE_MS) / (predicted_ms + NOISE_MS);
    (predicted_ms > 0.0 && actual_ms > 0.0).then(|| ratio.ln())
}

/// Tokens that a reply of at most `max_tokens` will probably have, going by those before it. Clients that want a label
/// and clients that want an essay set different limits, so replies under a similar limit tell the most.
pub fn expected_output(seen: &Curve, max_tokens: Option<u32>) -> f64 {
    let limit = limit(max_tokens);
    seen.at(limit).unwrap_or(FIRST_GUESS_TOKENS).min(limit)
}

fn limit(max_tokens: Option<u32>) -> f64 {
    // Without a limit: beyond every real one.
    max_tokens.map_or(f64::from(u32::MAX), |n| f64::from(n.max(1)))
}

/// An error of some milliseconds is large for a short prompt and says nothing about a long one. Milliseconds.
const NOISE_MS: f64 = 50.0;

/// After so long half of a correction is left, if nothing has confirmed it.
const HALF_LIFE: Duration = Duration::from_secs(600);

/// Share of an error that is corrected at once. The rest may be noise.
const LEARNING_RATE: f64 = 0.2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_systematic_error_is_gone_within_twenty_requests() {
        let routes = Routes::new(1, 1);
        // The model says 1,000 ms for what takes 2,500.
        for _ in 0..20 {
            let correction = routes.view().corrections[1][0];
            routes.correct(Some(0), 0, 1_000.0 * correction, 2_500.0);
        }
        let correction = routes.view().corrections[1][0];
        assert!((correction / 2.5 - 1.0).abs() < 0.02, "{correction}");
        assert!((routes.view().corrections[0][0] - 1.0).abs() < 1e-9, "other routes are not touched");
    }

    #[tokio::test(start_paused = true)]
    async fn a_correction_that_nothing_confirms_fades() {
        let routes = Routes::new(1, 1);
        for _ in 0..50 {
            routes.correct(Some(0), 0, 1_000.0, 4_000.0);
        }
        let correction = || routes.view().corrections[1][0];
        assert!(correction() > 4.9, "{}", correction());
        tokio::time::sleep(HALF_LIFE).await;
        assert!((correction() - 5f64.sqrt()).abs() < 0.05, "{}", correction());
        tokio::time::sleep(10 * HALF_LIFE).await;
        assert!(correction() < 1.01, "{}", correction());
    }

    #[test]
    fn a_reply_is_expected_to_be_as_long_as_others_under_its_limit() {
        let routes = Routes::new(0, 1);
        let expected = |max_tokens| expected_output(&routes.view().n_output, max_tokens);
        assert_eq!((expected(None), expected(Some(16))), (FIRST_GUESS_TOKENS, 16.0));
        for (max_tokens, n_tokens) in [(Some(1_000), 700), (Some(16), 2), (None, 300)] {
            routes.learn_output(max_tokens, n_tokens);
        }
        assert_eq!((expected(Some(16)), expected(Some(1_000)), expected(None)), (2.0, 700.0, 300.0));
        assert!((2.0..700.0).contains(&expected(Some(128))), "between them");
    }

    #[test]
    fn an_outage_or_nonsense_does_not_spoil_the_model() {
        let routes = Routes::new(0, 1);
        for (predicted, actual) in [(0.0, 5.0), (5.0, 0.0), (f64::NAN, 1.0), (1.0, 1e12), (1.0, 1e12)] {
            routes.correct(None, 0, predicted, actual);
            routes.note_error(predicted, actual);
        }
        assert!(routes.view().error.is_finite());
        let correction = routes.view().corrections[0][0];
        assert!(CORRECTIONS.contains(&correction), "{correction}");
    }
}
