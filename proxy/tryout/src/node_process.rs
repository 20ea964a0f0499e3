//! A `baton node` as a child of this process, for commands that show or measure one.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_process::{ChildCommand, ChildProcess};
use baton_proxy::serve::CommandFailure;
use baton_schemas::node::{KEY_VARIABLE, PULL_KEY_VARIABLE};

use crate::program::program;

/// The longest start: 20 GB from a slow disk take minutes.
pub const START_DEADLINE: Duration = Duration::from_secs(600);

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
        // A child pulls KV from other nodes only if it has a key for them. These nodes share one key.
        let mut child = command(listen.into(), key, args)?.envs([(PULL_KEY_VARIABLE, key)]).spawn()?;
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
