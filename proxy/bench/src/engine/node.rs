//! A node process under measurement, with the buffer sizes that llama.cpp reports.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_process::ChildProcess;
use baton_proxy::serve::CommandFailure;
use baton_schemas::{SequenceRequest, Token};
use baton_tryout::node_process;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::memory;
use crate::timeline::{Timeline, greedy, stream};

/// llama.cpp logs all sizes before the node is ready, so reading them takes little time.
const LOG_DEADLINE: Duration = Duration::from_secs(5);

/// A running `baton node` with the sizes llama.cpp reported for itself.
pub(super) struct BenchNode {
    pub(super) engine: Arc<RemoteEngine>,
    pub(super) buffers: Buffers,
    child: ChildProcess,
    _folder: tempfile::TempDir,
}

/// Sizes of llama.cpp's buffers in MiB, as its log reports them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Buffers {
    pub(super) model: f64,
    pub(super) kv: f64,
    pub(super) compute: f64,
}

impl BenchNode {
    pub(super) async fn start(args: Vec<OsString>) -> Result<BenchNode, CommandFailure> {
        let folder = tempfile::Builder::new().prefix("baton-bench-").tempdir()?;
        let socket = folder.path().join("node.sock");
        let key = uuid::Uuid::new_v4().to_string();
        let mut listen = OsString::from("unix:");
        listen.push(&socket);
        let command = node_process::command(listen, &key, args)?;
        let mut child = command.envs([("RUST_LOG", "llama-cpp-2=info")]).with_piped_stderr().spawn()?;
        let stderr = child.take_stderr().ok_or_else(|| CommandFailure("the node has no log".into()))?;
        // Read the log to its end, so that a full pipe never blocks the node.
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
        child.ready_within(node_process::START_DEADLINE).await?;
        let buffers = tokio::time::timeout(LOG_DEADLINE, log)
            .await
            .map_err(|_| CommandFailure("llama.cpp's log has no buffer sizes".into()))??;
        let engine = Arc::new(RemoteEngine::new(&NodeAddress::Unix(socket), &key)?);
        Ok(BenchNode { engine, buffers, child, _folder: folder })
    }

    /// Resident memory of the process, MiB; `None` if the system does not report it.
    pub(super) fn resident_mib(&self) -> Option<f64> {
        memory::resident_mib(self.child.id()?)
    }

    /// Continues a prompt greedily by exactly `n_new` tokens.
    pub(super) async fn stream(&self, prompt: Vec<Token>, n_new: u32) -> Result<Timeline, CommandFailure> {
        stream(&self.engine, greedy(prompt, n_new)).await
    }

    /// Computes a prompt without keeping it in the cache, so that the node has measured its rates and touched its memory.
    pub(super) async fn warm_up(&self, prompt: Vec<Token>) -> Result<(), CommandFailure> {
        let request = SequenceRequest { ephemeral: true, ..greedy(prompt, 1) };
        stream(&self.engine, request).await.map(|_| ())
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
