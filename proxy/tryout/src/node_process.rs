//! A `baton node` as a child of this process, for commands that show or measure one.

use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use baton_engines::remote::{NodeAddress, RemoteEngine};
use baton_proxy::serve::CommandFailure;
use baton_schemas::node::{ChildEvent, KEY_VARIABLE, PULL_KEY_VARIABLE};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::program::program;

/// The longest start: 20 GB from a slow disk take minutes.
pub const START_DEADLINE: Duration = Duration::from_secs(600);

/// Bytes that a child may write before it is ready.
const MAX_EVENT_BYTES: u64 = 64 << 10;

/// A node on a loopback port of its own. It ends when this is dropped, and when this process ends.
pub struct NodeProcess {
    /// `http://127.0.0.1:PORT`
    pub url: String,
    pub engine: Arc<RemoteEngine>,
    child: Child,
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
        let mut child = command(OsStr::new(listen), key, args)?.env(PULL_KEY_VARIABLE, key).spawn()?;
        let address = ready(&mut child, START_DEADLINE)
            .await?
            .ok_or_else(|| CommandFailure("the node did not report its address".into()))?;
        let url = format!("http://{address}");
        let engine = Arc::new(RemoteEngine::new(&NodeAddress::Url(url.clone()), key)?);
        Ok(NodeProcess { url, engine, child })
    }

    /// Kills it at once, as an unplugged machine ends, and waits for the end.
    pub async fn unplug(mut self) -> Result<(), CommandFailure> {
        Ok(self.child.kill().await?)
    }

    /// The process, unless it has ended.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }
}

/// The command of a node that ends with this process: it exits when its standard input, which the child handle holds,
/// closes. It has no key for handoffs, like the child of an endpoint without prefill nodes.
pub fn command(listen: &OsStr, key: &str, args: impl IntoIterator<Item = OsString>) -> std::io::Result<Command> {
    let mut command = Command::new(program()?);
    command.args(["node", "--child", "--listen"]).arg(listen).args(args);
    command
        .env(KEY_VARIABLE, key)
        .env_remove(PULL_KEY_VARIABLE)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    Ok(command)
}

/// Waits until a node or an endpoint reports that it is ready. Returns its address if it listens on TCP.
pub async fn ready(child: &mut Child, deadline: Duration) -> Result<Option<SocketAddr>, CommandFailure> {
    let stdout = child.stdout.take().ok_or_else(|| CommandFailure("the child process has no output".into()))?;
    let mut event = String::new();
    let mut stdout = BufReader::new(stdout.take(MAX_EVENT_BYTES));
    let read = tokio::time::timeout(deadline, stdout.read_line(&mut event)).await;
    read.map_err(|_| CommandFailure("the child process does not become ready in time".into()))??;
    match serde_json::from_str(&event) {
        Ok(ChildEvent::Ready { address }) => Ok(address),
        Ok(ChildEvent::Failed { message, .. }) => Err(CommandFailure(message)),
        Err(_) => Err(CommandFailure("the child process ended while starting".into())),
    }
}
