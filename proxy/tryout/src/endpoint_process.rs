//! `baton serve` as a child of this process, for commands that need an endpoint of their own.

use std::ffi::OsString;
use std::process::Stdio;
use std::time::Duration;

use baton_proxy::serve::CommandFailure;
use tokio::process::{Child, Command};

use crate::node_process::ready;
use crate::program::program;

/// How long an endpoint without requests may take to stop.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// A running endpoint on a loopback port. It ends when this is dropped, and when this process ends, however that ends.
pub struct EndpointProcess {
    /// `http://127.0.0.1:PORT`
    pub base: String,
    child: Child,
}

/// How an endpoint is started.
pub struct EndpointStart<'a> {
    /// Further arguments of `baton serve`.
    pub args: Vec<OsString>,
    /// Variables in its environment. It does not inherit `BATON_API_KEY`.
    pub variables: &'a [(&'a str, &'a str)],
    /// The longest wait until it is ready.
    pub deadline: Duration,
}

impl EndpointProcess {
    /// Starts an endpoint and waits until it is ready. Its log goes where this process's goes.
    pub async fn start(start: EndpointStart<'_>) -> Result<EndpointProcess, CommandFailure> {
        let mut child = Command::new(program()?)
            .args(["serve", "--child"])
            .args(start.args)
            .env_remove("BATON_API_KEY")
            .envs(start.variables.iter().copied())
            // Ctrl-C in the terminal is this process's: it may only end a reply.
            .process_group(0)
            // The child watches this pipe and ends with it.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let address = ready(&mut child, start.deadline).await?;
        let address = address.ok_or_else(|| CommandFailure("the endpoint did not report its address".into()))?;
        Ok(EndpointProcess { base: format!("http://{address}"), child })
    }

    /// Returns true if it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends it and its engine, and waits for that.
    pub async fn stop(mut self) {
        drop(self.child.stdin.take());
        // After the deadline, dropping it kills it.
        let _ = tokio::time::timeout(STOP_DEADLINE, self.child.wait()).await;
    }
}
