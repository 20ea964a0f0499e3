//! Measures the memory that a pull adds to both nodes. Their caches are allocated from the start and do not count.

use baton_proxy::serve::CommandFailure;
use baton_tryout::node_process::NodeProcess;
use serde::Serialize;

use super::pair::{HandoffBench, pull};
use crate::memory;
use crate::relay::Relay;

/// The time of the prompt's KV on the slow link.
const SLOW_SECONDS: f64 = 4.0;

/// One pull. Sizes in MiB; `None` if the system does not report them.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Footprint {
    pub(super) what: &'static str,
    /// Bytes of KV that were moved.
    pub(super) kv_mib: f64,
    pub(super) prefill: Growth,
    pub(super) decode: Growth,
}

/// A process before and during a pull.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Growth {
    pub(super) before_mib: Option<f64>,
    pub(super) peak_mib: Option<f64>,
}

impl Growth {
    /// The growth of the process at its peak.
    pub(super) fn added(&self) -> Option<f64> {
        Some(self.peak_mib? - self.before_mib?)
    }
}

pub(super) async fn measure(bench: &mut HandoffBench) -> Result<Vec<Footprint>, CommandFailure> {
    eprintln!("memory");
    let node = bench.decode(&["--role", "decode", "--slots", "1"]).await?;
    let prompt = bench.long.clone();
    // Do not measure the first use of both caches: the growth below must come from the transfer.
    let first = pull(&node, &bench.prefill.url, prompt.clone()).await?.timings;
    let slow = Relay::start(bench.prefill_address()?, first.n_bytes as f64 / SLOW_SECONDS).await?;
    let mut rows = Vec::new();
    for (what, url) in [("a pull at full speed", bench.prefill.url.clone()), ("a slow link", slow.url.clone())] {
        bench.forget(&node, 1).await?;
        let prefill_before_mib = before(&bench.prefill);
        let decode_before_mib = before(&node);
        let timings = pull(&node, &url, prompt.clone()).await?.timings;
        rows.push(Footprint {
            what,
            kv_mib: timings.n_bytes as f64 / f64::from(1 << 20),
            prefill: Growth {
                before_mib: prefill_before_mib,
                peak_mib: bench.prefill.pid().and_then(memory::peak_mib),
            },
            decode: Growth { before_mib: decode_before_mib, peak_mib: node.pid().and_then(memory::peak_mib) },
        });
    }
    Ok(rows)
}

/// The process's memory now. Resets its peak.
fn before(node: &NodeProcess) -> Option<f64> {
    let pid = node.pid()?;
    memory::forget_peak(pid)?;
    memory::resident_mib(pid)
}
