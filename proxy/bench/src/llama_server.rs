//! llama-server as a child of this process, for benchmarks that measure it beside Baton.

use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use baton_proxy::serve::CommandFailure;
use reqwest::Response;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

/// The longest start, and the longest reply.
const DEADLINE: Duration = Duration::from_secs(600);

/// The pause between two looks whether it answers.
const POLL: Duration = Duration::from_millis(200);

/// The program of a llama-server, its model and its sizes.
#[derive(Clone, Copy)]
pub(crate) struct PeerServerOptions<'a> {
    pub(crate) program: &'a Path,
    pub(crate) model: &'a Path,
    pub(crate) n_slots: u32,
    /// Tokens of all slots together.
    pub(crate) n_ctx: u32,
    pub(crate) threads: Option<u32>,
}

/// A llama-server on a loopback port of its own. It ends when this is dropped.
pub(crate) struct PeerServer {
    url: String,
    client: reqwest::Client,
    process: Child,
}

impl PeerServer {
    /// Starts the program, with further arguments, and waits until it is ready.
    pub(crate) async fn start(
        options: PeerServerOptions<'_>,
        more: impl IntoIterator<Item = OsString>,
    ) -> Result<PeerServer, CommandFailure> {
        let PeerServerOptions { program, model, n_slots, n_ctx, threads } = options;
        // The port is free once the listener is dropped.
        let port = TcpListener::bind("127.0.0.1:0").await?.local_addr()?.port();
        let mut command = Command::new(program);
        command.arg("--model").arg(model).args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--parallel", &n_slots.to_string(), "--ctx-size", &n_ctx.to_string(), "--kv-unified"]);
        if let Some(n) = threads {
            command.args(["--threads", &n.to_string(), "--threads-batch", &n.to_string()]);
        }
        command.args(more);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        let process = command.spawn().map_err(|error| CommandFailure(format!("{}: {error}", program.display())))?;
        // It closes connections that were idle for a few seconds, which a request may meet.
        let client = reqwest::Client::builder().timeout(DEADLINE).pool_max_idle_per_host(0).build()?;
        let mut server = PeerServer { url: format!("http://127.0.0.1:{port}"), client, process };
        server.wait_until_ready().await?;
        Ok(server)
    }

    async fn wait_until_ready(&mut self) -> Result<(), CommandFailure> {
        let began = Instant::now();
        while began.elapsed() < DEADLINE {
            if let Some(status) = self.process.try_wait()? {
                return Err(CommandFailure(format!("llama-server has ended: {status}")));
            }
            let health = self.client.get(format!("{}/health", self.url)).send().await;
            if health.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(());
            }
            sleep(POLL).await;
        }
        Err(CommandFailure("llama-server does not answer".into()))
    }

    /// Sends a body to a path. Errors: it does not answer, or refuses; its own words then follow the status.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Response, CommandFailure> {
        let answer = self.client.post(format!("{}{path}", self.url)).json(body).send().await?;
        let status = answer.status();
        match status.is_success() {
            true => Ok(answer),
            false => {
                let why: String = answer.text().await?.chars().take(500).collect();
                Err(CommandFailure(format!("llama-server refuses {path} with {status}: {why}")))
            }
        }
    }

    /// Kills it and waits for its end.
    pub(crate) async fn stop(mut self) -> Result<(), CommandFailure> {
        Ok(self.process.kill().await?)
    }
}
