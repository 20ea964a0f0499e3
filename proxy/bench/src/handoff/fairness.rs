//! Measures a short prompt that arrives after a long one on the same prefill node.

use std::time::Duration;

use baton_proxy::serve::CommandFailure;
use serde::Serialize;

use super::pair::{HandoffBench, pull};

/// Tokens of the prompt that arrives later.
const SHORT: usize = 200;

/// The delay of the short prompt. The long one is well under way by then.
const LATER: Duration = Duration::from_millis(200);

/// Times to first token, milliseconds.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Fairness {
    pub(super) n_short: usize,
    pub(super) n_long: usize,
    pub(super) short_alone_ms: f64,
    pub(super) long_alone_ms: f64,
    pub(super) short_behind_ms: f64,
    pub(super) long_shared_ms: f64,
}

pub(super) async fn measure(bench: &mut HandoffBench) -> Result<Fairness, CommandFailure> {
    let node = bench.decode(&["--role", "decode"]).await?;
    let url = bench.prefill.url.clone();
    let n_long = bench.long.len();
    eprintln!("fair share: {SHORT} and {n_long} tokens, each alone");
    let short_alone = pull(&node, &url, bench.prompts.next(SHORT)).await?;
    let long_alone = pull(&node, &url, bench.prompts.next(n_long)).await?;
    eprintln!("fair share: together");
    let short = bench.prompts.next(SHORT);
    let long = bench.long.clone();
    let behind = async {
        tokio::time::sleep(LATER).await;
        pull(&node, &url, short).await
    };
    let (long, short) = tokio::join!(pull(&node, &url, long), behind);
    Ok(Fairness {
        n_short: SHORT,
        n_long,
        short_alone_ms: short_alone.ttft_ms,
        long_alone_ms: long_alone.ttft_ms,
        short_behind_ms: short?.ttft_ms,
        long_shared_ms: long?.ttft_ms,
    })
}
