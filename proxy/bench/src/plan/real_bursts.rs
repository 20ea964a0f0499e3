//! Measures predictions after bursts: an endpoint and two nodes with a real model, all on this machine.
//!
//! Each burst of short prompts is followed by one long prompt. `/baton/state` says what the endpoint predicted for it, and
//! what it took.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use baton_proxy::observe::RouteRecord;
use baton_proxy::observe::snapshot::EndpointState;
use baton_proxy::serve::CommandFailure;
use baton_schemas::node::KEY_VARIABLE;
use baton_tryout::endpoint_process::{EndpointProcess, EndpointStart};
use baton_tryout::node_process::START_DEADLINE;
use baton_tryout::stats::{median, percentile};
use futures::future::try_join_all;
use serde::Serialize;
use serde_json::json;
use tokio::time::Instant;

use super::cells::row;
use super::real::{CALIBRATION_DEADLINE, start};
use crate::report::{Report, Row};
use crate::serve::WordPrompts;

/// Requests in a burst.
const SIZES: [u64; 7] = [1, 2, 4, 8, 16, 24, 32];
/// Bursts of each size. They alternate, as traffic does.
const ROUNDS: u64 = 3;
/// Long prompts before measurements count.
const WARM_UP: u64 = 3;

/// The public name of the model.
const MODEL: &str = "model";

/// The longest reply on a busy machine.
const DEADLINE: Duration = Duration::from_secs(300);
/// A state has about 100 kB.
const MAX_STATE_BYTES: usize = 16 << 20;

/// The words of a prompt, of which some begin all prompts of this size, and the tokens of its reply.
#[derive(Clone, Copy)]
struct Size {
    n_words: usize,
    n_shared: usize,
    n_reply: u32,
}

/// With a system prompt, of which the nodes know more than the endpoint.
const SHORT: Size = Size { n_words: 60, n_shared: 50, n_reply: 16 };
const LONG: Size = Size { n_words: 650, n_shared: 0, n_reply: 8 };

#[derive(Debug, Serialize)]
pub(super) struct BurstErrors {
    note: &'static str,
    long_prompts: Vec<LongPrompt>,
    /// 90th percentile of |actual ÷ predicted − 1|.
    error_p90: f64,
    /// The same had the node's computation of each prompt been known: what waits, the link and the handoff's end add.
    error_p90_given_prefill: f64,
    /// The same of the computation's time a token, predicted as the median of all: what this machine's noise alone adds.
    error_p90_of_machine: f64,
    /// What the endpoint itself shows as the mean error of its latest predictions, as a share.
    shown_error: f64,
}

/// The long prompt after a burst. Seconds from the plan to the first token.
#[derive(Debug, Serialize)]
struct LongPrompt {
    n_burst: u64,
    n_prompt: u32,
    prefill: Option<String>,
    predicted: f64,
    /// The part of the prediction in which the prompt is computed.
    predicted_prefill: f64,
    /// The time that the computation took.
    prefill_took: f64,
    /// The prediction with that time.
    predicted_given_prefill: f64,
    actual: f64,
}

impl LongPrompt {
    /// Actual ÷ predicted − 1.
    fn error(&self) -> f64 {
        self.actual / self.predicted - 1.0
    }

    /// Seconds that the computation took for a token.
    fn seconds_per_token(&self) -> f64 {
        self.prefill_took / f64::from(self.n_prompt.max(1))
    }
}

/// Sends bursts to an endpoint with a prefill and a decode node.
pub(super) async fn run(model: PathBuf) -> Result<BurstErrors, CommandFailure> {
    let key = uuid::Uuid::new_v4().to_string();
    let prefill = start(&key, &model, "prefill", "1").await?;
    let decode = start(&key, &model, "decode", "1").await?;
    // Every prompt goes through both nodes and their link.
    let nodes = ["--name", MODEL, "--policy", "always_handoff", "--decode", &decode.url, "--prefill", &prefill.url];
    let args = [&["--listen", "127.0.0.1:0"], &nodes[..]].concat().into_iter().map(OsString::from);
    let variables = [(KEY_VARIABLE, key.as_str())];
    let endpoint = EndpointStart { args: args.collect(), variables: &variables, deadline: START_DEADLINE };
    let cluster = RealEndpoint {
        endpoint: EndpointProcess::start(endpoint).await?,
        client: reqwest::Client::builder().no_proxy().timeout(DEADLINE).build()?,
    };
    cluster.calibrated().await?;
    let mut n_sent = 0;
    for _ in 0..WARM_UP {
        cluster.send(LONG, &mut n_sent).await?;
    }
    let mut long_prompts = Vec::new();
    for _ in 0..ROUNDS {
        for n_burst in SIZES {
            cluster.burst(n_burst, &mut n_sent).await?;
            cluster.send(LONG, &mut n_sent).await?;
            let long = cluster.state().await?.routes.into_iter().next().and_then(|record| long_prompt(n_burst, record));
            let long = long.ok_or_else(|| CommandFailure("a long prompt has no prediction or no token".into()))?;
            eprintln!("{}", cells(&long).join("  "));
            long_prompts.push(long);
        }
    }
    let shown = cluster.state().await?.models.first().map_or(0.0, |model| model.prediction_error);
    let p90 = |error: &dyn Fn(&LongPrompt) -> f64| percentile(&errors(&long_prompts, error), 90.0);
    let usual = median(&long_prompts.iter().map(LongPrompt::seconds_per_token).collect::<Vec<_>>());
    Ok(BurstErrors {
        note: "real nodes on one machine",
        error_p90: p90(&LongPrompt::error),
        error_p90_given_prefill: p90(&|long| long.actual / long.predicted_given_prefill - 1.0),
        error_p90_of_machine: p90(&|long| long.seconds_per_token() / usual - 1.0),
        long_prompts,
        shown_error: shown,
    })
}

fn errors(long_prompts: &[LongPrompt], error: &dyn Fn(&LongPrompt) -> f64) -> Vec<f64> {
    long_prompts.iter().map(|long| error(long).abs()).collect()
}

fn long_prompt(n_burst: u64, record: RouteRecord) -> Option<LongPrompt> {
    let predicted = record.predicted?;
    let prefill_ms = record.handoff.map_or(0.0, |handoff| handoff.compute_ms);
    Some(LongPrompt {
        n_burst,
        n_prompt: record.n_prompt,
        prefill: record.prefill,
        predicted: predicted.ttft_ms / 1e3,
        predicted_prefill: predicted.prefill_ms / 1e3,
        prefill_took: prefill_ms / 1e3,
        predicted_given_prefill: (predicted.queue_ms + predicted.own_ms_given(prefill_ms)) / 1e3,
        actual: record.ttft_ms? / 1e3,
    })
}

struct RealEndpoint {
    endpoint: EndpointProcess,
    client: reqwest::Client,
}

impl RealEndpoint {
    /// Sends another prompt of this size, and waits for the reply.
    async fn send(&self, size: Size, n_sent: &mut u64) -> Result<(), CommandFailure> {
        *n_sent += 1;
        let mut prompt = Vec::new();
        WordPrompts::new(size.n_words, size.n_shared).write(*n_sent, &mut prompt);
        let prompt = String::from_utf8_lossy(&prompt);
        let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": size.n_reply, "ignore_eos": true, "temperature": 0 });
        let call = self.client.post(format!("{}/v1/completions", self.endpoint.base)).json(&body);
        call.send().await?.error_for_status()?.bytes().await?;
        Ok(())
    }

    /// Sends short prompts at the same moment, and waits for all replies.
    async fn burst(&self, n: u64, n_sent: &mut u64) -> Result<(), CommandFailure> {
        let first = *n_sent;
        *n_sent += n;
        let sent = (0..n).map(async |i| self.send(SHORT, &mut (first + i)).await);
        try_join_all(sent).await?;
        Ok(())
    }

    async fn state(&self) -> Result<EndpointState, CommandFailure> {
        let reply = self.client.get(format!("{}/baton/state", self.endpoint.base)).send().await?.error_for_status()?;
        if reply.content_length().is_none_or(|n| n > MAX_STATE_BYTES as u64) {
            return Err(CommandFailure("the endpoint's state is too long".into()));
        }
        Ok(serde_json::from_slice(&reply.bytes().await?)?)
    }

    /// Waits until every rate was measured.
    async fn calibrated(&self) -> Result<(), CommandFailure> {
        let began = Instant::now();
        loop {
            let state = self.state().await?;
            let mut models = state.models.iter();
            let is_measured = models.all(|model| {
                let has_links = model.links.iter().any(|link| link.bytes_per_second > 0.0);
                has_links && model.nodes.iter().all(|node| !node.prefill_rates.is_empty())
            });
            if is_measured {
                return Ok(());
            }
            if began.elapsed() > CALIBRATION_DEADLINE {
                return Err(CommandFailure("the nodes could not be calibrated".into()));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

impl BurstErrors {
    pub(super) fn report(&self) -> Report {
        let mut report = Report::new("After bursts");
        report.text("Predictions for a long prompt after a burst of short ones, with real nodes on this machine.");
        report.table(&HEAD, self.long_prompts.iter().map(cells));
        let p50 = median(&errors(&self.long_prompts, &LongPrompt::error));
        let [p50, p90, shown] = [p50, self.error_p90, self.shown_error].map(|share| 100.0 * share);
        report.text(format!("|error|: p50 {p50:.0} %, p90 {p90:.0} %. Shown by the endpoint: {shown:.0} %."));
        let [given, machine] = [self.error_p90_given_prefill, self.error_p90_of_machine].map(|share| 100.0 * share);
        report.text(format!(
            "p90 if the computation's time were known: {given:.0} %. Of that time alone, predicted as its median: {machine:.0} %."
        ));
        report
    }
}

const HEAD: [&str; 7] = ["burst", "tokens", "route", "predicted, s", "prefill took, s", "actual, s", "error"];

fn cells(long: &LongPrompt) -> Row {
    let route = if long.prefill.is_some() { "handoff" } else { "direct" };
    let predicted = format!("{:.2} (prefill {:.2})", long.predicted, long.predicted_prefill);
    let took = [long.prefill_took, long.actual].map(|seconds| format!("{seconds:.2}"));
    let figures = [predicted].into_iter().chain(took).chain([format!("{:+.0} %", 100.0 * long.error())]);
    row(long.n_burst.to_string(), [long.n_prompt.to_string(), route.to_owned()].into_iter().chain(figures))
}
