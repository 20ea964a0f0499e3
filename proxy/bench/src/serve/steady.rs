//! A load of equal streams, for benchmarks that start their own endpoints.

use std::rc::Rc;
use std::time::Duration;

use baton_link::transport::Transport;
use baton_proxy::serve::CommandFailure;
use serde::Serialize;
use serde_json::Map;
use tokio_util::sync::CancellationToken;

use super::figures::RoundFigures;
use super::processes::ProcessGroup;
use super::round;
use super::server::MeasuredServer;
use super::settings::{AskedForm, CalledApi, InputWords, LoadSettings, Pace, ReplyChecks, RoundLength, ServerSettings};
use super::tally::{LatencyKind, P50, P99};

/// The longest reply.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Words of a prompt.
const INPUT_WORDS: InputWords = InputWords { least: 20, most: 20 };

/// So many streams at once: the next one follows a reply.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SteadyLoad {
    pub(crate) n_streams: u32,
    /// Tokens of each reply.
    pub(crate) n_tokens: u32,
    /// Load before the measured time.
    pub(crate) warm_up: Duration,
    pub(crate) duration: Duration,
}

/// Tokens of steady streams, and their cost.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct SteadyFigures {
    pub(crate) tokens_per_second: f64,
    /// Milliseconds; NaN without a request that began in the measured time.
    pub(crate) ttft_p99_ms: f64,
    pub(crate) itl_p50_ms: f64,
    pub(crate) itl_p99_ms: f64,
    /// Processor time of the endpoint in the measured time, seconds.
    pub(crate) cpu_seconds: f64,
    pub(crate) seconds: f64,
    pub(crate) n_tokens: f64,
    /// At the end of the measured time.
    pub(crate) resident_mib: f64,
    pub(crate) client_cores: f64,
    /// Replies with a fault, and requests that failed.
    pub(crate) n_wrong: u64,
    pub(crate) examples: Vec<String>,
}

/// Resources that a process uses without requests.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct IdleUse {
    /// Milliseconds of CPU each second.
    pub(crate) cpu_ms: f64,
    pub(crate) resident_mib: f64,
}

/// Puts the load on an endpoint for one round. Needs a [`tokio::task::LocalSet`]. Errors: it does not answer, or has ended.
pub(crate) async fn measure(
    base: &str,
    pid: u32,
    load: &SteadyLoad,
    seed: u64,
) -> Result<SteadyFigures, CommandFailure> {
    let settings = Rc::new(LoadSettings {
        api: CalledApi::Chat,
        reply: AskedForm::Stream,
        pace: Pace::Closed { concurrency: load.n_streams },
        length: RoundLength::Time(load.duration),
        warm_up: load.warm_up,
        rounds: 1,
        input_words: INPUT_WORDS,
        prefix_words: 0,
        prompts: None,
        output_tokens: load.n_tokens,
        ignore_eos: true,
        extra_body: Map::new(),
        timeout: TIMEOUT,
        seed,
        checks: ReplyChecks::default(),
    });
    let server = ServerSettings {
        name: "the endpoint".into(),
        base: base.to_owned(),
        key: None,
        model: None,
        pids: vec![pid],
        transport: Transport::new(None, true)?,
    };
    let server = Rc::new(MeasuredServer::reach(server, &settings).await?);
    let round = round::measure(&server, &settings, seed, &CancellationToken::new()).await?;
    round.map(SteadyFigures::of).ok_or_else(|| CommandFailure("the load was stopped".into()))
}

impl SteadyFigures {
    fn of(round: RoundFigures) -> SteadyFigures {
        let latency = |kind, p: usize| {
            round.latencies.get(&kind).and_then(|latency| latency.percentiles_ms.get(p).copied()).unwrap_or(f64::NAN)
        };
        SteadyFigures {
            tokens_per_second: round.tokens_per_second(),
            ttft_p99_ms: latency(LatencyKind::Ttft, P99),
            itl_p50_ms: latency(LatencyKind::Itl, P50),
            itl_p99_ms: latency(LatencyKind::Itl, P99),
            cpu_seconds: round.cpu_seconds.unwrap_or(f64::NAN),
            seconds: round.seconds,
            n_tokens: round.n_tokens,
            resident_mib: round.resident_mib.unwrap_or(f64::NAN),
            client_cores: round.client_cores.unwrap_or(f64::NAN),
            n_wrong: round.n_unexpected_failures + round.faults.values().sum::<u64>(),
            examples: round.examples,
        }
    }
}

/// Measures a process that has nothing to do. Errors: it has ended.
pub(crate) async fn idle(pid: u32, time: Duration) -> Result<IdleUse, CommandFailure> {
    let ended = || CommandFailure("an endpoint has ended".into());
    let mut group = ProcessGroup::find(&[pid]).ok_or_else(ended)?;
    let before = group.read().ok_or_else(ended)?;
    tokio::time::sleep(time).await;
    let after = group.read().ok_or_else(ended)?;
    let cpu = after.cpu.saturating_sub(before.cpu);
    Ok(IdleUse {
        cpu_ms: cpu.as_secs_f64() * 1e3 / time.as_secs_f64(),
        resident_mib: after.resident_bytes as f64 / f64::from(1 << 20),
    })
}
