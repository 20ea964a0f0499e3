//! How much of the transfer the prefill hides, by prompt length, codec and link; and what sending everything after the
//! prefill would cost.
//!
//! A link's rate is chosen by what it means and not by a number: the plain KV of a prompt takes 60 % of the prefill's
//! time on it, which is what 10 GbE is to the pair of DESIGN section 1, or twice that time.

use std::time::{Duration, Instant};

use baton_proxy::serve::CommandFailure;
use baton_schemas::handoff::HandoffReport;
use baton_schemas::kv::Codec;
use serde::Serialize;

use super::pair::{HandoffBench, Pull, direct, pull};
use crate::node_process::NodeProcess;
use crate::relay::Relay;
use crate::stats::median;

/// A kind of link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Link {
    /// The loopback without a relay.
    Loopback,
    /// The plain KV takes 0.6 of the prefill's time.
    Share60,
    /// The plain KV takes twice the prefill's time.
    Share200,
}

impl Link {
    pub(super) const ALL: [Link; 3] = [Link::Loopback, Link::Share60, Link::Share200];

    /// The wire's time for plain KV over the prefill's.
    fn share(self) -> Option<f64> {
        match self {
            Link::Loopback => None,
            Link::Share60 => Some(0.6),
            Link::Share200 => Some(2.0),
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Link::Loopback => "loopback",
            Link::Share60 => "wire 60 %",
            Link::Share200 => "wire 200 %",
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
    pub(super) n_rounds: usize,
    pub(super) n_bytes: f64,
    pub(super) prefill_ms: f64,
    pub(super) transfer_ms: f64,
    pub(super) unhidden_ms: f64,
    /// `unhidden_ms` ÷ `prefill_ms`.
    pub(super) unhidden_share: f64,
    pub(super) total_ms: f64,
    pub(super) ttft_ms: f64,
    /// A whole pull over the same link of a prompt that the prefill node had cached: the time that would follow the
    /// prefill if nothing were sent during it. Not measured on the slowest link.
    pub(super) after_ms: Option<f64>,
}

/// The same prompt lengths without a handoff.
#[derive(Debug, Clone, Serialize)]
pub(super) struct DirectRow {
    pub(super) n_tokens: usize,
    pub(super) n_rounds: usize,
    pub(super) ttft_ms: f64,
}

/// All combinations.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Overlap {
    pub(super) rows: Vec<OverlapRow>,
    pub(super) direct: Vec<DirectRow>,
}

/// One combination while it is measured.
struct OverlapCell<'n> {
    node: &'n NodeProcess,
    codec: Codec,
    link: Link,
    /// `None` for the loopback itself.
    relay: Option<usize>,
    pulls: Vec<Pull>,
    after_ms: Vec<f64>,
}

/// Links of one prompt length.
struct Links {
    relays: Vec<(Relay, f64)>,
}

pub(super) async fn measure(bench: &mut HandoffBench) -> Result<Overlap, CommandFailure> {
    let mut nodes = Vec::new();
    for codec in Codec::ALL {
        // One slot, so that another prompt makes the node forget.
        nodes.push((codec, bench.decode(&["--role", "decode", "--slots", "1", "--kv-codecs", codec.as_str()]).await?));
    }
    let mut overlap = Overlap::default();
    for n_tokens in bench.sizes.lengths.clone() {
        one_length(bench, &nodes, n_tokens, &mut overlap).await?;
    }
    Ok(overlap)
}

async fn one_length(
    bench: &mut HandoffBench,
    nodes: &[(Codec, NodeProcess)],
    n_tokens: usize,
    overlap: &mut Overlap,
) -> Result<(), CommandFailure> {
    let Some((_, plain)) = nodes.first() else { return Ok(()) };
    // Sets the links' rates.
    let prompt = bench.prompts.next(n_tokens);
    let first = pull(plain, &bench.prefill.url, prompt).await?.timings;
    let links = Links::start(bench, &first).await?;
    let combinations = nodes.iter().flat_map(|(codec, node)| Link::ALL.map(|link| (*codec, node, link)));
    let mut cells: Vec<OverlapCell<'_>> = combinations
        .map(|(codec, node, link)| {
            let relay = Link::ALL.iter().filter(|l| l.share().is_some()).position(|l| *l == link);
            OverlapCell { node, codec, link, relay, pulls: Vec::new(), after_ms: Vec::new() }
        })
        .collect();
    let mut direct_ms = Vec::new();
    let began = Instant::now();
    for round in 0..bench.sizes.rounds {
        let spent = began.elapsed();
        // As many rounds as there is time for: a long prompt has fewer.
        if round > 0 && spent + spent / round > bench.sizes.time_per_length {
            break;
        }
        for cell in &mut cells {
            eprintln!("overlap: {n_tokens} tokens, {}, {}, round {}", cell.codec.as_str(), cell.link.name(), round + 1);
            cell.measure(bench, &links, n_tokens).await?;
        }
        let prompt = bench.prompts.next(n_tokens);
        direct_ms.push(direct(plain, prompt).await?.ttft() * 1e3);
    }
    overlap.rows.extend(cells.iter().map(|cell| cell.row(n_tokens, &links)));
    overlap.direct.push(DirectRow { n_tokens, n_rounds: direct_ms.len(), ttft_ms: median(&direct_ms) });
    Ok(())
}

impl Links {
    /// Links on which the plain KV of a pull like `first` takes the wanted share of its prefill.
    async fn start(bench: &HandoffBench, first: &HandoffReport) -> Result<Links, CommandFailure> {
        let mut relays = Vec::new();
        for share in Link::ALL.iter().filter_map(|link| link.share()) {
            let rate = first.n_bytes as f64 / (share * first.prefill_ms.max(1.0) / 1e3);
            relays.push((Relay::start(bench.prefill_address()?, rate).await?, rate));
        }
        Ok(Links { relays })
    }

    fn url<'l>(&'l self, relay: Option<usize>, bench: &'l HandoffBench) -> &'l str {
        relay.and_then(|i| self.relays.get(i)).map_or(&bench.prefill.url, |(relay, _)| &relay.url)
    }

    fn rate(&self, relay: Option<usize>) -> Option<f64> {
        relay.and_then(|i| self.relays.get(i)).map(|(_, rate)| *rate)
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
        let pulled = pull(self.node, links.url(self.relay, bench), prompt.clone()).await?;
        self.pulls.push(pulled);
        // Where the wire is the slower of the two anyway, waiting for it twice would show nothing new.
        if self.link != Link::Share200 {
            bench.forget(self.node, 1).await?;
            let again = pull(self.node, links.url(self.relay, bench), prompt).await?.timings;
            self.after_ms.push(again.total_ms);
        }
        Ok(())
    }

    fn row(&self, n_tokens: usize, links: &Links) -> OverlapRow {
        let of = |value: fn(&HandoffReport) -> f64| {
            median(&self.pulls.iter().map(|pull| value(&pull.timings)).collect::<Vec<_>>())
        };
        OverlapRow {
            n_tokens,
            codec: self.codec,
            link: self.link,
            rate: links.rate(self.relay),
            n_rounds: self.pulls.len(),
            n_bytes: of(|t| t.n_bytes as f64),
            prefill_ms: of(|t| t.prefill_ms),
            transfer_ms: of(|t| t.transfer_ms),
            unhidden_ms: of(|t| t.unhidden_ms),
            unhidden_share: of(|t| t.unhidden_ms / t.prefill_ms.max(1e-3)),
            total_ms: of(|t| t.total_ms),
            ttft_ms: median(&self.pulls.iter().map(|pull| pull.ttft_ms).collect::<Vec<_>>()),
            after_ms: (!self.after_ms.is_empty()).then(|| median(&self.after_ms)),
        }
    }
}

/// Time for the rounds of one prompt length: a long one then has a single round on a small machine.
pub(super) const TIME_PER_LENGTH: Duration = Duration::from_secs(60);
