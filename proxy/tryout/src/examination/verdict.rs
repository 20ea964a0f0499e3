//! The verdict on a check's differences.

use serde::Serialize;

use super::compare::Difference;

/// Mean KL in nats up to which kernels of different devices are as close as they can be. Measured with the smallest model and
/// weights of 4 bits, the worst case: 1.5e-2 from a processor to an H200, 8e-3 across software Vulkan and a processor. Where the
/// cells of a sliding window lie alone moves it by 5e-3.
const MAX_KL: f64 = 3e-2;

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "verdict", content = "why")]
pub enum Verdict {
    /// Equal to the bit.
    Exact,
    /// Within the rounding differences of different kernels.
    Close,
    /// A wrong reply, or an error.
    Failed(String),
}

/// How the two ends of a handoff compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ends {
    /// Equal weights, kernels and devices: every number must be equal.
    Same,
    /// Equal weights, computed by other kernels.
    OtherKernels,
    /// Other weights of the same model, which the operator has allowed.
    OtherWeights,
}

impl Default for Verdict {
    fn default() -> Verdict {
        Verdict::Failed(String::new())
    }
}

impl Verdict {
    /// The verdict on the worst round.
    pub(super) fn on(Difference { mean_kl, is_exact, .. }: Difference, ends: Ends) -> Verdict {
        let limit = format!("different kernels explain at most {MAX_KL:.0e}");
        match ends {
            _ if is_exact => Verdict::Exact,
            Ends::Same => Verdict::Failed(
                "the reply differs from the one that was computed here, although the device is the same".into(),
            ),
            _ if mean_kl <= MAX_KL => Verdict::Close,
            Ends::OtherKernels => Verdict::Failed(format!("the mean KL is {mean_kl:.1e}; {limit}")),
            Ends::OtherWeights => {
                let why = "the nodes have different weights, which costs more than that";
                Verdict::Failed(format!("the mean KL is {mean_kl:.1e}; {limit}, and {why}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIFFERENCE: Difference = Difference { mean_kl: 2e-3, n_compared: 8, n_agreed: 7, is_exact: false };

    #[test]
    fn the_verdict_depends_on_the_device_and_the_distance() {
        let exact = Difference { mean_kl: 0.0, is_exact: true, ..DIFFERENCE };
        assert_eq!(Verdict::on(exact, Ends::Same), Verdict::Exact);
        assert_eq!(Verdict::on(DIFFERENCE, Ends::OtherKernels), Verdict::Close);
        assert!(matches!(Verdict::on(DIFFERENCE, Ends::Same), Verdict::Failed(_)));
        let far = Difference { mean_kl: 0.5, ..DIFFERENCE };
        let kernels = Verdict::on(far, Ends::OtherKernels);
        assert!(matches!(kernels, Verdict::Failed(why) if why.contains("5.0e-1") && !why.contains("weights")));
        assert!(
            matches!(Verdict::on(far, Ends::OtherWeights), Verdict::Failed(why) if why.contains("different weights"))
        );
    }
}
