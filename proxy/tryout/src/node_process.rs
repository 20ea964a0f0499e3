//! A `baton node` as a child of this process, for commands that show or measure one.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use baton_link::Engine;
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_process::{ChildCommand, ChildProcess};
use baton_proxy::serve::CommandFailure;
use baton_schemas::node::{KEY_VARIABLE, PULL_KEY_VARIABLE, STORE_SECRET_VARIABLE};

use crate::program::program;

/// The longest start: 20 GB from a slow disk take minutes.
pub const START_DEADLINE: Duration = Duration::from_secs(600);

/// The store of a node has settled if its figures stay the same for so long, and is waited for at most so long.
const QUIET: Duration = Duration::from_millis(600);
const SETTLE_DEADLINE: Duration = Duration::from_secs(120);

/// A node on a loopback port of its own. It ends when this is dropped, and when this process ends.
pub struct NodeProcess {
    /// `http://127.0.0.1:PORT`
    pub url: String,
    pub engine: Arc<RemoteEngine>,
    child: ChildProcess,
}

impl NodeProcess {
    /// Starts a node with these arguments and waits until it is ready.
    pub async fn start(key: &str, args: impl IntoIterator<Item = OsString>) -> Result<NodeProcess, CommandFailure> {
        NodeProcess::start_at("127.0.0.1:0", key, args).await
    }

    /// The same at this address, to take the place of a node that has ended.
    pub async fn start_at(
        listen: &str,
        key: &str,
        args: impl IntoIterator<Item = OsString>,
    ) -> Result<NodeProcess, CommandFailure> {
        // A child pulls KV from other nodes, and keeps KV on disk, only if it has keys for that. These nodes share one key.
        let keys = [(PULL_KEY_VARIABLE, key), (STORE_SECRET_VARIABLE, key)];
        let mut child = command(listen.into(), key, args)?.envs(keys).spawn()?;
        let address = child.ready_within(START_DEADLINE).await?;
        let address = address.ok_or_else(|| CommandFailure("the node did not report its address".into()))?;
        let url = format!("http://{address}");
        let engine = Arc::new(RemoteEngine::new(&NodeAddress::Url(url.clone()), key)?);
        Ok(NodeProcess { url, engine, child })
    }

    /// Kills it at once, as an unplugged machine ends, and waits for the end.
    pub async fn unplug(self) {
        self.child.kill().await;
    }

    /// Waits until it has stored what it can, in memory and on disk. Errors: it does not answer, or its store does not settle.
    pub async fn settle(&self) -> Result<(), CommandFailure> {
        let figures = async || -> Result<_, CommandFailure> {
            let store = self.engine.load().await?.store.unwrap_or_default();
            Ok((store.blocks, store.memory_bytes, store.written_bytes))
        };
        let began = tokio::time::Instant::now();
        let mut known = (figures().await?, began);
        while known.1.elapsed() < QUIET {
            if began.elapsed() > SETTLE_DEADLINE {
                return Err(CommandFailure("the store of the node does not settle".into()));
            }
            tokio::time::sleep(QUIET / 10).await;
            let now = figures().await?;
            if now != known.0 {
                known = (now, tokio::time::Instant::now());
            }
        }
        Ok(())
    }

    /// The process, unless it has ended.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }
}

/// The command of a node that ends with this process. It has no key for handoffs, like the child of an endpoint without
/// prefill nodes.
pub fn command(listen: OsString, key: &str, args: impl IntoIterator<Item = OsString>) -> std::io::Result<ChildCommand> {
    let command = ChildCommand::new("the node's process", program()?).args(["node", "--child", "--listen"]);
    Ok(command.args([listen]).args(args).envs([(KEY_VARIABLE, key)]))
}
