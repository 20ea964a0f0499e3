//! Sends the machine to sleep by the operator's command, after a time without requests.
//!
//! The command runs once for each idle time: again only after a request has come, or the machine was asleep. A failed command
//! is tried again after a pause.

use std::process::Stdio;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use baton_link::node::{NodeRequestCounts, NodeRequests};
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::node::{KEY_VARIABLE, PULL_KEY_VARIABLE, STORE_SECRET_VARIABLE};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The shortest and the longest time without requests.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3_600);

/// How long a command may run. Time in which the machine sleeps does not count.
const COMMAND_DEADLINE: Duration = Duration::from_secs(300);

/// The pause after a first failure, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_secs(60);
const LONGEST_PAUSE: Duration = Duration::from_secs(3_600);

/// How often it is looked whether the machine was asleep.
const TICK: Duration = Duration::from_secs(1);

/// A machine that was asleep for less has not slept.
const SHORTEST_SLEEP: Duration = Duration::from_secs(5);

/// When the machine is sent to sleep, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SleepSettings {
    pub after: IdleTime,
    /// For the shell.
    pub command: String,
}

/// A time without requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdleTime(pub Duration);

impl FromStr for IdleTime {
    type Err = String;

    /// Parses `30m`, `1h30m` or seconds. Errors: another form, or too short or too long.
    fn from_str(text: &str) -> Result<IdleTime, String> {
        match KeepAlive::parse(text) {
            Some(KeepAlive::For(time)) if (SHORTEST..=LONGEST).contains(&time) => Ok(IdleTime(time)),
            _ => Err("must be a time from 1s to 168h, such as 30m".to_owned()),
        }
    }
}

/// Sends the machine to sleep whenever it is idle for long enough, until `stop` is cancelled.
pub(crate) fn keep_sleeping(settings: SleepSettings, requests: &NodeRequests, stop: CancellationToken) {
    let requests = requests.subscribe();
    tokio::spawn(async move { stop.run_until_cancelled(sleep_when_idle(settings, requests)).await });
}

async fn sleep_when_idle(settings: SleepSettings, mut requests: watch::Receiver<NodeRequestCounts>) {
    let mut clock = WakeClock::start();
    loop {
        let Some(counts) = idle(settings.after.0, &mut requests, &mut clock).await else { return };
        tracing::info!(
            idle_seconds = settings.after.0.as_secs_f64(),
            "the command that sends this machine to sleep runs"
        );
        let mut pause = FIRST_PAUSE;
        let is_asleep = loop {
            match run(&settings.command).await {
                Ok(()) => break true,
                Err(problem) => {
                    let seconds = pause.as_secs_f64();
                    tracing::warn!(
                        problem,
                        seconds,
                        "the command that sends this machine to sleep failed; it is tried again"
                    );
                }
            }
            let begins = requests.wait_for(|now| now.n_begun != counts.n_begun);
            if tokio::time::timeout(pause, begins).await.is_ok() {
                break false;
            }
            pause = (2 * pause).min(LONGEST_PAUSE);
        };
        if is_asleep {
            tracing::info!("the command that sends this machine to sleep has succeeded");
            used_or_woken(counts.n_begun, &mut requests, &mut clock).await;
        }
    }
}

/// Waits until there was no request for this time, while the machine was awake. `None`: the node has ended.
async fn idle(
    time: Duration,
    requests: &mut watch::Receiver<NodeRequestCounts>,
    clock: &mut WakeClock,
) -> Option<NodeRequestCounts> {
    loop {
        let counts = *requests.borrow_and_update();
        let since = counts.last.max(clock.awake_since);
        if counts.n_open == 0 && since.elapsed() >= time {
            return Some(counts);
        }
        // Its end changes the counts.
        let left = if counts.n_open > 0 { TICK } else { time.saturating_sub(since.elapsed()).min(TICK) };
        tokio::select! {
            changed = requests.changed() => changed.ok()?,
            () = tokio::time::sleep(left) => clock.look(),
        }
    }
}

/// Waits for the next request, or until the machine has slept.
async fn used_or_woken(n_begun: u64, requests: &mut watch::Receiver<NodeRequestCounts>, clock: &mut WakeClock) {
    let before = clock.awake_since;
    while clock.awake_since == before && requests.borrow_and_update().n_begun == n_begun {
        tokio::select! {
            changed = requests.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(TICK) => clock.look(),
        }
    }
}

/// Notices that the machine was asleep: meanwhile the time of day went on, and the clock of timers did not.
struct WakeClock {
    /// The start, or when it was last awake again.
    awake_since: Instant,
    seen: (Instant, SystemTime),
}

impl WakeClock {
    fn start() -> WakeClock {
        WakeClock { awake_since: Instant::now(), seen: (Instant::now(), SystemTime::now()) }
    }

    fn look(&mut self) {
        self.note(Instant::now(), SystemTime::now());
    }

    fn note(&mut self, now: Instant, time_of_day: SystemTime) {
        let (then, time_then) = self.seen;
        let passed = time_of_day.duration_since(time_then).unwrap_or_default();
        if passed > now.duration_since(then) + SHORTEST_SLEEP {
            self.awake_since = now;
        }
        self.seen = (now, time_of_day);
    }
}

/// Runs the command. Errors: it could not be started, failed, or took too long.
async fn run(command: &str) -> Result<(), String> {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", command]).stdin(Stdio::null()).kill_on_drop(true);
    for secret in [KEY_VARIABLE, PULL_KEY_VARIABLE, STORE_SECRET_VARIABLE] {
        shell.env_remove(secret);
    }
    match tokio::time::timeout(COMMAND_DEADLINE, shell.status()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(status.to_string()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("it still ran after {} s", COMMAND_DEADLINE.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_time_is_bounded() {
        assert_eq!("30m".parse(), Ok(IdleTime(Duration::from_secs(1_800))));
        for text in ["", "0s", "0.5s", "-1", "169h", "soon", "nan"] {
            assert!(text.parse::<IdleTime>().is_err(), "{text}");
        }
    }

    #[test]
    fn only_a_gap_between_the_clocks_is_a_sleep() {
        let (start, day) = (Instant::now(), SystemTime::now());
        let at = |seconds: u64, day_seconds: u64| {
            (start + Duration::from_secs(seconds), day + Duration::from_secs(day_seconds))
        };
        let mut clock = WakeClock { awake_since: start, seen: (start, day) };
        let mut look = |(now, time_of_day)| {
            clock.note(now, time_of_day);
            clock.awake_since
        };
        assert_eq!(look(at(60, 61)), start);
        // A clock that is set back shows nothing.
        assert_eq!(look(at(61, 1)), start);
        assert_eq!(look(at(62, 3_600)), at(62, 0).0, "an hour passed in a second");
        assert_eq!(look(at(63, 3_601)), at(62, 0).0);
    }

    /// A machine whose command notes each run in a file.
    struct Machine {
        folder: tempfile::TempDir,
        requests: NodeRequests,
        stop: CancellationToken,
    }

    impl Machine {
        fn start(after: Duration, then: &str) -> Machine {
            let folder = tempfile::tempdir().unwrap();
            let command = format!("echo run >> '{}'; {then}", folder.path().join("runs").display());
            let machine = Machine { folder, requests: NodeRequests::default(), stop: CancellationToken::new() };
            let settings = SleepSettings { after: IdleTime(after), command };
            keep_sleeping(settings, &machine.requests, machine.stop.clone());
            machine
        }

        fn n_runs(&self) -> usize {
            std::fs::read_to_string(self.folder.path().join("runs")).unwrap_or_default().lines().count()
        }

        async fn has_run(&self, n: usize) {
            while self.n_runs() < n {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            self.stop.cancel();
        }
    }

    #[tokio::test]
    async fn a_machine_with_an_open_request_is_not_sent_to_sleep_and_an_idle_one_once() {
        let after = Duration::from_millis(20);
        let machine = Machine::start(after, "true");
        let open = machine.requests.begin();
        tokio::time::sleep(10 * after).await;
        assert_eq!(machine.n_runs(), 0, "a request is open");
        drop(open);
        machine.has_run(1).await;
        tokio::time::sleep(10 * after).await;
        assert_eq!(machine.n_runs(), 1, "it does not run again by itself");
        drop(machine.requests.begin());
        machine.has_run(2).await;
    }

    #[tokio::test]
    async fn a_failed_command_is_tried_again_once_a_request_has_come() {
        let after = Duration::from_millis(20);
        let machine = Machine::start(after, "exit 3");
        machine.has_run(1).await;
        tokio::time::sleep(10 * after).await;
        assert_eq!(machine.n_runs(), 1, "the pause is long");
        drop(machine.requests.begin());
        machine.has_run(2).await;
        assert_eq!(run("exit 3").await, Err("exit status: 3".to_owned()));
    }
}
