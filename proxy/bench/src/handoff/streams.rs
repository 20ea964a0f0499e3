//! Measures the effect of KV imports on running streams.

use baton_proxy::serve::CommandFailure;
use baton_tryout::node_process::NodeProcess;
use baton_tryout::stats::{median, percentile};
use serde::Serialize;

use super::pair::{HandoffBench, pull};
use crate::timeline::{Timeline, greedy, stream};

/// Streams that run while KV is imported. The decode node has one more slot.
const N_STREAMS: usize = 3;

/// Tokens of a stream's prompt.
const PROMPT: usize = 32;

/// Gaps between tokens, milliseconds.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Streams {
    pub(super) n_streams: usize,
    /// Tokens of each import.
    pub(super) n_imported: usize,
    /// Imports while the streams ran, one after another.
    pub(super) n_imports: usize,
    /// The median time of an import while the streams run.
    pub(super) import_total_ms: f64,
    pub(super) without: Gaps,
    pub(super) with: Gaps,
}

/// Gaps between tokens, over all streams.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Gaps {
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) max_ms: f64,
}

impl Gaps {
    fn of(timelines: &[Timeline]) -> Gaps {
        let gaps: Vec<f64> = timelines.iter().flat_map(Timeline::gaps).map(|s| s * 1e3).collect();
        let at = |p| percentile(&gaps, p);
        Gaps { p50_ms: at(50.0), p99_ms: at(99.0), max_ms: at(100.0) }
    }
}

pub(super) async fn measure(bench: &mut HandoffBench) -> Result<Streams, CommandFailure> {
    let node = bench.decode(&["--role", "decode", "--slots", "4"]).await?;
    let imported = bench.long[..bench.sizes.joining.min(bench.long.len())].to_vec();
    eprintln!("running streams: alone");
    pull(&node, &bench.prefill.url, imported.clone()).await?;
    let without = run(bench, &node).await?;
    bench.forget(&node, N_STREAMS + 1).await?;
    eprintln!("running streams: during imports of {} tokens", imported.len());
    let mut imports = Vec::new();
    let with = {
        let url = bench.prefill.url.clone();
        let requests = requests(bench);
        let streams = futures::future::try_join_all(requests.into_iter().map(|request| stream(&node.engine, request)));
        let mut streams = std::pin::pin!(streams);
        loop {
            let again = async {
                let pulled = pull(&node, &url, imported.clone()).await?;
                bench.forget(&node, 1).await?;
                Ok::<_, CommandFailure>(pulled.timings.total_ms)
            };
            tokio::select! {
                finished = &mut streams => break finished?,
                import = again => imports.push(import?),
            }
        }
    };
    Ok(Streams {
        n_streams: N_STREAMS,
        n_imported: imported.len(),
        n_imports: imports.len(),
        import_total_ms: median(&imports),
        without: Gaps::of(&without),
        with: Gaps::of(&with),
    })
}

async fn run(bench: &mut HandoffBench, node: &NodeProcess) -> Result<Vec<Timeline>, CommandFailure> {
    let requests = requests(bench);
    futures::future::try_join_all(requests.into_iter().map(|request| stream(&node.engine, request))).await
}

fn requests(bench: &mut HandoffBench) -> Vec<baton_schemas::SequenceRequest> {
    (0..N_STREAMS).map(|_| greedy(bench.prompts.next(PROMPT), bench.sizes.stream)).collect()
}
