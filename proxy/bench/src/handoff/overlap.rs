//! Measures how much of the transfer overlaps with the prefill, by prompt length, codec and link, and the cost of sending
//! everything after the prefill.
//!
//! A link is a network of a given rate, or relative to the prefill. The plain KV of a prompt then takes 60 % of the prefill's
//! time, like 10 GbE between a DGX Spark and an M3 Ultra, or twice the prefill's time.

use std::time::{Duration, Instant};

use baton_proxy::serve::CommandFailure;
use baton_schemas::handoff::HandoffReport;
use baton_schemas::kv::Codec;
use baton_tryout::node_process::NodeProcess;
use baton_tryout::stats::median;
use serde::Serialize;

use super::pair::{HandoffBench, Pull, direct, measure_link, pull};
use crate::relay::Relay;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Link {
    /// The loopback without a relay.
    Loopback,
    /// The plain KV takes 0.6 of the prefill's time.
    Share60,
    /// The plain KV takes twice the prefill's time.
    Share200,
    /// A network of so many megabits per second.
    Megabits(u32),
}

impl Link {
    /// Links whose rate is relative to the prefill.
    pub(super) const RELATIVE: [Link; 3] = [Link::Loopback, Link::Share60, Link::Share200];

    /// Networks: slow and common Wi-Fi, then cables.
    pub(super) const NETWORKS: [Link; 5] = [
        Link::Megabits(100),
        Link::Megabits(500),
        Link::Megabits(1_000),
        Link::Megabits(2_500),
        Link::Megabits(10_000),
    ];

    /// Its bytes per second, for a prefill like `first`; `None` for an unlimited link.
    fn rate(self, first: &HandoffReport) -> Option<f64> {
        let of_share = |share: f64| Some(first.n_bytes as f64 / (share * first.prefill_ms.max(1.0) / 1e3));
        match self {
            Link::Loopback => None,
            Link::Share60 => of_share(0.6),
            Link::Share200 => of_share(2.0),
            Link::Megabits(megabits) => Some(f64::from(megabits) * 1e6 / 8.0),
        }
    }

    pub(super) fn name(self) -> String {
        match self {
            Link::Loopback => "loopback".to_owned(),
            Link::Share60 => "wire 60 %".to_owned(),
            Link::Share200 => "wire 200 %".to_owned(),
            Link::Megabits(megabits) => format!("{} Gb/s", f64::from(megabits) / 1e3),
        }
    }
}

/// Medians of one combination's pulls. Times in milliseconds.
#[derive(Debug, Clone, Serialize)]
pub(super) struct OverlapRow {
    pub(super) n_tokens: usize,
    pub(super) codec: Codec,
    pub(super) link: Link,
    /// The link's bytes per second; `None` if it is not limited.
    pub(super) rate: Option<f64>,
    /// The bytes per second that the decode node measured on it.
    pub(super) measured_rate: f64,
    pub(super) n_rounds: usize,
    pub(super) n_bytes: f64,
    /// The part of them that is states.
    pub(super) state_bytes: f64,
    pub(super) prefill_ms: f64,
    pub(super) transfer_ms: f64,
    pub(super) import_ms: f64,
    pub(super) after_prefill_ms: f64,
    /// `after_prefill_ms` ÷ `prefill_ms`.
    pub(super) after_prefill_share: f64,
    pub(super) total_ms: f64,
    pub(super) ttft_ms: f64,
    /// The time of a whole pull over the same link if the prefill node has cached the prompt. It is the time after the prefill
    /// if nothing were sent during it. Measured on the loopback and the faster relative link.
    pub(super) after_ms: Option<f64>,
    /// `total_ms` and `after_prefill_share` by round.
    pub(super) total_rounds: Vec<f64>,
    pub(super) share_rounds: Vec<f64>,
}

/// The same prompt lengths without a handoff.
#[derive(Debug, Clone, Serialize)]
pub(super) struct DirectRow {
    pub(super) n_tokens: usize,
    pub(super) n_rounds: usize,
    pub(super) ttft_ms: f64,
    /// The same by round.
    pub(super) ttft_rounds: Vec<f64>,
}

/// All combinations.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Overlap {
    pub(super) rows: Vec<OverlapRow>,
    pub(super) direct: Vec<DirectRow>,
}

/// A decode node that accepts one codec.
struct CodecNode {
    codec: Codec,
    node: NodeProcess,
}

/// One combination while it is measured.
struct OverlapCell<'n> {
    node: &'n CodecNode,
    link: Link,
    measured_rate: f64,
    pulls: Vec<Pull>,
    after_ms: Vec<f64>,
}

/// A link that a relay paces.
struct PacedLink {
    link: Link,
    /// Bytes per second.
    rate: f64,
    relay: Relay,
}

/// The relays for one prompt length.
struct Links {
    relays: Vec<PacedLink>,
}

pub(super) async fn measure(
    bench: &mut HandoffBench,
    links: &[Link],
    codecs: &[Codec],
) -> Result<Overlap, CommandFailure> {
    let mut nodes = Vec::new();
    for &codec in codecs {
        // One slot, so that another prompt replaces the KV.
        let args = ["--role", "decode", "--slots", "1", "--kv-codecs", codec.as_str()];
        nodes.push(CodecNode { codec, node: bench.decode(&args).await? });
    }
    let mut overlap = Overlap::default();
    for n_tokens in bench.sizes.lengths.clone() {
        one_length(bench, &nodes, links, n_tokens, &mut overlap).await?;
    }
    Ok(overlap)
}

async fn one_length(
    bench: &mut HandoffBench,
    nodes: &[CodecNode],
    links: &[Link],
    n_tokens: usize,
    overlap: &mut Overlap,
) -> Result<(), CommandFailure> {
    let Some(CodecNode { node: plain, .. }) = nodes.first() else { return Ok(()) };
    // The first pull determines the rates of relative links.
    let prompt = bench.prompts.next(n_tokens);
    let first = pull(plain, &bench.prefill.url, prompt).await?.timings;
    let relays = Links::start(bench, links, &first).await?;
    let mut cells = Vec::new();
    for (node, link) in nodes.iter().flat_map(|node| links.iter().map(move |link| (node, *link))) {
        let measured_rate = measure_link(&node.node, relays.url(link, bench)).await?;
        cells.push(OverlapCell { node, link, measured_rate, pulls: Vec::new(), after_ms: Vec::new() });
    }
    let mut direct_ms = Vec::new();
    let began = Instant::now();
    for round in 0..bench.sizes.rounds {
        let spent = began.elapsed();
        // Stop when another round would exceed the time: a long prompt gets fewer rounds.
        if round > 0 && spent + spent / round > bench.sizes.time_per_length {
            break;
        }
        for cell in &mut cells {
            let codec = cell.node.codec.as_str();
            eprintln!("overlap: {n_tokens} tokens, {codec}, {}, round {}", cell.link.name(), round + 1);
            cell.measure(bench, &relays, n_tokens).await?;
        }
        let prompt = bench.prompts.next(n_tokens);
        direct_ms.push(direct(plain, prompt).await?.ttft() * 1e3);
    }
    overlap.rows.extend(cells.iter().map(|cell| cell.row(n_tokens, &relays)));
    let (n_rounds, ttft_ms) = (direct_ms.len(), median(&direct_ms));
    overlap.direct.push(DirectRow { n_tokens, n_rounds, ttft_ms, ttft_rounds: direct_ms });
    Ok(())
}

impl Links {
    /// Starts relays of these links for pulls like `first`.
    async fn start(bench: &HandoffBench, links: &[Link], first: &HandoffReport) -> Result<Links, CommandFailure> {
        let mut relays = Vec::new();
        for (link, rate) in links.iter().filter_map(|link| Some((*link, link.rate(first)?))) {
            relays.push(PacedLink { link, rate, relay: Relay::start(bench.prefill_address()?, rate).await? });
        }
        Ok(Links { relays })
    }

    /// The address at which decode nodes reach the prefill node over a link.
    fn url<'a>(&'a self, link: Link, bench: &'a HandoffBench) -> &'a str {
        self.paced(link).map_or(&bench.prefill.url, |paced| &paced.relay.url)
    }

    /// `None` for the loopback.
    fn paced(&self, link: Link) -> Option<&PacedLink> {
        self.relays.iter().find(|paced| paced.link == link)
    }
}

impl OverlapCell<'_> {
    async fn measure(
        &mut self,
        bench: &mut HandoffBench,
        links: &Links,
        n_tokens: usize,
    ) -> Result<(), CommandFailure> {
        let prompt = bench.prompts.next(n_tokens);
        let url = links.url(self.link, bench).to_owned();
        self.pulls.push(pull(&self.node.node, &url, prompt.clone()).await?);
        // A second pull on a slow link would take long and show nothing new.
        if matches!(self.link, Link::Loopback | Link::Share60) {
            bench.forget(&self.node.node, 1).await?;
            self.after_ms.push(pull(&self.node.node, &url, prompt).await?.timings.total_ms);
        }
        Ok(())
    }

    fn row(&self, n_tokens: usize, links: &Links) -> OverlapRow {
        let rounds = |value: fn(&HandoffReport) -> f64| -> Vec<f64> {
            self.pulls.iter().map(|pull| value(&pull.timings)).collect()
        };
        let of = |value: fn(&HandoffReport) -> f64| median(&rounds(value));
        let share: fn(&HandoffReport) -> f64 = |t| t.after_prefill_ms / t.prefill_ms.max(1e-3);
        OverlapRow {
            n_tokens,
            codec: self.node.codec,
            link: self.link,
            rate: links.paced(self.link).map(|paced| paced.rate),
            measured_rate: self.measured_rate,
            n_rounds: self.pulls.len(),
            n_bytes: of(|t| t.n_bytes as f64),
            state_bytes: of(|t| t.state_bytes as f64),
            prefill_ms: of(|t| t.prefill_ms),
            transfer_ms: of(|t| t.transfer_ms),
            import_ms: of(|t| t.import_ms),
            after_prefill_ms: of(|t| t.after_prefill_ms),
            after_prefill_share: of(share),
            total_ms: of(|t| t.total_ms),
            ttft_ms: median(&self.pulls.iter().map(|pull| pull.ttft_ms).collect::<Vec<_>>()),
            after_ms: (!self.after_ms.is_empty()).then(|| median(&self.after_ms)),
            total_rounds: rounds(|t| t.total_ms),
            share_rounds: rounds(share),
        }
    }
}

/// Time for the rounds of one prompt length. On a small machine a long prompt gets a single round.
pub(super) const TIME_PER_LENGTH: Duration = Duration::from_secs(60);
