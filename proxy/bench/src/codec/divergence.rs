//! How far predictions lie from the expected ones.

/// One token's predictions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Divergence {
    /// KL(expected ‖ found), nats.
    pub(super) kl: f64,
    /// The likeliest token is the same.
    pub(super) agrees: bool,
}

/// Compares the logits of each token.
pub(super) fn all(expected: &[Vec<f32>], found: &[Vec<f32>]) -> Vec<Divergence> {
    expected.iter().zip(found).map(|(expected, found)| between(expected, found)).collect()
}

fn between(expected: &[f32], found: &[f32]) -> Divergence {
    let (p_norm, q_norm) = (log_sum(expected), log_sum(found));
    let terms = expected.iter().zip(found).map(|(&p, &q)| {
        let p = f64::from(p) - p_norm;
        p.exp() * (p - (f64::from(q) - q_norm))
    });
    let kl: f64 = terms.sum();
    // `max` would take NaN for 0, which is equality.
    let kl = if kl.is_nan() { f64::INFINITY } else { kl.max(0.0) };
    Divergence { kl, agrees: likeliest(expected) == likeliest(found) }
}

/// The logarithm of the sum of exponentials.
fn log_sum(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    largest + logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum::<f64>().ln()
}

fn likeliest(logits: &[f32]) -> Option<usize> {
    logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_that_of_the_distributions() {
        let of = |p: f32| vec![p.ln() + 3.0, (1.0 - p).ln() + 3.0];
        let same = between(&of(0.75), &of(0.75));
        assert!(same.kl < 1e-12 && same.agrees);
        let other = between(&of(0.75), &of(0.25));
        let kl = 0.75 * 3f64.ln() - 0.25 * 3f64.ln();
        assert!((other.kl - kl).abs() < 1e-6 && !other.agrees, "{other:?}");
        assert_eq!(between(&[1.0, f32::NAN], &[1.0, 2.0]).kl, f64::INFINITY);
    }
}
