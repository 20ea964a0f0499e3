//! The layers of a real model, lent by an endpoint to a worker on the same machine.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use baton_fetch as models;
use baton_model::gguf::Gguf;
use baton_proxy::observe::snapshot::{EndpointState, NodeReport};
use baton_proxy::serve::{CommandFailure, LENDING_ENGINE, model_files};
use baton_proxy::targets::nodes::NodeState;
use baton_schemas::Token;
use baton_schemas::node::KEY_VARIABLE;
use baton_tryout::endpoint_process::{EndpointProcess, EndpointStart};
use baton_tryout::node_process::{NodeProcess, START_DEADLINE};
use baton_tryout::prompts::{Prompts, TEXT};
use baton_tryout::stats::median;
use futures::StreamExt;
use serde::Serialize;
use serde_json::{Value, json};

use super::LayersBenchArgs;
use crate::memory::{family, proportional_mib};
use crate::report::{Better, Destination, Report, Row, Unit, dash, one_decimal};

/// Tokens of the prompt that lets fresh engines touch their memory.
const WARM_UP: usize = 256;

/// Tokens of a reply, and room for the template.
const REPLY: u32 = 2;
const ROOM: u32 = 64;

/// The name under which the model is served.
const MODEL: &str = "model";

/// The steps from none to all layers.
const STEPS: u32 = 6;

/// With `auto`: the choice is final once it has not changed for so long, and is waited for at most so long.
const SETTLED: Duration = Duration::from_secs(45);
const SETTLE_DEADLINE: Duration = Duration::from_secs(900);

const POLL: Duration = Duration::from_millis(500);

/// The deadline of one request.
const REQUEST_DEADLINE: Duration = Duration::from_secs(600);

/// The chooser of the number of lent layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Chosen {
    ByArgument,
    /// `--lend-layers auto`, after its measurements.
    ByRates,
}

/// The figures with one number of lent layers.
#[derive(Debug, Serialize)]
struct LentRow {
    n_lent: u32,
    chosen: Chosen,
    /// Seconds to the first token: the rounds of each length.
    ttft: Vec<Vec<f64>>,
    /// Memory of the endpoint's processes and of the worker's, MiB. A page that several map counts once in all.
    own_mib: Option<f64>,
    worker_mib: Option<f64>,
}

#[derive(Debug, Default, Serialize)]
struct LentFigures {
    model: String,
    weights_mib: f64,
    lengths: Vec<u32>,
    rows: Vec<LentRow>,
}

pub(super) async fn run(args: &LayersBenchArgs, destination: &Destination) -> Result<(), CommandFailure> {
    let model = models::pull(&args.model, &model_files::pull_options()?).await?;
    let header = Gguf::open(&model)?;
    let n_layers = header.n_layer().and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
    if let Some(n) = args.lent.iter().find(|n| **n > n_layers) {
        return Err(CommandFailure(format!("--lent {n} is more than the model's {n_layers} layers")));
    }
    let lent = match args.lent.is_empty() {
        true => (0..=STEPS).map(|step| n_layers * step / STEPS).collect(),
        false => args.lent.clone(),
    };
    let mut figures = LentFigures {
        model: args.model.clone(),
        weights_mib: header.files.n_bytes() as f64 / f64::from(1 << 20),
        lengths: args.lengths.clone(),
        rows: Vec::new(),
    };
    let bench = LentBench { model, lengths: args.lengths.clone(), rounds: args.rounds };
    for n in lent {
        figures.rows.push(bench.measure(Some(n)).await?);
        destination.save(&figures)?;
    }
    if !args.no_auto {
        figures.rows.push(bench.measure(None).await?);
    }
    destination.publish(&figures, &report(&figures))
}

struct LentBench {
    model: PathBuf,
    lengths: Vec<u32>,
    rounds: u32,
}

/// A running endpoint, and the worker of its other engine.
struct LendingCluster {
    endpoint: EndpointProcess,
    worker: Option<NodeProcess>,
    client: reqwest::Client,
    /// The text that prompts are made of.
    text: &'static str,
}

impl LentBench {
    /// Measures one number of lent layers; `None`: the planned one.
    async fn measure(&self, n_lent: Option<u32>) -> Result<LentRow, CommandFailure> {
        let cluster = self.start(n_lent).await?;
        let n = match n_lent {
            None => cluster.until_planned().await?,
            Some(0) => 0,
            Some(n) => {
                cluster.until_lent(n).await?;
                n
            }
        };
        let mut prompts = cluster.prompts().await?;
        cluster.first_token(prompts.next(WARM_UP), n > 0).await?;
        let mut ttft = Vec::new();
        for length in &self.lengths {
            let mut rounds = Vec::new();
            for _ in 0..self.rounds {
                rounds.push(cluster.first_token(prompts.next(*length as usize), n > 0).await?.as_secs_f64());
            }
            ttft.push(rounds);
        }
        let mib = |pid: u32| family(pid).into_iter().map(proportional_mib).sum::<Option<f64>>();
        let own_mib = cluster.endpoint.pid().and_then(mib);
        let worker_mib = cluster.worker.as_ref().and_then(NodeProcess::pid).and_then(mib);
        cluster.endpoint.stop().await;
        let chosen = if n_lent.is_some() { Chosen::ByArgument } else { Chosen::ByRates };
        Ok(LentRow { n_lent: n, chosen, ttft, own_mib, worker_mib })
    }

    async fn start(&self, n_lent: Option<u32>) -> Result<LendingCluster, CommandFailure> {
        let key = uuid::Uuid::new_v4().to_string();
        let worker = match n_lent {
            Some(0) => None,
            _ => Some(NodeProcess::start(&key, ["--role", "worker", "--threads", "1"].map(OsString::from)).await?),
        };
        let n_ctx = self.lengths.iter().max().copied().unwrap_or(0).saturating_add(REPLY + ROOM);
        // The endpoint refuses a text with more tokens than its context; a token has at least a byte.
        let text = (0..=n_ctx as usize).rev().find_map(|n| TEXT.get(..n)).unwrap_or_default();
        let n_ctx = n_ctx.to_string();
        let mut args: Vec<OsString> = vec!["--model".into(), self.model.clone().into()];
        let sizes = ["--threads", "1", "--slots", "1", "--ctx-size", &n_ctx, "--kv-cells", &n_ctx];
        args.extend(
            ["--listen", "127.0.0.1:0", "--name", MODEL, "--policy", "always_handoff"]
                .into_iter()
                .chain(sizes)
                .map(OsString::from),
        );
        if let Some(worker) = &worker {
            let layers = n_lent.map_or_else(|| "auto".to_owned(), |n| n.to_string());
            args.extend(
                ["--workers", worker.url.trim_start_matches("http://"), "--lend-layers", &layers].map(OsString::from),
            );
        }
        if n_lent.is_some() {
            args.push("--no-calibration".into());
        }
        let variables = [(KEY_VARIABLE, key.as_str())];
        let endpoint = EndpointStart { args, variables: &variables, deadline: START_DEADLINE };
        let endpoint = EndpointProcess::start(endpoint).await?;
        let client = reqwest::Client::builder().no_proxy().timeout(REQUEST_DEADLINE).build()?;
        Ok(LendingCluster { endpoint, worker, client, text })
    }
}

impl LendingCluster {
    /// The report of the engine that lends.
    async fn lending(&self) -> Result<NodeReport, CommandFailure> {
        let state = self.client.get(format!("{}/baton/state", self.endpoint.base)).send().await?;
        let state: EndpointState = state.error_for_status()?.json().await?;
        let nodes = state.models.into_iter().next().map(|model| model.nodes).unwrap_or_default();
        let lending = nodes.into_iter().find(|node| node.name == LENDING_ENGINE);
        lending.ok_or_else(|| CommandFailure("the endpoint has no engine that lends layers".into()))
    }

    async fn until_lent(&self, n: u32) -> Result<(), CommandFailure> {
        let began = Instant::now();
        loop {
            let lending = self.lending().await?;
            if lending.state == NodeState::Ready && n_lent(&lending) == n {
                return Ok(());
            }
            if began.elapsed() > START_DEADLINE {
                return Err(CommandFailure(format!("{n} layers are not lent after {} s", START_DEADLINE.as_secs())));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Waits for the last number that `auto` chooses.
    async fn until_planned(&self) -> Result<u32, CommandFailure> {
        let began = Instant::now();
        let mut known = (None, began);
        while began.elapsed() < SETTLE_DEADLINE {
            let lending = self.lending().await?;
            let now = match lending.state {
                NodeState::Ready if !lending.prefill_rates.is_empty() => Some(n_lent(&lending)),
                // It is also unloaded before its first start, and between two.
                NodeState::Unloaded => Some(0),
                _ => None,
            };
            if now != known.0 {
                known = (now, Instant::now());
            }
            if let (Some(n), since) = known
                && since.elapsed() > SETTLED
            {
                return Ok(n);
            }
            tokio::time::sleep(POLL).await;
        }
        Err(CommandFailure("`--lend-layers auto` does not come to an end".into()))
    }

    async fn prompts(&self) -> Result<Prompts, CommandFailure> {
        let call = self.client.post(format!("{}/tokenize", self.endpoint.base)).json(&json!({ "content": self.text }));
        let reply: Value = call.send().await?.error_for_status()?.json().await?;
        let tokens = reply["tokens"].as_array().into_iter().flatten().filter_map(Value::as_u64);
        Ok(Prompts::new(tokens.filter_map(|token| Token::try_from(token).ok()).collect()))
    }

    /// Time until the first text of a reply. Errors: it took another route than it should have taken.
    async fn first_token(&self, prompt: Vec<Token>, is_lent: bool) -> Result<Duration, CommandFailure> {
        let body = json!({ "model": MODEL, "prompt": prompt, "stream": true, "max_tokens": REPLY, "temperature": 0, "ignore_eos": true });
        let call = self.client.post(format!("{}/v1/completions", self.endpoint.base)).json(&body);
        let sent = Instant::now();
        let reply = call.send().await?;
        if !reply.status().is_success() {
            return Err(CommandFailure(format!("a prompt was refused: {}", reply.text().await?)));
        }
        let route = reply.headers().get("x-baton-route").and_then(|route| route.to_str().ok()).unwrap_or_default();
        if route.starts_with(&format!("handoff; prefill={LENDING_ENGINE};")) != is_lent {
            return Err(CommandFailure(format!("a prompt took another route: {route}")));
        }
        let (mut text, mut first, mut pieces) = (Vec::new(), None, reply.bytes_stream());
        while let Some(piece) = pieces.next().await {
            text.extend_from_slice(&piece?);
            if first.is_none() && has_text(&text) {
                first = Some(sent.elapsed());
            }
        }
        first.ok_or_else(|| CommandFailure(format!("a reply has no text: {}", String::from_utf8_lossy(&text))))
    }
}

/// Layers that the worker computes.
fn n_lent(lending: &NodeReport) -> u32 {
    lending.workers.first().map_or(0, |worker| worker.layers)
}

/// Returns true if a stream of events has any text so far.
fn has_text(stream: &[u8]) -> bool {
    let stream = String::from_utf8_lossy(stream);
    let events = stream.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    events.into_iter().any(|event| event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()))
}

fn report(figures: &LentFigures) -> Report {
    let mut report = Report::new(&figures.model);
    report.text(format!(
        "The file has {:.0} MiB. Seconds to the first token, and MiB of all processes of a side: pages of the file that several map \
         count once.",
        figures.weights_mib
    ));
    let of_length = |length: &u32| format!("{length} tokens, s");
    let head = ["layers lent".to_owned()].into_iter().chain(figures.lengths.iter().map(of_length));
    let head: Vec<String> = head.chain(["own MiB", "worker MiB"].map(str::to_owned)).collect();
    report.table(&head, figures.rows.iter().map(cells));
    for row in figures.rows.iter().filter(|row| row.chosen == Chosen::ByArgument) {
        for (length, rounds) in figures.lengths.iter().zip(&row.ttft) {
            report.figure(format!("{} layers, {length} tokens", row.n_lent), Unit::Seconds, Better::Less, rounds);
        }
    }
    report
}

fn cells(row: &LentRow) -> Row {
    let lent = match row.chosen {
        Chosen::ByArgument => row.n_lent.to_string(),
        Chosen::ByRates => format!("{} (auto)", row.n_lent),
    };
    let seconds = row.ttft.iter().map(|rounds| format!("{:.2}", median(rounds)));
    let mib = [row.own_mib, row.worker_mib].map(|mib| mib.map_or_else(dash, one_decimal));
    [lent].into_iter().chain(seconds).chain(mib).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_text_of_a_stream_is_found() {
        let event = |text: &str| format!("data: {}\n\n", json!({ "choices": [{ "text": text }] }));
        assert!(!has_text(event("").as_bytes()));
        assert!(has_text((event("") + &event("The")).as_bytes()));
        assert!(!has_text(b"data: {\"choices\": [{\"text\": \"The"), "half an event");
    }
}
