//! `baton node --role worker`: lends this machine's devices. [`baton_engines::workers`] does it.

use std::net::SocketAddr;
use std::sync::Arc;

use baton_engines::node::{ClusterKey, Listener, ServerTls};
use baton_engines::workers::server::worker_router;
use baton_engines::workers::session::{Lender, LenderOptions};
use baton_proxy::config::engine_args::EngineArgs;
use baton_proxy::serve::signals::{self, OnHangup};
use baton_proxy::serve::{CommandFailure, service_manager};
use baton_schemas::node::ChildEvent;
use rustix::process::Signal;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::node::{NodeArgs, certificate, cluster_key, refuse_open_address, renew};
use super::node_failure::NodeFailure;
use super::pair::{PairFirst, pair_first};
use super::{lifeline, terminal};

/// Runs until a signal stops it.
pub(super) async fn run(args: NodeArgs) -> Result<(), CommandFailure> {
    let is_child = args.child;
    if let Some(code) = args.pair.clone() {
        pair_first(PairFirst::Join { code, at: args.at.clone() }).await?;
    }
    if is_child {
        lifeline::tie_to_parent(Signal::KILL, None);
    }
    let stop = CancellationToken::new();
    let StartedWorker { server, address, tls, lends } = match start(args, &stop).await {
        Ok(started) => started,
        Err(failure) if is_child => {
            lifeline::tell_parent(&ChildEvent::Failed { message: failure.message, summary: failure.summary });
            std::process::exit(1);
        }
        Err(failure) => return Err(CommandFailure(failure.message)),
    };
    if is_child {
        lifeline::tell_parent(&ChildEvent::Ready { address });
        signals::ignore();
    } else {
        if let Some(address) = address {
            terminal::note(format_args!("baton node is ready on {address}"));
        }
        terminal::note(format_args!("It lends {lends}"));
        let on_hangup = if tls.is_some() { OnHangup::Rereads } else { OnHangup::Stops };
        if let Some(tls) = tls {
            signals::on_hangup(move || renew(&tls));
        }
        signals::stop_on_signal(stop, on_hangup);
        service_manager::report_ready();
    }
    server.await??;
    Ok(())
}

/// A worker that serves.
struct StartedWorker {
    server: JoinHandle<std::io::Result<()>>,
    /// Where, if it listens on TCP.
    address: Option<SocketAddr>,
    tls: Option<ServerTls>,
    /// The devices, for people.
    lends: String,
}

async fn start(mut args: NodeArgs, stop: &CancellationToken) -> Result<StartedWorker, NodeFailure> {
    let of_worker =
        EngineArgs { device: args.engine.device.clone(), threads: args.engine.threads, ..EngineArgs::default() };
    if args.model.is_some() || args.name.is_some() || args.engine != of_worker {
        return Err(NodeFailure::setup(
            "a worker has no engine: of the options of models and engines, it takes --device and --threads",
        ));
    }
    args.transport = args.transport.or_paired();
    let key = cluster_key(&args.transport)?;
    let tls = certificate(&args).map_err(NodeFailure::setup)?;
    if tls.is_none() && !args.transport.allow_plain_http {
        refuse_open_address(&args.listen).await?;
    }
    let options = LenderOptions {
        program: std::env::current_exe().map_err(NodeFailure::setup)?,
        device: args.engine.device.clone(),
        threads: args.engine.threads,
        max_memory: args.lend_memory.map(|mib| u64::from(mib) << 20),
    };
    let lender = Lender::start(options).await.map_err(NodeFailure::setup)?;
    let lends = lender.devices().iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(", ");
    let listener = Listener::bind(&args.listen).await.map_err(NodeFailure::setup)?;
    let address = listener.tcp_address();
    let listener = match &tls {
        Some(tls) => listener.with_tls(tls.clone()),
        None => listener,
    };
    let router = worker_router(Arc::new(lender), ClusterKey::new(&key));
    let server = tokio::spawn(listener.serve(router, stop.clone()));
    Ok(StartedWorker { server, address, tls, lends })
}
