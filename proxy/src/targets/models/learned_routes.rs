//! Measurements of a model's routes: rates of links, lengths of replies, and corrections of predictions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_planner::cost::Route;
use baton_planner::rates::{Curve, LengthFactors, TransferRates};
use tokio::time::Instant;

use crate::targets::text_prefixes::TextPrefixes;

/// The expected length of a reply before any reply was seen.
const FIRST_GUESS_TOKENS: f64 = 256.0;

/// The range of corrections. A factor beyond it comes from an outage and not from the cost model.
const CORRECTIONS: std::ops::RangeInclusive<f64> = 0.2..=5.0;

/// The measurements of a model's routes. Nodes are indices into the model's lists.
#[derive(Debug)]
pub struct LearnedRoutes {
    /// Conversations that the nodes had, where upstreams serve the same model.
    pub texts: Arc<TextPrefixes>,
    learned: Mutex<RouteMeasurements>,
    turns: AtomicU64,
}

#[derive(Debug, Clone)]
struct RouteMeasurements {
    links: Vec<Vec<TransferRates>>,
    kv_distances: Vec<Vec<Option<f64>>>,
    corrections: Vec<Vec<[RouteCorrection; LengthFactors::N_CLASSES]>>,
    /// Tokens of a reply, by its client's limit.
    n_output: Curve,
}

/// The error factor of a route's predictions for prompts of about one length. It fades, so that a route is tried again after one
/// bad request.
#[derive(Debug, Clone, Copy)]
struct RouteCorrection {
    /// Logarithm of the factor at the time `at`.
    ln: f64,
    at: Instant,
}

impl RouteCorrection {
    fn none() -> RouteCorrection {
        RouteCorrection { ln: 0.0, at: Instant::now() }
    }

    fn ln_now(&self) -> f64 {
        self.ln * 0.5f64.powf(self.at.elapsed().as_secs_f64() / HALF_LIFE.as_secs_f64())
    }
}

/// A copy for a snapshot.
#[derive(Debug, Clone)]
pub struct LearnedRoutesView {
    /// `[prefill][decode]`.
    pub links: Vec<Vec<TransferRates>>,
    /// The last measured KV distance between two nodes with other weights, `[prefill][decode]`.
    pub kv_distances: Vec<Vec<Option<f64>>>,
    /// See [`Snapshot`](baton_planner::snapshot::Snapshot).
    pub corrections: Vec<Vec<LengthFactors>>,
    /// Tokens of a reply, by its client's limit; see [`expected_output`].
    pub n_output: Curve,
}

impl LearnedRoutes {
    /// Nothing is measured yet.
    pub fn new(n_prefill: usize, n_decode: usize) -> LearnedRoutes {
        let learned = RouteMeasurements {
            links: vec![vec![TransferRates::default(); n_decode]; n_prefill],
            kv_distances: vec![vec![None; n_decode]; n_prefill],
            corrections: vec![vec![[RouteCorrection::none(); LengthFactors::N_CLASSES]; n_decode]; n_prefill + 1],
            n_output: Curve::default(),
        };
        LearnedRoutes { texts: Arc::default(), learned: Mutex::new(learned), turns: AtomicU64::new(0) }
    }

    /// The same measurements for other lists of nodes: each entry is the node's index here, if it has one.
    pub fn moved(&self, prefill: &[Option<usize>], decode: &[Option<usize>]) -> LearnedRoutes {
        let known = self.lock().clone();
        let new = LearnedRoutes { texts: Arc::clone(&self.texts), ..LearnedRoutes::new(prefill.len(), decode.len()) };
        let mut learned = new.lock();
        for (d, was_d) in decode.iter().enumerate() {
            let Some(was_d) = *was_d else { continue };
            for (p, was_p) in prefill.iter().enumerate() {
                let Some(was_p) = *was_p else { continue };
                learned.links[p][d] = known.links[was_p][was_d];
                learned.kv_distances[p][d] = known.kv_distances[was_p][was_d];
                learned.corrections[p + 1][d] = known.corrections[was_p + 1][was_d];
            }
            learned.corrections[0][d] = known.corrections[0][was_d];
        }
        learned.n_output = known.n_output;
        drop(learned);
        new
    }

    /// A copy of the current measurements.
    pub fn view(&self) -> LearnedRoutesView {
        let RouteMeasurements { links, kv_distances, corrections, n_output } = self.lock().clone();
        let factors = |classes: &[RouteCorrection; LengthFactors::N_CLASSES]| {
            LengthFactors(classes.map(|correction| correction.ln_now().exp()))
        };
        let corrections = corrections.iter().map(|row| row.iter().map(factors).collect()).collect();
        LearnedRoutesView { links, kv_distances, corrections, n_output }
    }

    /// The number that the next request will get.
    pub fn turn(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Takes the next request's number.
    pub fn next_turn(&self) -> u64 {
        self.turns.fetch_add(1, Ordering::Relaxed)
    }

    /// Updates the rates of a link.
    pub fn learn_link(&self, prefill: usize, decode: usize, update: impl FnOnce(&mut TransferRates)) {
        if let Some(link) = self.lock().links.get_mut(prefill).and_then(|row| row.get_mut(decode)) {
            update(link);
        }
    }

    /// The KV of two nodes with other weights was compared.
    pub fn learn_kv_distance(&self, prefill: usize, decode: usize, distance: f64) {
        if let Some(known) = self.lock().kv_distances.get_mut(prefill).and_then(|row| row.get_mut(decode)) {
            *known = Some(distance);
        }
    }

    /// A reply had this many tokens, of at most `max_tokens`.
    pub fn learn_output(&self, max_tokens: Option<u32>, n_tokens: u32) {
        self.lock().n_output.learn(limit(max_tokens), f64::from(n_tokens.max(1)));
    }

    /// A route's own part of the time to a first token, without waiting for other requests, was `actual_ms` for a prompt with
    /// `n_tokens` to compute, where `predicted_ms` was predicted with all corrections.
    pub fn correct(&self, route: Route, n_tokens: u32, predicted_ms: f64, actual_ms: f64) {
        let Some(ln) = ln_ratio(predicted_ms, actual_ms) else { return };
        let row = route.prefill.map_or(0, |p| 1 + p);
        if let Some(classes) = self.lock().corrections.get_mut(row).and_then(|row| row.get_mut(route.decode)) {
            let correction = &mut classes[LengthFactors::class(n_tokens.into())];
            // In logarithms, so that twice and half are equally wrong.
            let ln = (correction.ln_now() + LEARNING_RATE * ln).clamp(CORRECTIONS.start().ln(), CORRECTIONS.end().ln());
            *correction = RouteCorrection { ln, at: Instant::now() };
        }
    }

    fn lock(&self) -> MutexGuard<'_, RouteMeasurements> {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Logarithm of actual ÷ predicted; `None` unless both are positive.
fn ln_ratio(predicted_ms: f64, actual_ms: f64) -> Option<f64> {
    let ratio = (actual_ms + NOISE_MS) / (predicted_ms + NOISE_MS);
    (predicted_ms > 0.0 && actual_ms > 0.0).then(|| ratio.ln())
}

/// The expected tokens of a reply of at most `max_tokens`, from earlier replies under a similar limit. Clients that want a
/// label and clients that want an essay set different limits.
pub fn expected_output(seen: &Curve, max_tokens: Option<u32>) -> f64 {
    let limit = limit(max_tokens);
    seen.at(limit).unwrap_or(FIRST_GUESS_TOKENS).min(limit)
}

fn limit(max_tokens: Option<u32>) -> f64 {
    // No limit counts as larger than every real one.
    max_tokens.map_or(f64::from(u32::MAX), |n| f64::from(n.max(1)))
}

/// Milliseconds added to both times of a ratio: for a short prompt an error of some milliseconds is relatively large, but
/// not an error of the cost model.
const NOISE_MS: f64 = 50.0;

/// After this time half of a correction is left.
const HALF_LIFE: Duration = Duration::from_secs(600);

/// The share of an error that one request corrects. The rest may be noise.
const LEARNING_RATE: f64 = 0.2;

#[cfg(test)]
mod tests {
    use super::*;

    const HANDOFF: Route = Route { decode: 0, prefill: Some(0) };

    #[test]
    fn a_systematic_error_is_gone_within_twenty_requests() {
        let routes = LearnedRoutes::new(1, 1);
        // The model says 1,000 ms for what takes 2,500.
        let correction = |row: usize, n_tokens: f64| routes.view().corrections[row][0].at(n_tokens);
        for _ in 0..20 {
            routes.correct(HANDOFF, 500, 1_000.0 * correction(1, 500.0), 2_500.0);
        }
        assert!((correction(1, 500.0) / 2.5 - 1.0).abs() < 0.02, "{}", correction(1, 500.0));
        assert!((correction(0, 500.0) - 1.0).abs() < 1e-9, "other routes are not touched");
        assert!((correction(1, 8_000.0) - 1.0).abs() < 1e-9, "nor are prompts of another length");
    }

    #[tokio::test(start_paused = true)]
    async fn a_correction_that_nothing_confirms_fades() {
        let routes = LearnedRoutes::new(1, 1);
        for _ in 0..50 {
            routes.correct(HANDOFF, 500, 1_000.0, 4_000.0);
        }
        let correction = || routes.view().corrections[1][0].at(500.0);
        assert!(correction() > 4.9, "{}", correction());
        tokio::time::sleep(HALF_LIFE).await;
        assert!((correction() - 5f64.sqrt()).abs() < 0.05, "{}", correction());
        tokio::time::sleep(10 * HALF_LIFE).await;
        assert!(correction() < 1.01, "{}", correction());
    }

    #[test]
    fn a_reply_is_expected_to_be_as_long_as_others_under_its_limit() {
        let routes = LearnedRoutes::new(0, 1);
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
        let routes = LearnedRoutes::new(0, 1);
        for (predicted, actual) in [(0.0, 5.0), (5.0, 0.0), (f64::NAN, 1.0), (1.0, 1e12), (1.0, 1e12)] {
            routes.correct(Route { prefill: None, decode: 0 }, 500, predicted, actual);
        }
        let correction = routes.view().corrections[0][0].at(500.0);
        assert!(CORRECTIONS.contains(&correction), "{correction}");
    }
}
