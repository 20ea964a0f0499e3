//! A node process under measurement, and what its memory and streams look like from outside.

use std::ffi::OsString;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engines::Engine;
use baton_engines::remote::{NodeAddress, RemoteEngine};
use baton_schemas::generate::Sampling;
use baton_schemas::node::{ChildEvent, KEY_VARIABLE};
use baton_schemas::{Delta, SequenceRequest, Token};
use futures::StreamExt;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::cli::Failure;

/// Loading the model of a benchmark takes no longer than this, or something is wrong.
const START_DEADLINE: Duration = Duration::from_secs(120);

/// llama.cpp has written all its sizes before the node is ready; its log only has to be read.
const LOG_DEADLINE: Duration = Duration::from_secs(5);

/// A running `baton node` with the sizes llama.cpp reported for itself.
pub(super) struct BenchNode {
    pub(super) engine: Arc<RemoteEngine>,
    pub(super) buffers: Buffers,
    child: Child,
    _folder: tempfile::TempDir,
}

/// llama.cpp's own account of its buffers, MiB, read from its log.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Buffers {
    pub(super) model: f64,
    pub(super) kv: f64,
    pub(super) compute: f64,
}

impl BenchNode {
    pub(super) async fn start(args: Vec<OsString>) -> Result<BenchNode, Failure> {
        let folder = tempfile::Builder::new().prefix("baton-bench-").tempdir()?;
        let socket = folder.path().join("node.sock");
        let key = uuid::Uuid::new_v4().to_string();
        let mut listen = OsString::from("unix:");
        listen.push(&socket);
        let mut child = Command::new(std::env::current_exe()?)
            .args(["node", "--child", "--listen"])
            .arg(listen)
            .args(args)
            .env(KEY_VARIABLE, &key)
            .env("RUST_LOG", "llama-cpp-2=info")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(Failure("the node has no pipes".into()));
        };
        // Its log is read to the end, so that a full pipe never stops it.
        let log = tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            let mut buffers = Buffers::default();
            while let Ok(Some(line)) = lines.next_line().await {
                buffers.read(&line);
                if line.contains("splits =") {
                    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
                    break;
                }
            }
            buffers
        });
        let mut event = String::new();
        let mut stdout = BufReader::new(stdout);
        tokio::time::timeout(START_DEADLINE, stdout.read_line(&mut event)).await??;
        match serde_json::from_str(&event) {
            Ok(ChildEvent::Ready) => {}
            Ok(ChildEvent::Failed { message, .. }) => return Err(Failure(message)),
            Err(_) => return Err(Failure("the node ended while starting".into())),
        }
        let buffers = tokio::time::timeout(LOG_DEADLINE, log)
            .await
            .map_err(|_| Failure("llama.cpp's log does not tell its buffer sizes".into()))??;
        let engine = Arc::new(RemoteEngine::new(&NodeAddress::Unix(socket), &key)?);
        Ok(BenchNode { engine, buffers, child, _folder: folder })
    }

    /// Resident memory of the process, MiB; `None` where the system does not tell.
    pub(super) fn resident_mib(&self) -> Option<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()?)).ok()?;
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
        let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
        Some(kib / 1024.0)
    }

    /// Continues a prompt greedily by exactly `n_new` tokens.
    pub(super) async fn stream(&self, prompt: Vec<Token>, n_new: u32) -> Result<Timeline, Failure> {
        let request = SequenceRequest {
            prompt,
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            max_tokens: Some(n_new),
            ignore_eos: true,
            ..SequenceRequest::default()
        };
        let mut timeline = Timeline { sent: Instant::now(), tokens: Vec::new() };
        let mut deltas = self.engine.generate(request).await?;
        while let Some(delta) = deltas.next().await {
            if let Delta::Token(_) = delta? {
                timeline.tokens.push(Instant::now());
            }
        }
        Ok(timeline)
    }
}

impl Buffers {
    /// Adds up lines like `CPU compute buffer size = 100.25 MiB`.
    fn read(&mut self, line: &str) {
        let Some((what, size)) = line.split_once("buffer size =") else { return };
        let Some(mib) = size.split_once("MiB").and_then(|(n, _)| n.trim().parse::<f64>().ok()) else { return };
        let total = match what.trim_end() {
            w if w.ends_with("model") => &mut self.model,
            w if w.ends_with("KV") => &mut self.kv,
            _ => &mut self.compute,
        };
        *total += mib;
    }
}

/// When a stream's tokens arrived.
pub(super) struct Timeline {
    pub(super) sent: Instant,
    pub(super) tokens: Vec<Instant>,
}

impl Timeline {
    /// Time to first token, seconds.
    pub(super) fn ttft(&self) -> f64 {
        self.tokens.first().map_or(f64::NAN, |first| (*first - self.sent).as_secs_f64())
    }

    /// Tokens per second between the first and the last.
    pub(super) fn decode_tps(&self) -> f64 {
        match (self.tokens.first(), self.tokens.last()) {
            (Some(first), Some(last)) => (self.tokens.len() - 1) as f64 / (*last - *first).as_secs_f64(),
            _ => f64::NAN,
        }
    }

    /// Gaps between tokens, seconds.
    pub(super) fn gaps(&self) -> impl Iterator<Item = f64> + '_ {
        self.tokens.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_cpps_buffer_lines_are_understood() {
        let mut buffers = Buffers::default();
        for line in [
            "INFO load_from_file:   CPU_Mapped model buffer size =    92.13 MiB module=\"llama.cpp::load_tensors\"",
            "llama_kv_cache:        CPU KV buffer size =   360.00 MiB",
            "sched_reserve:        CPU compute buffer size =    98.25 MiB",
            "llama_context:        CPU  output buffer size =     0.75 MiB",
            "something else = 3 MiB",
        ] {
            buffers.read(line);
        }
        assert_eq!((buffers.model, buffers.kv, buffers.compute), (92.13, 360.0, 99.0));
    }
}
