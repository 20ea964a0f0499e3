//! The two sides of a handoff as processes on loopback, and one pull between them.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use baton_link::Engine;
use baton_link::transport::Transport;
use baton_proxy::serve::CommandFailure;
use baton_schemas::Token;
use baton_schemas::handoff::{HandoffReport, KvSource};
use baton_tryout::capture::CaptureSource;
use baton_tryout::node_process::NodeProcess;
use baton_tryout::prompts::Prompts;

use super::sizes::HandoffSizes;
use crate::timeline::{Timeline, greedy, stream};

/// Tokens of a prompt that replaces the prompt in a slot.
const SHORT: usize = 2;

/// Tokens of a prompt that lets a fresh engine measure its rates and touch its memory before it is measured.
const WARM_UP: usize = 256;

/// Shared by all measurements: one prefill node, and the options of decode nodes.
pub(super) struct HandoffBench {
    pub(super) prefill: NodeProcess,
    pub(super) prompts: Prompts,
    pub(super) sizes: HandoffSizes,
    /// A long prompt that several measurements share, so that it is computed once.
    pub(super) long: Vec<Token>,
    pub(super) key: String,
    node_args: Vec<OsString>,
    transport: Transport,
}

/// A complete pull.
pub(super) struct Pull {
    /// The decode node's own report.
    pub(super) timings: HandoffReport,
    /// From the request to its first token, as the client sees it.
    pub(super) ttft_ms: f64,
}

impl HandoffBench {
    /// Starts the prefill node.
    pub(super) async fn start(
        model: PathBuf,
        threads: u32,
        sizes: HandoffSizes,
    ) -> Result<HandoffBench, CommandFailure> {
        let key = uuid::Uuid::new_v4().to_string();
        let node_args: Vec<OsString> =
            vec!["--model".into(), model.into(), "--threads".into(), threads.to_string().into()];
        let prefill = ["--role", "prefill"].map(OsString::from).into_iter().chain(node_args.iter().cloned());
        let prefill = NodeProcess::start(&key, prefill).await?;
        let mut prompts = Prompts::of(&prefill.engine).await?;
        let long = prompts.next(sizes.long);
        Ok(HandoffBench { prefill, prompts, sizes, long, key, node_args, transport: Transport::default() })
    }

    /// Starts a decode node with further arguments, and warms it up.
    pub(super) async fn decode(&mut self, extra: &[&str]) -> Result<NodeProcess, CommandFailure> {
        let args = extra.iter().map(OsString::from).chain(self.node_args.iter().cloned());
        let node = NodeProcess::start(&self.key, args).await?;
        measure_link(&node, &self.prefill.url).await?;
        let warm_up = self.prompts.next(WARM_UP);
        pull(&node, &self.prefill.url, warm_up).await?;
        Ok(node)
    }

    /// The prefill node, for KV that is kept in this process.
    pub(super) fn source(&self) -> CaptureSource<'_> {
        CaptureSource {
            url: &self.prefill.url,
            engine: &self.prefill.engine,
            key: &self.key,
            transport: &self.transport,
            ephemeral: false,
        }
    }

    /// The prefill node's address.
    pub(super) fn prefill_address(&self) -> Result<SocketAddr, CommandFailure> {
        Ok(self.prefill.url.trim_start_matches("http://").parse()?)
    }

    /// Replaces the pulled KV in each of a node's `n_free` free slots by another prompt.
    pub(super) async fn forget(&mut self, node: &NodeProcess, n_free: usize) -> Result<(), CommandFailure> {
        for _ in 0..n_free {
            // The node uses the slot that was used longest ago.
            let other = self.prompts.next(SHORT);
            direct(node, other).await?;
        }
        Ok(())
    }
}

/// Lets a node measure the link from `url`, as an endpoint does before requests: codecs and a prompt's last chunk follow from its
/// rate. Returns bytes per second.
pub(super) async fn measure_link(node: &NodeProcess, url: &str) -> Result<f64, CommandFailure> {
    let link = node.engine.measure_link(&KvSource::at(url)).await?;
    Ok(link.n_bytes as f64 / link.seconds.max(1e-9))
}

/// Generates the first token of a prompt with the KV pulled from `url`.
pub(super) async fn pull(node: &NodeProcess, url: &str, prompt: Vec<Token>) -> Result<Pull, CommandFailure> {
    let mut request = greedy(prompt, 1);
    request.kv_source = Some(KvSource::at(url));
    let timeline = stream(&node.engine, request).await?;
    let timings = timeline.handoff.ok_or_else(|| CommandFailure("the node did not pull".into()))?;
    match timings.failure {
        None => Ok(Pull { timings, ttft_ms: timeline.ttft() * 1e3 }),
        Some(failure) => Err(CommandFailure(format!("a pull failed: {}", failure.as_str()))),
    }
}

/// Generates the first token of a prompt on the node itself.
pub(super) async fn direct(node: &NodeProcess, prompt: Vec<Token>) -> Result<Timeline, CommandFailure> {
    stream(&node.engine, greedy(prompt, 1)).await
}
