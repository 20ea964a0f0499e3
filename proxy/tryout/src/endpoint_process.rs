//! `baton serve` as a child of this process, for commands that need an endpoint of their own.

use std::ffi::OsString;
use std::time::Duration;

use baton_process::{ChildCommand, ChildProcess};
use baton_proxy::config::OWN_KEY_VARIABLE;
use baton_proxy::serve::CommandFailure;

use crate::program::program;

/// A running endpoint on a loopback port. It ends when this is dropped, and when this process ends, however that ends.
pub struct EndpointProcess {
    /// `http://127.0.0.1:PORT`
    pub base: String,
    child: ChildProcess,
}

/// How an endpoint is started.
pub struct EndpointStart<'a> {
    /// Further arguments of `baton serve`.
    pub args: Vec<OsString>,
    /// Variables in its environment. It does not inherit `BATON_SERVE_API_KEY`.
    pub variables: &'a [(&'a str, &'a str)],
    /// The longest wait until it is ready.
    pub deadline: Duration,
}

impl EndpointProcess {
    /// Starts an endpoint and waits until it is ready. Its log goes where this process's goes.
    pub async fn start(start: EndpointStart<'_>) -> Result<EndpointProcess, CommandFailure> {
        let command =
            ChildCommand::new("the endpoint's process", program()?).with_secrets().without_env(OWN_KEY_VARIABLE);
        let mut command = command.args(["serve", "--child"]).args(start.args).envs(start.variables.iter().copied());
        let mut child = command.spawn()?;
        let address = child.ready_within(start.deadline).await?;
        let address = address.ok_or_else(|| CommandFailure("the endpoint did not report its address".into()))?;
        Ok(EndpointProcess { base: format!("http://{address}"), child })
    }

    /// The process, unless it has ended.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Returns true if it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.child.has_ended()
    }

    /// Ends it and its engine, and waits for that.
    pub async fn stop(self) {
        self.child.stop().await;
    }
}
