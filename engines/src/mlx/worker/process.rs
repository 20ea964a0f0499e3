//! The worker's process: it is started with a socket as its standard input, and does not outlive this value.

use std::os::unix::net::UnixStream;
use std::path::Path;

use baton_process::{CalledChild, ChildCommand};

/// The worker's program.
const PROGRAM: &str = include_str!("worker.py");

/// A running worker.
pub(super) struct Process {
    pub(super) socket: UnixStream,
    pub(super) child: CalledChild,
}

impl Process {
    /// Starts the worker. It ends with the thread that calls this, at the latest.
    pub(super) fn start(python: &Path, n_threads: Option<u32>) -> std::io::Result<Process> {
        // Isolated: neither the working directory nor the user's own packages change what is imported.
        let command = ChildCommand::new("the mlx worker", python).args(["-I", "-c", PROGRAM]);
        // Nothing is fetched, whatever a model's files name.
        let offline = [("HF_HUB_OFFLINE", "1"), ("TRANSFORMERS_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false")];
        let threads = ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"];
        let threads = n_threads.into_iter().flat_map(|n| threads.map(|name| (name, n.to_string())));
        let (socket, child) = command.envs(offline).envs(threads).spawn_called()?;
        Ok(Process { socket, child })
    }
}
