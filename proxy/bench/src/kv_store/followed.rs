//! `--traces`: a node and llama-server get the same traces of requests with a real model. Counts, and no times: which part of the
//! prompts each of them computes.

use std::ffi::OsString;
use std::path::Path;

use baton_fetch as models;
use baton_proxy::serve::{CommandFailure, model_files};
use baton_schemas::Token;
use baton_tryout::node_process::NodeProcess;
use baton_tryout::prompts::Prompts;
use serde::Serialize;

use super::{STORE_MEMORY, StoreBenchArgs, peer, start};
use crate::llama_server::{PeerServer, PeerServerOptions};
use crate::plan::traces::{TRACES, Trace};
use crate::report::Report;
use crate::timeline::{greedy, stream};

/// The slots of each server.
const N_SLOTS: u32 = 4;

/// How many times shorter prompts and replies are than those of the simulated machines.
const SHORTER: usize = 10;

/// All figures.
#[derive(Debug, Serialize)]
pub(super) struct FollowedTraces {
    model: String,
    rows: Vec<FollowedTrace>,
}

/// The prompts of a trace on one server, and their cached tokens.
#[derive(Debug, Serialize)]
struct FollowedTrace {
    trace: &'static str,
    server: TracedServer,
    /// Tokens of all prompts.
    n_prompt: u64,
    /// Tokens whose KV was there.
    n_cached: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum TracedServer {
    Baton,
    LlamaServer,
}

/// A server that continues prompts.
enum Follower {
    Node(NodeProcess),
    Peer(PeerServer),
}

/// Runs all traces with the first of the models.
pub(super) async fn run(args: &StoreBenchArgs) -> Result<FollowedTraces, CommandFailure> {
    let model = args.models.first().ok_or_else(|| CommandFailure("--traces needs a model".into()))?;
    let path = models::pull(model, &model_files::pull_options()?).await?;
    let mut rows = Vec::new();
    for trace in TRACES.map(|trace| trace.shorter(SHORTER)) {
        let n_turn = trace.n_message + trace.n_reply as usize;
        let n_ctx = (trace.n_shared + trace.n_turns * n_turn + 1).next_multiple_of(256) as u32;
        let node = start_node(args, &path, n_ctx).await?;
        let mut prompts = Prompts::of(&node.engine).await?;
        let texts = Texts::of(&trace, &mut prompts);
        rows.push(follow(&trace, &texts, &Follower::Node(node)).await?);
        if let Some(program) = &args.peer {
            let n_ctx = n_ctx * N_SLOTS;
            let options = PeerServerOptions { program, model: &path, n_slots: N_SLOTS, n_ctx, threads: args.threads };
            let server = Follower::Peer(peer::start_with_cache(options).await?);
            rows.push(follow(&trace, &texts, &server).await?);
        }
    }
    let model = path.file_stem().map_or_else(|| model.clone(), |name| name.to_string_lossy().into_owned());
    Ok(FollowedTraces { model, rows })
}

async fn start_node(args: &StoreBenchArgs, model: &Path, n_ctx: u32) -> Result<NodeProcess, CommandFailure> {
    let mut node_args: Vec<OsString> = vec!["--model".into(), model.into()];
    let numbers = [("--slots", N_SLOTS), ("--ctx-size", n_ctx), ("--kv-cells", n_ctx * N_SLOTS)];
    let numbers = numbers.into_iter().chain(args.threads.map(|n| ("--threads", n)));
    node_args.extend(numbers.flat_map(|(name, n)| [name.into(), n.to_string().into()]));
    start(&uuid::Uuid::new_v4().to_string(), &node_args, None, STORE_MEMORY).await
}

/// The texts of a trace's clients.
struct Texts {
    /// The instructions that all conversations share.
    shared: Vec<Token>,
    /// The message of each turn.
    messages: Vec<Vec<Token>>,
}

impl Texts {
    fn of(trace: &Trace, prompts: &mut Prompts) -> Texts {
        let shared = prompts.next(trace.n_shared);
        Texts { shared, messages: (0..trace.n_requests()).map(|_| prompts.next(trace.n_message)).collect() }
    }
}

/// Sends every request when the one before it has ended. Conversations go on with the server's own replies.
async fn follow(trace: &Trace, texts: &Texts, follower: &Follower) -> Result<FollowedTrace, CommandFailure> {
    let mut conversations = vec![texts.shared.clone(); trace.n_conversations];
    let (mut n_prompt, mut n_cached) = (0, 0);
    for (turn, message) in texts.messages.iter().enumerate() {
        let prompt = &mut conversations[trace.conversation_of(turn)];
        prompt.extend(message);
        let (reply, n) = follower.reply(prompt, trace.n_reply).await?;
        n_prompt += prompt.len() as u64;
        n_cached += u64::from(n);
        prompt.extend(reply);
    }
    Ok(FollowedTrace { trace: trace.name, server: follower.server(), n_prompt, n_cached })
}

impl Follower {
    fn server(&self) -> TracedServer {
        match self {
            Follower::Node(_) => TracedServer::Baton,
            Follower::Peer(_) => TracedServer::LlamaServer,
        }
    }

    /// The reply to a prompt, and the number of its tokens whose KV was there.
    async fn reply(&self, prompt: &[Token], n_new: u32) -> Result<(Vec<Token>, u32), CommandFailure> {
        match self {
            Follower::Node(node) => {
                let reply = stream(&node.engine, greedy(prompt.to_vec(), n_new)).await?;
                Ok((reply.ids, reply.cached.n_cached))
            }
            Follower::Peer(server) => {
                let reply = peer::complete(server, prompt, n_new).await?;
                Ok((reply.tokens, reply.n_cached))
            }
        }
    }
}

/// The table.
pub(super) fn report(figures: &FollowedTraces) -> Report {
    let mut report = Report::new(format!("Traces, {}", figures.model));
    report.text(TRACES.map(|trace| trace.shorter(SHORTER).described()).join("\n"));
    report.table(&["trace", "server", "prompts, tokens", "computed", "there already"], figures.rows.iter().map(cells));
    report.text(
        "Both servers have four slots and as much memory for KV as they want (llama-server: --cache-ram), and no disk. Each request is sent \
         when the one before it has ended, and goes on with the server's own reply.",
    );
    report
}

fn cells(row: &FollowedTrace) -> Vec<String> {
    let server = match row.server {
        TracedServer::Baton => "Baton",
        TracedServer::LlamaServer => "llama-server",
    };
    let share = 100.0 * row.n_cached as f64 / row.n_prompt.max(1) as f64;
    let n_computed = row.n_prompt.saturating_sub(row.n_cached);
    vec![
        row.trace.to_owned(),
        server.to_owned(),
        row.n_prompt.to_string(),
        n_computed.to_string(),
        format!("{share:.1} %"),
    ]
}
