//! `baton serve` as a child of this process.

use std::ffi::OsString;
use std::process::Stdio;
use std::time::Duration;

use baton_proxy::serve::CommandFailure;
use baton_schemas::node::KEY_VARIABLE;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};

/// The longest start; loading the model takes much less.
const START_DEADLINE: Duration = Duration::from_secs(120);

/// Bytes that an endpoint may write before it is ready; its banner has some lines.
const MAX_BANNER_BYTES: u64 = 64 << 10;

/// A running endpoint. Dropping it kills it, and its engine's process with it.
pub(super) struct DemoEndpoint {
    /// `http://127.0.0.1:PORT`
    pub(super) base: String,
    _child: Child,
}

impl DemoEndpoint {
    /// Starts an endpoint with these arguments on a port of its own and waits until it is ready.
    pub(super) async fn start(
        key: &str,
        args: impl IntoIterator<Item = OsString>,
    ) -> Result<DemoEndpoint, CommandFailure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["serve", "--listen", "127.0.0.1:0", "--name", super::ask::MODEL])
            .args(args)
            .env(KEY_VARIABLE, key)
            .env_remove("BATON_API_KEY")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let stdout = child.stdout.take().ok_or_else(|| CommandFailure("the endpoint has no output".into()))?;
        let mut output = BufReader::new(stdout).take(MAX_BANNER_BYTES);
        let base = tokio::time::timeout(START_DEADLINE, ready(&mut output)).await;
        let base = base.map_err(|_| CommandFailure("the endpoint does not become ready".into()))??;
        // Keep reading the child's output: a write to a closed pipe would end the endpoint.
        tokio::spawn(async move { tokio::io::copy(&mut output.into_inner(), &mut tokio::io::sink()).await });
        Ok(DemoEndpoint { base, _child: child })
    }
}

/// The address in the ready message.
async fn ready(output: impl AsyncBufReadExt + Unpin) -> Result<String, CommandFailure> {
    let mut lines = output.lines();
    while let Some(line) = lines.next_line().await? {
        if let Some((_, url)) = line.split_once(" at http://") {
            return Ok(format!("http://{}", url.trim_end_matches("/v1")));
        }
    }
    Err(CommandFailure("the endpoint ended while starting".into()))
}
