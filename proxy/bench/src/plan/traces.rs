//! Requests as they follow one another in use, on two simulated machines: which part of their prompts is there, and where, with and
//! without a store. Each request also runs on every fixed route, from the same state.

use std::time::Duration;

use baton_engines::sim::{SimMemory, SimTier};
use baton_link::Engine;
use baton_proxy::serve::CommandFailure;
use baton_schemas::Token;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

use super::cluster::{Cluster, ClusterSpec, PlannedRequest};
use super::grid::{GridCell, MeasuredCell, Summary, summary};

/// Until the endpoint knows what a node holds.
const TOLD: Duration = Duration::from_secs(4);

/// What both machines keep beside their slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TraceStore {
    SlotsAlone,
    Memory,
    MemoryAndDisk,
}

impl TraceStore {
    pub(crate) const ALL: [TraceStore; 3] = [TraceStore::SlotsAlone, TraceStore::Memory, TraceStore::MemoryAndDisk];

    fn tiers(self) -> [SimTier; 2] {
        // 4 GiB of this model's KV, and the rates of `returns`.
        let memory = SimTier { max_tokens: 32_768, restore_tps: 100_000.0 };
        let disk = SimTier { max_tokens: usize::MAX, restore_tps: 15_000.0 };
        match self {
            TraceStore::SlotsAlone => [SimTier::default(); 2],
            TraceStore::Memory => [memory, SimTier::default()],
            TraceStore::MemoryAndDisk => [memory, disk],
        }
    }
}

/// A trace: all its conversations begin with the same tokens, and take turns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Trace {
    pub(crate) name: &'static str,
    /// The instructions that all share.
    pub(crate) n_shared: usize,
    pub(crate) n_conversations: usize,
    /// Turns of each conversation.
    pub(crate) n_turns: usize,
    /// Tokens of each message.
    pub(crate) n_message: usize,
    /// Tokens of each reply.
    pub(crate) n_reply: u32,
    pub(crate) order: TurnOrder,
}

impl Trace {
    pub(crate) fn n_requests(&self) -> usize {
        self.n_conversations * self.n_turns
    }

    /// The conversation that has this turn of all.
    pub(crate) fn conversation_of(&self, turn: usize) -> usize {
        match self.order {
            TurnOrder::Through => turn / self.n_turns,
            TurnOrder::Around => turn % self.n_conversations,
        }
    }

    /// The same with prompts and replies that are so many times shorter.
    pub(crate) fn shorter(self, by: usize) -> Trace {
        let (n_shared, n_message) = (self.n_shared / by, self.n_message / by);
        Trace { n_shared, n_message, n_reply: self.n_reply / by as u32, ..self }
    }

    /// A line for a report.
    pub(crate) fn described(&self) -> String {
        let Trace { name, n_shared, n_conversations, n_turns, n_message, n_reply, order } = self;
        let order = match order {
            TurnOrder::Through => "one conversation after another",
            TurnOrder::Around => "in turn",
        };
        format!(
            "- {name}: {n_conversations} × {n_turns} turns, {order}. All begin with the same {n_shared} tokens; each turn has \
             {n_message} new ones and a reply of {n_reply}."
        )
    }
}

/// The order in which the turns of several conversations come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TurnOrder {
    /// That of the same conversation, until it has had all.
    Through,
    /// That of the next conversation.
    Around,
}

pub(crate) const TRACES: [Trace; 3] = [
    Trace {
        name: "an agent",
        n_shared: 8_000,
        n_conversations: 6,
        n_turns: 10,
        n_message: 400,
        n_reply: 150,
        order: TurnOrder::Through,
    },
    Trace {
        name: "30 chats",
        n_shared: 600,
        n_conversations: 30,
        n_turns: 4,
        n_message: 300,
        n_reply: 200,
        order: TurnOrder::Around,
    },
    Trace {
        name: "60 submissions",
        n_shared: 1_500,
        n_conversations: 60,
        n_turns: 1,
        n_message: 3_000,
        n_reply: 200,
        order: TurnOrder::Through,
    },
];

/// What became of a trace.
#[derive(Debug, Serialize)]
pub(crate) struct TraceFigures {
    pub(crate) trace: &'static str,
    pub(crate) store: TraceStore,
    pub(crate) n_requests: usize,
    /// Where the tokens of all prompts came from.
    pub(crate) tokens: TracedTokens,
    /// KV that both machines wrote to disk.
    pub(crate) written_bytes: u64,
    /// Against the fixed route that completed first.
    pub(crate) regret: Summary,
}

/// Prompt tokens, by where their KV was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct TracedTokens {
    /// All tokens of the prompts.
    pub(crate) all: u64,
    pub(crate) slot: u64,
    pub(crate) memory: u64,
    pub(crate) disk: u64,
    /// The other machine had it.
    pub(crate) other_node: u64,
    /// On both machines together. One that computes a prompt for the other one computes the reply before it, too, if it lacks that.
    pub(crate) computed: u64,
}

impl TracedTokens {
    fn add(&mut self, n_prompt: usize, request: &PlannedRequest) {
        self.all += n_prompt as u64;
        let cached = request.cached;
        let (n_pulled, n_reused) = request.handoff.map_or((0, 0), |report| (report.n_tokens, report.n_reused()));
        self.slot += u64::from(cached.n_cached - cached.memory - cached.disk);
        self.memory += u64::from(cached.memory);
        self.disk += u64::from(cached.disk);
        self.other_node += u64::from(n_reused);
        let n_computed_there = request.handoff.map_or(0, |report| report.n_computed);
        let n_left = (n_prompt as u64).saturating_sub(u64::from(cached.n_cached) + u64::from(n_pulled));
        self.computed += u64::from(n_computed_there) + n_left;
    }
}

/// Runs traces with each store, on one thread with a paused clock.
pub(crate) async fn run(traces: &'static [Trace]) -> Result<Vec<TraceFigures>, CommandFailure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build()?;
    let all = async move {
        let mut figures = Vec::new();
        for trace in traces {
            for store in TraceStore::ALL {
                figures.push(follow(trace, store).await?);
            }
        }
        Ok(figures)
    };
    tokio::task::spawn_blocking(move || runtime.block_on(all)).await?
}

/// Runs a trace once, every request when the one before it has ended.
async fn follow(trace: &Trace, store: TraceStore) -> Result<TraceFigures, CommandFailure> {
    let spec = ClusterSpec { store: store.tiers(), ..ClusterSpec::spark_and_mac(4_096) };
    let cluster = Cluster::calibrated(&spec).await?;
    let mut rng = StdRng::seed_from_u64(5);
    let mut text = |n: usize| -> Vec<Token> { (0..n).map(|_| rng.random_range(0..256)).collect() };
    let mut conversations = vec![text(trace.n_shared); trace.n_conversations];
    let (mut tokens, mut cells) = (TracedTokens::default(), Vec::new());
    for turn in 0..trace.n_requests() {
        let prompt = &mut conversations[trace.conversation_of(turn)];
        prompt.extend(text(trace.n_message));
        let fixed = on_fixed_routes(&cluster, prompt, trace.n_reply).await?;
        let planned = cluster.run_planned(None, prompt.clone(), trace.n_reply).await?;
        tokens.add(prompt.len(), &planned);
        cells.push(GridCell {
            pair: trace.name,
            gbps: 10.0,
            n_prompt: prompt.len() as u32,
            cached: f64::from(planned.cached.n_cached) / prompt.len() as f64,
            n_output: trace.n_reply,
            planned: MeasuredCell::new(planned.route, planned.times),
            predicted_ttft: planned.prediction.map(|prediction| prediction.ttft_ms / 1e3),
            fixed,
        });
        prompt.extend(planned.reply);
    }
    let mut written_bytes = 0;
    for engine in &cluster.engines {
        written_bytes += engine.load().await?.store.unwrap_or_default().written_bytes;
    }
    let regret = summary(trace.name, &cells.iter().collect::<Vec<_>>());
    Ok(TraceFigures { trace: trace.name, store, n_requests: cells.len(), tokens, written_bytes, regret })
}

/// Runs a prompt on every fixed route. Leaves the machines with what they held before.
async fn on_fixed_routes(
    cluster: &Cluster,
    prompt: &[Token],
    n_output: u32,
) -> Result<Vec<MeasuredCell>, CommandFailure> {
    let held: Vec<SimMemory> = cluster.engines.iter().map(|engine| engine.memory()).collect();
    let mut fixed = Vec::new();
    for route in cluster.routes() {
        fixed.push(MeasuredCell::new(route, cluster.run_fixed(route, prompt.to_vec(), n_output).await?));
        cluster.engines.iter().zip(&held).for_each(|(engine, held)| engine.set_memory(held));
    }
    tokio::time::sleep(TOLD).await;
    Ok(fixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn chats_that_return_in_turn_are_computed_once_where_there_is_a_store() {
        let trace = Trace { n_conversations: 12, n_turns: 3, ..TRACES[1] };
        let mut figures = Vec::new();
        for store in TraceStore::ALL {
            figures.push(follow(&trace, store).await.unwrap());
        }
        let [slots, memory, disk] = &figures[..] else { panic!("{figures:?}") };
        for figures in [slots, memory, disk] {
            assert_eq!((figures.n_requests, figures.tokens.all), (36, slots.tokens.all), "{figures:?}");
            assert!(figures.regret.completion.p95 <= 0.05, "{figures:?}");
        }
        // Each message and each reply once, with a token before and after it, and the shared beginning at most twice.
        let n_new = (12 * 3 * (trace.n_message + trace.n_reply as usize + 2) + 2 * trace.n_shared) as u64;
        assert!(memory.tokens.computed <= n_new && disk.tokens.computed <= n_new, "{figures:?}");
        assert!(slots.tokens.computed > n_new, "{figures:?}");
        assert_eq!((slots.written_bytes, memory.written_bytes), (0, 0));
        assert!(disk.written_bytes > 0, "{figures:?}");
        let again = follow(&trace, TraceStore::MemoryAndDisk).await.unwrap();
        assert_eq!((again.tokens, again.written_bytes), (disk.tokens, disk.written_bytes));
    }
}
