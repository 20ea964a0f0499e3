//! Options of `baton-bench many`.

use clap::Args;

use super::size::CellSize;
use crate::report::{ChartFolder, ReportFiles};

/// The nodes that two endpoints share.
const SHARED_NODES: u32 = 16;

/// Options of `baton-bench many`.
#[derive(Args)]
pub(crate) struct ManyBenchArgs {
    /// Nodes behind one endpoint, by commas
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 64], value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(super) nodes: Vec<u32>,
    /// Streams at once, by commas
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1_000, 10_000], value_parser = clap::value_parser!(u32).range(2..=20_000))]
    streams: Vec<u32>,
    /// Nodes that two endpoints share, with the same streams; 0 leaves that out
    #[arg(long, default_value_t = SHARED_NODES, value_parser = clap::value_parser!(u32).range(..=256))]
    pub(super) shared_nodes: u32,
    /// Seconds that are measured in each round
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(2..=3_600))]
    pub(super) duration: u32,
    /// Milliseconds between two tokens of a stream
    #[arg(long, value_name = "MS", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(50..=60_000))]
    pub(super) token_every: u32,
    /// Rounds of each size; medians are reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(super) rounds: u32,
    /// Host so many nodes in this process, for a run of this program
    #[arg(long, hide = true, requires = "host_slots")]
    pub(super) host_nodes: Option<u32>,
    /// Slots of each of them
    #[arg(long, hide = true)]
    pub(super) host_slots: Option<u32>,
    #[command(flatten)]
    pub(super) files: ReportFiles,
    #[command(flatten)]
    pub(super) charts: ChartFolder,
}

impl ManyBenchArgs {
    /// One endpoint with each number of nodes, then two that share some.
    pub(super) fn sizes(&self) -> Vec<CellSize> {
        let of = |n_endpoints, n_nodes| {
            self.streams.iter().map(move |&n_streams| CellSize { n_endpoints, n_nodes, n_streams })
        };
        let shared = (self.shared_nodes > 0).then_some(self.shared_nodes);
        self.nodes.iter().flat_map(|&n| of(1, n)).chain(shared.into_iter().flat_map(|n| of(2, n))).collect()
    }
}
