//! A child that a thread calls by a socket, without a runtime.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStderr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::child::KILL_DEADLINE;

/// Lines of its standard error that are kept for an error's message.
const KEPT_LINES: usize = 4;
/// Bytes of a line that are kept.
const MAX_LINE: u64 = 500;
const END_POLL: Duration = Duration::from_millis(5);

/// The longest time from the end of a process's socket to its own.
const END_WAIT: Duration = Duration::from_millis(200);

/// A child. Dropping it kills it, and waits for its end.
#[derive(Debug)]
pub struct CalledChild {
    name: &'static str,
    process: Child,
    last_lines: Arc<Mutex<VecDeque<String>>>,
}

impl CalledChild {
    pub(super) fn of(name: &'static str, mut process: Child) -> std::io::Result<CalledChild> {
        let stderr = process.stderr.take();
        let child = CalledChild { name, process, last_lines: Arc::default() };
        if let Some(stderr) = stderr {
            let kept = Arc::clone(&child.last_lines);
            std::thread::Builder::new().name("child's log".into()).spawn(move || log(name, stderr, &kept))?;
        }
        Ok(child)
    }

    /// The process's id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Returns true if it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.process.try_wait(), Ok(None))
    }

    /// Returns true if it ended by its own doing, as at a limit. One that was killed from outside, as by a system that lacks
    /// memory, has not, nor has one that is stopped or stuck. Waits up to 200 ms for its end, since its socket closes first.
    pub fn has_failed(&mut self) -> bool {
        let until = Instant::now() + END_WAIT;
        loop {
            match self.process.try_wait() {
                Ok(Some(status)) => return status.signal() != Some(Signal::KILL.as_raw()),
                Ok(None) if Instant::now() < until => std::thread::sleep(END_POLL),
                _ => return false,
            }
        }
    }

    /// Kills it, and returns what became of it, in words.
    pub fn end(mut self) -> String {
        let ended = self.process.try_wait();
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
        if let Err(error) = self.process.kill() {
            tracing::warn!(%error, "{} cannot be killed", self.name);
        }
        let until = Instant::now() + KILL_DEADLINE;
        while matches!(self.process.try_wait(), Ok(None)) {
            if Instant::now() > until {
                tracing::error!(process = self.id(), "{} was killed but has not ended", self.name);
                return;
            }
            std::thread::sleep(END_POLL);
        }
    }
}

impl Drop for CalledChild {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Passes its standard error to the log, and keeps its last lines.
fn log(name: &str, stderr: ChildStderr, kept: &Mutex<VecDeque<String>>) {
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
        tracing::debug!(line, "{name} says");
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT_LINES {
            kept.pop_front();
        }
        kept.push_back(line);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::process::{Pid, kill_process};

    use super::super::ChildCommand;
    use super::*;

    #[test]
    fn a_called_child_answers_by_its_socket_and_its_last_words_are_kept() {
        let script = "read -r call; printf \"$call\\n\" >&0; for n in 1 2 3 4 5; do echo line $n >&2; done; exit 3";
        let (mut socket, child) = ChildCommand::new("the child", "sh").args(["-c", script]).spawn_called().unwrap();
        socket.write_all(b"hello\n").unwrap();
        // The child holds the only other end, so its end is the end of the stream.
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "hello\n");
        while child.last_lines.lock().unwrap().back().is_none_or(|line| line != "line 5") {
            std::thread::sleep(END_POLL);
        }
        let end = child.end();
        assert!(end.ends_with("its last words: line 2 / line 3 / line 4 / line 5"), "{end}");
    }

    #[test]
    fn a_called_child_that_was_killed_or_stopped_is_told_from_one_that_ended() {
        let scripts = [("kill -KILL $$", false), ("kill -ABRT $$", true), ("kill -XCPU $$", true), ("exit 3", true)];
        for (script, failed) in scripts {
            let (mut socket, mut child) =
                ChildCommand::new("the child", "sh").args(["-c", script]).spawn_called().unwrap();
            let mut answer = String::new();
            socket.read_to_string(&mut answer).unwrap();
            while !child.has_ended() {
                std::thread::sleep(END_POLL);
            }
            assert_eq!(child.has_failed(), failed, "{script}");
        }
        let (_socket, mut stopped) =
            ChildCommand::new("the child", "sh").args(["-c", "kill -STOP $$"]).spawn_called().unwrap();
        assert!(!stopped.has_failed(), "it has not ended");
    }

    #[test]
    fn dropping_a_called_child_ends_it() {
        let (_socket, child) = ChildCommand::new("the child", "sleep").args(["600"]).spawn_called().unwrap();
        let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
        drop(child);
        assert!(kill_process(pid, Signal::CONT).is_err(), "it is gone and reaped");
    }
}
