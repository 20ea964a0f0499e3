//! A running node: how it starts, hears signals, and ends.

use baton_link::node::{ListenAddress, Listener, ServerTls};
use baton_process::parent;
use baton_proxy::http::edge::open_files;
use baton_proxy::serve::signals::{self, OnHangup};
use baton_proxy::serve::{CommandFailure, model_files, service_manager};
use baton_schemas::node::ChildEvent;
use rustix::process::Signal;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::door::{Behind, Door, certificate};
use super::end::NodeEnd;
use super::engine_node;
use super::event::{NodeEvent, ReadyNode, Tell};
use super::failure::NodeFailure;
use super::options::{NodeOptions, NodeTask, WayToRun};
use super::program_again::set_threads;
#[cfg(feature = "llama")]
use super::worker_node;

/// A node that serves.
pub struct RunningNode {
    server: JoinHandle<std::io::Result<()>>,
    end: NodeEnd,
}

impl RunningNode {
    /// Waits until a signal, or the end of its parent, has stopped it.
    pub async fn finished(self) -> Result<(), CommandFailure> {
        let served = self.server.await?;
        service_manager::report_stopping();
        self.end.store_kv().await;
        Ok(served?)
    }
}

/// Finds mistakes that would end the start. Downloads nothing.
pub async fn check(options: &NodeOptions) -> Result<(), CommandFailure> {
    options.check_options().await?;
    certificate(options)?;
    options.transport.transport()?;
    match options.task {
        NodeTask::Engine(_) => {
            let needs_file = options.engine.kind().needs_file();
            if let Some(source) = options.model.as_ref().filter(|_| needs_file).and_then(|model| model.to_str()) {
                model_files::find(source)?;
            }
        }
        #[cfg(feature = "llama")]
        NodeTask::Worker => drop(worker_node::lender(options).await?),
        #[cfg(not(feature = "llama"))]
        NodeTask::Worker => {}
    }
    // Dropped at once: the address is free.
    Ok(Listener::bind(&options.listen).await.map(drop)?)
}

/// Starts a node in this process, any way but as a keeper, and returns once it serves. Errors: it cannot. If a parent has
/// to say why, the parent is told, and this process ends.
pub async fn start(mut options: NodeOptions, tell: Tell) -> Result<RunningNode, CommandFailure> {
    set_threads(&options.engine)?;
    open_files::raise_limit();
    let way = options.way;
    let end = NodeEnd::of(&options.engine);
    match way {
        WayToRun::Alone | WayToRun::Keeper => {}
        WayToRun::Kept => parent::tie_to(Signal::TERM),
        WayToRun::Child => {
            let socket = match &options.listen {
                ListenAddress::Unix(path) => Some(path.clone()),
                ListenAddress::Tcp(_) => None,
            };
            let (runtime, end) = (Handle::current(), end.clone());
            // Killed, since destructors would race with the thread that computes.
            parent::tie_after(move || runtime.block_on(end.store_kv()), socket);
        }
    }
    options.transport = options.transport.or_paired();
    let (server, ready, on_hangup) = match serve(options, tell, &end).await {
        Ok(serving) => serving,
        Err(failure) if way.has_parent() => {
            parent::tell(&match failure {
                NodeFailure::Mistake { message, summary } => ChildEvent::Failed { message, summary },
                NodeFailure::Elsewhere { message, summary } => {
                    ChildEvent::Hindered { message, summary: summary.to_owned() }
                }
            });
            baton_proxy::log_queue::exit(1);
        }
        Err(failure) => return Err(failure.into()),
    };
    let address = ready.address;
    if way == WayToRun::Child {
        signals::ignore();
    } else {
        tell(NodeEvent::Ready(ready));
        signals::stop_on_signal(end.stop.clone(), on_hangup);
        service_manager::report_ready();
    }
    if way.has_parent() {
        parent::tell(&ChildEvent::Ready { address });
    }
    Ok(RunningNode { server, end })
}

/// Listens, and serves what `options` ask for.
async fn serve(
    options: NodeOptions,
    tell: Tell,
    end: &NodeEnd,
) -> Result<(JoinHandle<std::io::Result<()>>, ReadyNode, OnHangup), NodeFailure> {
    options.check_options().await?;
    let door = Door::open(&options).await?;
    let on_hangup = if door.tls.is_some() { OnHangup::Rereads } else { OnHangup::Stops };
    // Before the model loads: SIGHUP would end the process.
    if let Some(tls) = door.tls.clone() {
        signals::on_hangup(move || renew(&tls, tell));
    }
    let (address, is_paired) = (door.address, door.machine.is_some());
    let Behind { server, serves } = match options.task {
        NodeTask::Engine(role) => engine_node::start(options, role, door, tell, end).await?,
        #[cfg(feature = "llama")]
        NodeTask::Worker => worker_node::start(&options, door, &end.stop).await?,
        #[cfg(not(feature = "llama"))]
        NodeTask::Worker => return Err(NodeFailure::setup("this build lends no devices")),
    };
    Ok((server, ReadyNode { address, is_paired, serves }, on_hangup))
}

/// Reads the certificate again. A mistake in the new files must not end a node that serves.
fn renew(tls: &ServerTls, tell: Tell) {
    match tls.reload() {
        Ok(()) => tell(NodeEvent::CertificateRead),
        Err(error) => tracing::error!(%error, "reloading the certificate failed; the old one stays in use"),
    }
}
