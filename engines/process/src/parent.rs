//! The child's side: what it tells its parent, and how it ends when its parent is gone, however it went.
//!
//! The parent holds the other end of the child's standard input. That pipe is the portable way; on Linux the kernel's
//! parent-death signal also reaches a child that is stopped or stuck.

use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use baton_schemas::node::ChildEvent;
use rustix::process::{Resource, Rlimit, Signal, getpid, getppid, getrlimit, kill_process, setrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::child::STOP_DEADLINE;

/// How long a child may take to stop, before it is killed.
pub const GRACE: Duration = STOP_DEADLINE.saturating_sub(Duration::from_secs(1));

/// How often a child that works on looks whether its parent lives.
const PARENT_LOOK: Duration = Duration::from_millis(50);

/// Sends this process `signal` when its parent is gone, and kills it if that is not enough.
pub fn tie_to(signal: Signal) {
    tie(signal, || {});
}

/// Kills this process when its parent is gone, after removing its socket. A parent that lives and cuts the lifeline first waits for
/// `last_work`, for [`GRACE`] at most.
pub fn tie_after(last_work: impl FnOnce() + Send + 'static, socket: Option<PathBuf>) {
    let parent = getppid();
    tie(Signal::KILL, move || {
        if getppid() == parent {
            work_while(last_work, || getppid() == parent);
        }
        if let Some(socket) = socket {
            // Best effort: whether it was there no longer matters.
            let _ = std::fs::remove_file(socket);
        }
    });
}

/// Works until the work ends, fails, takes longer than [`GRACE`], or `goes_on` says no. A parent that dies closes its pipes a moment
/// before its children have another one.
fn work_while(work: impl FnOnce() + Send + 'static, goes_on: impl Fn() -> bool) {
    let (ended, ends) = mpsc::channel::<()>();
    let working = std::thread::Builder::new().name("last work".into()).spawn(move || {
        work();
        drop(ended);
    });
    let until = Instant::now() + GRACE;
    while working.is_ok() && goes_on() && Instant::now() < until {
        if ends.recv_timeout(PARENT_LOOK) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
    }
}

fn tie(signal: Signal, at_end: impl FnOnce() + Send + 'static) {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(signal)) {
        tracing::debug!(%error, "no parent-death signal; the pipe will do");
    }
    let wait_for_end = move || {
        let mut nothing = [0; 64];
        // The parent does not write any more: any return but an interruption is its end.
        while std::io::stdin().read(&mut nothing).is_ok_and(|n| n > 0) {}
        at_end();
        if kill_process(getpid(), signal).is_ok() {
            std::thread::sleep(GRACE);
        }
        end_at_once();
    };
    if std::thread::Builder::new().name("lifeline".into()).spawn(wait_for_end).is_err() {
        tracing::warn!("the thread that watches the parent cannot start; this process may outlive its parent");
    }
}

/// Limits a resource of this process for good. A limit that is lower already stays, since only root may raise one. Errors: the
/// system's.
pub fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let most = getrlimit(resource).maximum.map_or(most, |limit| limit.min(most));
    Ok(setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?)
}

/// Lets this process use `seconds` of processor time from now on, rounded up; a signal (SIGXCPU) ends it then. A later call sets
/// another end. Errors: the system's.
pub fn limit_work(seconds: u64) -> io::Result<()> {
    let used = clock_gettime(ClockId::ProcessCPUTime).tv_sec.unsigned_abs();
    let maximum = getrlimit(Resource::Cpu).maximum;
    let until = used.saturating_add(1 + seconds);
    Ok(setrlimit(Resource::Cpu, Rlimit { current: Some(maximum.map_or(until, |most| most.min(until))), maximum })?)
}

/// Tells the parent, by a line on standard output, which is the channel to it. A parent that reads no more is no error.
pub fn tell(event: &ChildEvent) {
    let written = serde_json::to_string(event).map_err(std::io::Error::from).and_then(|line| {
        let mut output = std::io::stdout().lock();
        writeln!(output, "{line}")?;
        output.flush()
    });
    match written {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            tracing::error!(%error, "an event could not be written");
        }
        _ => {}
    }
}

/// Ends this process at once. An orderly exit would run destructors while threads still compute with what they free.
pub fn end_at_once() -> ! {
    // SIGKILL ends this process before the call returns.
    let _ = kill_process(getpid(), Signal::KILL);
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_lower_stays() {
        // No test needs a core dump.
        for most in [0, 1 << 20] {
            limit(Resource::Core, most).unwrap();
            assert_eq!(getrlimit(Resource::Core), Rlimit { current: Some(0), maximum: Some(0) });
        }
    }
}
