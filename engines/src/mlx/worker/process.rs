//! The worker's process: it is started with a socket as its standard input, and does not outlive this value.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The worker's program.
const PROGRAM: &str = include_str!("worker.py");

/// A model's packages have no use for them.
const SECRETS: [&str; 4] = ["BATON_CLUSTER_KEY", "BATON_PULL_KEY", "BATON_API_KEY", "HF_TOKEN"];

/// Lines of the worker's standard error that are kept for an error's message.
const KEPT_LINES: usize = 4;
/// Bytes of a line that are kept.
const MAX_LINE: u64 = 500;
/// A killed process ends at once, unless the system itself hangs.
const MAX_END: Duration = Duration::from_secs(5);
const END_POLL: Duration = Duration::from_millis(5);

/// A running worker.
pub(super) struct Process {
    pub(super) socket: UnixStream,
    child: Child,
    last_lines: Arc<Mutex<VecDeque<String>>>,
}

impl Process {
    /// Starts the worker. It ends with the thread that calls this, at the latest.
    pub(super) fn start(python: &Path, n_threads: Option<u32>) -> std::io::Result<Process> {
        let (socket, theirs) = UnixStream::pair()?;
        let mut command = Command::new(python);
        // Isolated: neither the working directory nor the user's own packages change what is imported.
        command.args(["-I", "-c", PROGRAM]).stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
        // Nothing is fetched, whatever a model's files name.
        command.env("HF_HUB_OFFLINE", "1").env("TRANSFORMERS_OFFLINE", "1").env("TOKENIZERS_PARALLELISM", "false");
        for name in SECRETS {
            command.env_remove(name);
        }
        if let Some(n) = n_threads {
            for name in ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"] {
                command.env(name, n.to_string());
            }
        }
        let mut child = command.spawn()?;
        let last_lines = Arc::default();
        if let Some(stderr) = child.stderr.take() {
            let kept = Arc::clone(&last_lines);
            std::thread::Builder::new().name("mlx log".into()).spawn(move || log(stderr, &kept))?;
        }
        Ok(Process { socket, child, last_lines })
    }

    /// The process's number.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Ends the process, and returns what became of it, in words.
    pub(super) fn end(mut self) -> String {
        let ended = self.child.try_wait();
        self.kill();
        let status = match ended {
            Ok(Some(status)) => format!("it ended by itself ({status})"),
            _ => "it was ended".to_owned(),
        };
        let lines = self.last_lines.lock().unwrap_or_else(PoisonError::into_inner);
        match lines.is_empty() {
            true => status,
            false => {
                format!("{status}; its last words: {}", Vec::from_iter(lines.iter().map(String::as_str)).join(" / "))
            }
        }
    }

    fn kill(&mut self) {
        if let Err(error) = self.child.kill() {
            tracing::warn!(%error, "the mlx worker cannot be killed");
        }
        let until = Instant::now() + MAX_END;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > until {
                tracing::error!(process = self.child.id(), "the mlx worker was killed and does not end");
                return;
            }
            std::thread::sleep(END_POLL);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Passes the worker's standard error to the log, and keeps its last lines.
fn log(stderr: ChildStderr, kept: &Mutex<VecDeque<String>>) {
    let mut stderr = BufReader::new(stderr);
    loop {
        let mut line = Vec::new();
        match (&mut stderr).take(MAX_LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if line.is_empty() {
            continue;
        }
        tracing::debug!(line, "the mlx worker says");
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT_LINES {
            kept.pop_front();
        }
        kept.push_back(line);
    }
}
