//! `baton-bench serve`: loads running servers that speak OpenAI's API, measures them and checks their replies.
//!
//! Servers are compared in alternating rounds, so that a machine that becomes slower affects all. The client is one
//! thread: it writes prepared bodies, reads chunks into types without a tree, and shows its own processor time.
//! `docs/benchmarks.md` defines the figures.

mod args;
mod bodies;
mod check;
mod connection;
mod fault;
mod figures;
mod load;
mod processes;
mod report;
mod request;
mod round;
mod server;
mod settings;
pub(crate) mod stamps;
pub(crate) mod steady;
mod tally;
mod wire;
mod word_prompts;

use std::rc::Rc;

use baton_proxy::http::edge::open_files;
use baton_proxy::serve::signals::OnHangup;
use baton_proxy::serve::{CommandFailure, signals};
use tokio_util::sync::CancellationToken;

pub(crate) use self::args::ServeBenchArgs;
use self::report::{ServeFigures, ServerFigures};
use self::server::MeasuredServer;
pub(crate) use self::word_prompts::WordPrompts;
use crate::report::Destination;

/// Runs the benchmark. A signal ends it, and reports what was measured so far. Errors: a server does not answer, a request
/// failed, or a reply is wrong.
pub(crate) async fn run(args: ServeBenchArgs) -> Result<(), CommandFailure> {
    open_files::raise_limit();
    let settings = Rc::new(args.load());
    let destination = Destination::open("serve", &args.files, &args.charts)?;
    let stop = CancellationToken::new();
    signals::stop_on_signal(stop.clone(), OnHangup::Stops);
    let mut servers = Vec::new();
    let mut figures = Vec::new();
    for server in args.servers()? {
        let server = MeasuredServer::reach(server, &settings).await?;
        figures.push(ServerFigures {
            name: server.settings.name.clone(),
            url: server.settings.base.clone(),
            model: server.model.clone(),
            rounds: Vec::new(),
        });
        servers.push(Rc::new(server));
    }
    'rounds: for round in 0..settings.rounds as usize {
        for i in 0..servers.len() {
            // Each round begins with another server.
            let i = (i + round) % servers.len();
            let measured = round::measure(&servers[i], &settings, settings.seed + round as u64, &stop).await?;
            // A part of a round would distort the medians of whole ones.
            let is_part = stop.is_cancelled() && !figures[i].rounds.is_empty();
            if let Some(measured) = measured.filter(|_| !is_part) {
                let (requests, tokens) = (measured.requests_per_second(), measured.tokens_per_second());
                let name = &figures[i].name;
                eprintln!("round {}: {name}: {requests:.1} requests/s, {tokens:.1} tokens/s", round + 1);
                figures[i].rounds.push(measured);
            }
            if stop.is_cancelled() {
                break 'rounds;
            }
        }
    }
    let is_interrupted = figures.iter().any(|server| server.rounds.len() < settings.rounds as usize);
    let figures = ServeFigures { settings: (*settings).clone(), servers: figures, is_interrupted };
    destination.publish(&figures.json(), &figures.report())
}
