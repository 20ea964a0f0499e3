//! One size of a cluster under load: its endpoints' CPU and memory, lateness of tokens, and the spread of streams over nodes.

use std::ffi::OsString;
use std::time::Duration;

use baton_proxy::serve::CommandFailure;
use baton_schemas::node::KEY_VARIABLE;
use baton_tryout::endpoint_process::{EndpointProcess, EndpointStart};
use futures::future::try_join_all;
use serde::Serialize;

use super::args::ManyBenchArgs;
use super::host::HostedNodes;
use super::size::CellSize;
use crate::serve::steady::{IdleUse, SteadyFigures, SteadyLoad, idle, measure as measure_load};

/// The longest start of an endpoint.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// How long an endpoint without requests is measured at most, after it has settled.
const SETTLE: Duration = Duration::from_secs(2);
const IDLE: Duration = Duration::from_secs(10);

/// A token comes a step after the request; starting thousands of streams takes longer.
const STARTS_PER_SECOND: u32 = 500;

/// How often the nodes' streams are counted in the measured time.
const N_SAMPLES: u32 = 10;

/// Places beyond the streams, so that no stream waits because the endpoint spreads them unevenly.
const SPARE_PLACES: f64 = 1.5;

/// The figures of a cell.
#[derive(Debug, Serialize)]
pub(super) struct ManyCell {
    pub(super) size: CellSize,
    /// The first endpoint before any request.
    pub(super) idle: IdleUse,
    pub(super) rounds: Vec<CellRound>,
}

/// A round of a cell.
#[derive(Debug, Serialize)]
pub(super) struct CellRound {
    /// By endpoint.
    pub(super) endpoints: Vec<SteadyFigures>,
    /// Streams of each node when the most of them ran.
    pub(super) n_active: Vec<u32>,
}

/// Starts the cluster, and measures it idle and under load.
pub(super) async fn measure(size: CellSize, args: &ManyBenchArgs) -> Result<ManyCell, CommandFailure> {
    let CellSize { n_endpoints, n_nodes, n_streams } = size;
    eprintln!("{n_endpoints} endpoints, {n_nodes} nodes, {n_streams} streams");
    let key = uuid::Uuid::new_v4().to_string();
    let n_slots = (f64::from(n_streams) / f64::from(n_nodes) * SPARE_PLACES).ceil() as u32 + 1;
    let nodes = HostedNodes::start(&key, n_nodes, n_slots, args.token_every).await?;
    let endpoints = try_join_all((0..n_endpoints).map(|_| endpoint(&key, &nodes))).await?;
    tokio::time::sleep(SETTLE).await;
    let load = load(n_streams / n_endpoints, args);
    let idle = idle(pid(&endpoints[0])?, load.duration.min(IDLE)).await?;
    let mut rounds = Vec::new();
    for round in 0..args.rounds {
        let measuring = endpoints
            .iter()
            .map(async |endpoint| measure_load(&endpoint.base, pid(endpoint)?, &load, u64::from(round)).await);
        let counting = async {
            tokio::time::sleep(load.warm_up).await;
            fullest(&nodes, load.duration).await
        };
        let (endpoints, n_active) = tokio::try_join!(try_join_all(measuring), counting)?;
        rounds.push(CellRound { endpoints, n_active });
    }
    for endpoint in endpoints {
        endpoint.stop().await;
    }
    Ok(ManyCell { size, idle, rounds })
}

/// The streams of each node at the moment when the most ran: replies that began together end together.
async fn fullest(nodes: &HostedNodes, time: Duration) -> Result<Vec<u32>, CommandFailure> {
    let mut fullest: Vec<u32> = Vec::new();
    for _ in 0..N_SAMPLES {
        let now = nodes.n_active().await?;
        if now.iter().sum::<u32>() >= fullest.iter().sum() {
            fullest = now;
        }
        tokio::time::sleep(time / N_SAMPLES).await;
    }
    Ok(fullest)
}

async fn endpoint(key: &str, nodes: &HostedNodes) -> Result<EndpointProcess, CommandFailure> {
    let own = ["--listen", "127.0.0.1:0", "--name", MODEL, "--no-calibration"];
    let urls = nodes.urls.iter().flat_map(|url| ["--decode", url]);
    let args = own.into_iter().chain(urls).map(OsString::from).collect();
    EndpointProcess::start(EndpointStart { args, variables: &[(KEY_VARIABLE, key)], deadline: START_DEADLINE }).await
}

/// The name under which the simulated model is served.
const MODEL: &str = "sim";

fn pid(endpoint: &EndpointProcess) -> Result<u32, CommandFailure> {
    endpoint.pid().ok_or_else(|| CommandFailure("an endpoint has ended".into()))
}

/// Replies last about half of the measured time, so that streams also begin and end in it.
fn load(n_streams: u32, args: &ManyBenchArgs) -> SteadyLoad {
    let duration = Duration::from_secs(args.duration.into());
    let token_every = Duration::from_millis(args.token_every.into());
    SteadyLoad {
        n_streams,
        n_tokens: ((duration.as_secs_f64() / token_every.as_secs_f64() / 2.0) as u32).max(2),
        warm_up: 2 * token_every + Duration::from_secs_f64(f64::from(n_streams) / f64::from(STARTS_PER_SECOND)),
        duration,
    }
}
