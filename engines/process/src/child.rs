//! A running child, as a task keeps it.

use std::net::SocketAddr;
use std::process::ExitStatus;
use std::time::Duration;

use baton_schemas::node::ChildEvent;
use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout};

/// How long a child may take to end after its lifeline is cut, or after it has closed its output: longer than it gives itself.
pub(super) const STOP_DEADLINE: Duration = Duration::from_secs(6);

/// The end of a killed child. It ends at once, unless the system itself hangs.
pub(super) const KILL_DEADLINE: Duration = Duration::from_secs(10);

/// Bytes that a child may write before it is ready; its events have some hundred.
const MAX_EVENT_BYTES: usize = 64 << 10;

/// Why a child did not become ready.
#[derive(Debug, thiserror::Error)]
pub enum StartFailure {
    /// The child said why.
    #[error("{message}")]
    Refused {
        /// For the operator: may name files.
        message: String,
        /// For clients.
        summary: String,
    },
    /// The child said why: another machine is the cause, so the next start may succeed.
    #[error("{message}")]
    Hindered {
        /// For the operator: may name files and addresses.
        message: String,
        /// For clients.
        summary: String,
    },
    /// It ended without a report.
    #[error("{name} ended while starting ({status})")]
    Ended { name: &'static str, status: ExitStatus },
    /// It closed its output, or wrote something else than events, and goes on.
    #[error("{name} does not report whether it is ready")]
    NoReport { name: &'static str },
    /// It is silent.
    #[error("{name} did not become ready within {} s", .deadline.as_secs())]
    TimedOut { name: &'static str, deadline: Duration },
    /// The system's error.
    #[error("{name} cannot be started: {error}")]
    Spawn { name: &'static str, error: std::io::Error },
}

/// A child. Dropping it kills it.
#[derive(Debug)]
pub struct ChildProcess {
    name: &'static str,
    process: Child,
    /// Its standard input. The child ends when this is closed. Not in `process`, which closes it when it waits.
    lifeline: ChildStdin,
    /// Its standard output, until nothing is expected on it.
    output: Option<BufReader<ChildStdout>>,
    /// The line that is being read.
    line: Vec<u8>,
    /// Bytes of the lines before.
    n_read: usize,
}

impl ChildProcess {
    pub(super) fn of(name: &'static str, mut process: Child) -> std::io::Result<ChildProcess> {
        let no_pipe = || std::io::Error::other("it has no pipes");
        let lifeline = process.stdin.take().ok_or_else(no_pipe)?;
        let output = Some(BufReader::new(process.stdout.take().ok_or_else(no_pipe)?));
        Ok(ChildProcess { name, process, lifeline, output, line: Vec::new(), n_read: 0 })
    }

    /// The process's id, until its end is known.
    pub fn id(&self) -> Option<u32> {
        self.process.id()
    }

    /// Its standard error, once, if it is piped.
    pub fn take_stderr(&mut self) -> Option<ChildStderr> {
        self.process.stderr.take()
    }

    /// Waits until it is ready, and then listens no more to its output. Returns its address if it listens on TCP. Dropping
    /// the future loses nothing.
    pub async fn ready(&mut self) -> Result<Option<SocketAddr>, StartFailure> {
        self.ready_after(|_| {}).await
    }

    /// The same with a deadline.
    pub async fn ready_within(&mut self, deadline: Duration) -> Result<Option<SocketAddr>, StartFailure> {
        self.ready_after_waits(deadline, |_| {}).await
    }

    /// The same, and calls `waits` each time the child says why it is not ready yet.
    pub async fn ready_after_waits(
        &mut self,
        deadline: Duration,
        waits: impl FnMut(String),
    ) -> Result<Option<SocketAddr>, StartFailure> {
        let name = self.name;
        let ready = tokio::time::timeout(deadline, self.ready_after(waits)).await;
        ready.unwrap_or(Err(StartFailure::TimedOut { name, deadline }))
    }

    async fn ready_after(&mut self, waits: impl FnMut(String)) -> Result<Option<SocketAddr>, StartFailure> {
        let address = self.report_after(waits).await?;
        self.output = None;
        Ok(address)
    }

    /// Waits until it reports that it is ready, which it may do again. Dropping the future loses nothing.
    pub async fn report(&mut self) -> Result<Option<SocketAddr>, StartFailure> {
        self.report_after(|_| {}).await
    }

    async fn report_after(&mut self, mut waits: impl FnMut(String)) -> Result<Option<SocketAddr>, StartFailure> {
        loop {
            match self.answer().await? {
                ChildEvent::Ready { address } => return Ok(address),
                ChildEvent::Waits { summary } => {
                    // It may wait for hours, for changing reasons.
                    self.n_read = 0;
                    waits(summary);
                }
                ChildEvent::Hindered { message, summary } => return Err(StartFailure::Hindered { message, summary }),
                ChildEvent::Failed { message, summary } => return Err(StartFailure::Refused { message, summary }),
            }
        }
    }

    /// Waits for a line of JSON that is a `T`, or says why there is none. Other lines, which a library may have written, are
    /// passed over. Dropping the future loses nothing.
    pub async fn answer<T: DeserializeOwned>(&mut self) -> Result<T, StartFailure> {
        while self.next_line().await {
            let line = std::mem::take(&mut self.line);
            self.n_read += line.len();
            if let Ok(answer) = serde_json::from_slice(&line) {
                return Ok(answer);
            }
            if let Ok(ChildEvent::Failed { message, summary }) = serde_json::from_slice(&line) {
                return Err(StartFailure::Refused { message, summary });
            }
            let line = String::from_utf8_lossy(&line);
            tracing::debug!(%line, "{} wrote a line that is not an event; it is ignored", self.name);
        }
        let name = self.name;
        match tokio::time::timeout(STOP_DEADLINE, self.process.wait()).await {
            Ok(Ok(status)) => Err(StartFailure::Ended { name, status }),
            Ok(Err(error)) => Err(StartFailure::Spawn { name, error }),
            Err(_) => Err(StartFailure::NoReport { name }),
        }
    }

    /// Reads the rest of a line. Returns false if there is none.
    async fn next_line(&mut self) -> bool {
        let Some(output) = &mut self.output else { return false };
        let left = MAX_EVENT_BYTES.saturating_sub(self.n_read + self.line.len());
        let n = output.take(left as u64).read_until(b'\n', &mut self.line).await;
        n.is_ok_and(|n| n > 0) && self.line.ends_with(b"\n")
    }

    /// Writes a line to its standard input. Errors: it does not read it any more.
    pub async fn tell(&mut self, line: &str) -> std::io::Result<()> {
        self.lifeline.write_all(format!("{line}\n").as_bytes()).await?;
        self.lifeline.flush().await
    }

    /// Waits for any output, by which a child shows that it lives. Dropping the future loses nothing. Errors, in words: it
    /// has ended.
    pub async fn sign_of_life(&mut self) -> Result<(), String> {
        let mut bytes = [0; 256];
        let ended = match &mut self.output {
            None => self.process.wait().await,
            Some(output) => tokio::select! {
                ended = self.process.wait() => ended,
                n = output.read(&mut bytes) => match n {
                    Ok(1..) => return Ok(()),
                    Ok(0) | Err(_) => self.process.wait().await,
                },
            },
        };
        Err(match ended {
            Ok(status) => format!("{} has ended ({status})", self.name),
            Err(error) => format!("{} is lost: {error}", self.name),
        })
    }

    /// Waits for its end. Dropping the future loses nothing.
    pub async fn wait(&mut self) -> std::io::Result<ExitStatus> {
        self.process.wait().await
    }

    /// Returns true if it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.process.try_wait(), Ok(None))
    }

    /// Sends it a signal, unless it has ended.
    pub fn signal(&self, signal: Signal) -> std::io::Result<()> {
        let pid = self.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        pid.map_or(Ok(()), |pid| Ok(kill_process(pid, signal)?))
    }

    /// Cuts the lifeline, and kills a child that does not end by itself.
    pub async fn stop(self) {
        self.stop_within(STOP_DEADLINE).await;
    }

    async fn stop_within(self, deadline: Duration) {
        let ChildProcess { name, mut process, lifeline, .. } = self;
        drop(lifeline);
        if tokio::time::timeout(deadline, process.wait()).await.is_err() {
            tracing::warn!("{name} did not end by itself and is killed");
            kill(name, process).await;
        }
    }

    /// Kills it and waits for its end, since only then its memory is free. Returns how it ended, if it has.
    pub async fn kill(self) -> Option<ExitStatus> {
        kill(self.name, self.process).await
    }
}

async fn kill(name: &'static str, mut process: Child) -> Option<ExitStatus> {
    // Without an id, its end is known.
    if process.id().is_some()
        && let Err(error) = process.start_kill()
    {
        tracing::error!(%error, "{name} cannot be killed");
    }
    match tokio::time::timeout(KILL_DEADLINE, process.wait()).await {
        Ok(ended) => ended.inspect_err(|error| tracing::error!(%error, "the end of {name} is unknown")).ok(),
        Err(_) => {
            tracing::error!("{name} was killed but has not ended");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ChildCommand;
    use super::*;

    fn shell(script: &str) -> ChildProcess {
        ChildCommand::new("the child", "sh").args(["-c", script]).spawn().unwrap()
    }

    #[tokio::test]
    async fn a_child_is_ready_or_says_why_not() {
        let ready = r#"echo noise; echo '{"event":"ready","address":"127.0.0.1:9"}'"#;
        assert_eq!(shell(ready).ready().await.unwrap(), Some(([127, 0, 0, 1], 9).into()));
        let refused = shell(r#"echo '{"event":"failed","message":"m","summary":"s"}'; cat"#).ready().await;
        assert!(matches!(refused, Err(StartFailure::Refused { message, summary }) if message == "m" && summary == "s"));
        let hindered = shell(r#"echo '{"event":"hindered","message":"m","summary":"s"}'; cat"#).ready().await;
        assert!(
            matches!(hindered, Err(StartFailure::Hindered { message, summary }) if message == "m" && summary == "s")
        );
        let ended = shell("exit 3").ready().await;
        assert!(matches!(ended, Err(StartFailure::Ended { status, .. }) if status.code() == Some(3)));
        let unfinished = shell(r#"printf '{"event":"ready"}'"#).ready().await;
        assert!(matches!(unfinished, Err(StartFailure::Ended { .. })), "an event ends with its line");
        let missing = ChildCommand::new("the child", "/no/such/program").spawn();
        assert!(matches!(missing, Err(StartFailure::Spawn { .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn a_child_that_reports_nothing_is_not_waited_for_without_end() {
        let silent = shell("cat").ready_within(Duration::from_secs(60)).await;
        assert!(matches!(silent, Err(StartFailure::TimedOut { .. })), "{silent:?}");
        let closed = shell("exec >&-; cat").ready().await;
        assert!(matches!(closed, Err(StartFailure::NoReport { .. })), "{closed:?}");
        let mut talks = shell("while :; do echo 0123456789012345678901234567890123456789; done");
        let failure = talks.ready().await;
        assert!(matches!(failure, Err(StartFailure::NoReport { .. })), "{failure:?}");
        assert!(talks.n_read + talks.line.len() <= MAX_EVENT_BYTES);
    }

    #[tokio::test]
    async fn a_child_that_waits_says_why_as_often_as_it_likes() {
        let script = r#"i=0; while [ $i -lt 3000 ]; do echo '{"event":"waits","summary":"the other is away"}'; i=$((i+1));
            done; echo '{"event":"ready"}'; cat"#;
        let mut said = Vec::new();
        let ready = shell(script).ready_after_waits(Duration::from_secs(60), |why| said.push(why)).await;
        assert_eq!(ready.unwrap(), None);
        assert_eq!(said, vec!["the other is away"; 3000]);
    }

    #[tokio::test]
    async fn a_wait_for_a_child_that_is_broken_off_loses_nothing() {
        let mut child = shell(r#"printf '{"event":'; read -r go; echo '"ready"}'; cat"#);
        let early = tokio::time::timeout(Duration::from_millis(200), child.ready()).await;
        assert!(early.is_err());
        child.tell("go").await.unwrap();
        assert_eq!(child.ready().await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_child_without_a_lifeline_ends_and_a_deaf_one_is_killed() {
        let mut obedient = shell(r#"echo '{"event":"ready"}'; cat >/dev/null; exit 7"#);
        obedient.ready().await.unwrap();
        assert!(!obedient.has_ended());
        obedient.stop().await;
        let mut deaf = shell(r#"echo '{"event":"ready"}'; exec sleep 600"#);
        deaf.ready().await.unwrap();
        let pid = Pid::from_raw(deaf.id().unwrap().cast_signed()).unwrap();
        deaf.stop_within(Duration::from_millis(50)).await;
        assert!(kill_process(pid, Signal::CONT).is_err(), "it is gone and reaped");
    }

    #[tokio::test]
    async fn a_child_that_shows_life_is_told_from_one_that_has_ended() {
        let mut child = shell(r#"echo '{"event":"ready"}'; echo; read -r go; exit 5"#);
        child.report().await.unwrap();
        assert_eq!(child.sign_of_life().await, Ok(()));
        child.tell("go").await.unwrap();
        let ended = child.sign_of_life().await.unwrap_err();
        assert!(ended.starts_with("the child has ended") && ended.contains('5'), "{ended}");
    }
}
