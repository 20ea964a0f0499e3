//! One server under load for one round: warm-up, the measured time, and the replies that are still running then.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_proxy::serve::CommandFailure;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::fault::RequestFailure;
use super::figures::{RoundFigures, RoundUse};
use super::load::RoundLoad;
use super::processes::ProcessGroup;
use super::server::MeasuredServer;
use super::settings::{LoadSettings, Pace, RoundLength};

/// The wait of a closed loop after a failed request: a server that refuses at once is not asked in a tight loop.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(20);

/// A timer has steps of a millisecond. It fires at most so late if this process is not busy.
const TIMER_STEPS: Duration = Duration::from_millis(2);

/// Measures a server for one round. `None` if it was stopped before the measured time. Errors: a process does not exist.
pub(super) async fn measure(
    server: &Rc<MeasuredServer>,
    settings: &Rc<LoadSettings>,
    seed: u64,
    stop: &CancellationToken,
) -> Result<Option<RoundFigures>, CommandFailure> {
    let name = &server.settings.name;
    let mut processes = match &server.settings.pids[..] {
        [] => None,
        pids => {
            let missing = || CommandFailure(format!("a process of {name} does not exist: {pids:?}"));
            Some(ProcessGroup::find(pids).ok_or_else(missing)?)
        }
    };
    let mut client = ProcessGroup::find(&[std::process::id()]);
    let from = Instant::now() + settings.warm_up;
    let load = Rc::new(RoundLoad::new(server, settings, from)?);
    let mut running = load.start(seed);
    let mut before = None;
    let mut read = || RoundUse {
        server: processes.as_mut().and_then(ProcessGroup::read),
        client: client.as_mut().and_then(ProcessGroup::read),
        n_connections: server.connections.n_opened(),
    };
    let measuring = async {
        tokio::time::sleep_until(from.into()).await;
        before = Some(read());
        match settings.length {
            RoundLength::Time(time) => tokio::time::sleep_until((from + time).into()).await,
            RoundLength::Requests(_) => wait_for_all(&mut running).await,
        }
    };
    tokio::select! {
        () = measuring => {}
        () = stop.cancelled() => {}
    }
    let after = read();
    let ended = load.end_measuring();
    tokio::select! {
        () = wait_for_all(&mut running) => {}
        // Drops what is still running.
        () = stop.cancelled() => {}
    }
    running.shutdown().await;
    server.connections.close();
    let Some(before) = before else { return Ok(None) };
    if !server.settings.pids.is_empty() && after.server.is_none() {
        return Err(CommandFailure(format!("a process of {name} has ended while it was measured")));
    }
    Ok(Some(RoundFigures::new(&load.tally.borrow(), ended - from, &before, &after)))
}

async fn wait_for_all(running: &mut JoinSet<()>) {
    while running.join_next().await.is_some() {}
}

impl RoundLoad {
    fn start(self: &Rc<Self>, seed: u64) -> JoinSet<()> {
        let mut running = JoinSet::new();
        match self.settings.pace {
            Pace::Closed { concurrency } => {
                for _ in 0..concurrency {
                    running.spawn_local(Rc::clone(self).closed_loop());
                }
            }
            Pace::Open { per_second, concurrency } => {
                let random = StdRng::seed_from_u64(seed);
                let arrivals = Arrivals { random, per_second, due: Instant::now() };
                running.spawn_local(Rc::clone(self).open_loop(arrivals, concurrency as usize));
            }
        }
        running
    }

    async fn closed_loop(self: Rc<Self>) {
        while let Some(start) = self.next_request(Instant::now()) {
            if !self.request(start).await {
                tokio::time::sleep(PAUSE_AFTER_FAILURE).await;
            }
        }
    }

    async fn open_loop(self: Rc<Self>, mut arrivals: Arrivals, concurrency: usize) {
        let places = Arc::new(Semaphore::new(concurrency));
        let mut running = JoinSet::new();
        loop {
            arrivals.advance();
            let mut at = arrivals.due;
            if at > Instant::now() {
                tokio::time::sleep_until(at.into()).await;
                at = counted_from(arrivals.due, Instant::now());
            }
            // An arrival that waits here waits as a part of its latency.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { break };
            let Some(start) = self.next_request(at) else { break };
            let load = Rc::clone(&self);
            running.spawn_local(async move {
                load.request(start).await;
                drop(place);
            });
            while running.try_join_next().is_some() {}
        }
        // Arrivals that found no place before the round's end.
        while self.until.is_some_and(|until| arrivals.due < until) {
            self.tally.borrow_mut().failure(RequestFailure::NotSent, "");
            arrivals.advance();
        }
        while running.join_next().await.is_some() {}
    }
}

/// When the latency of an arrival begins whose timer fired at `woken`. The timer's own steps are not the server's delay.
/// But a busy client's lateness counts: the server may be what keeps it busy, and a user would have waited, too.
fn counted_from(due: Instant, woken: Instant) -> Instant {
    woken.min(due + TIMER_STEPS)
}

/// Random arrivals (a Poisson process).
struct Arrivals {
    random: StdRng,
    per_second: f64,
    due: Instant,
}

impl Arrivals {
    fn advance(&mut self) {
        let uniform: f64 = self.random.random();
        // 1 − u is in (0, 1].
        let gap = -(1.0 - uniform).ln() / self.per_second;
        self.due += Duration::from_secs_f64(gap);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clients_own_delay_counts_as_latency() {
        let due = Instant::now();
        let after = |ms| due + Duration::from_millis(ms);
        assert_eq!(counted_from(due, after(1)), after(1));
        assert_eq!(counted_from(due, after(50)), after(2));
    }

    #[test]
    fn arrivals_have_their_rate_and_repeat_with_their_seed() {
        let times = |seed| {
            let from = Instant::now();
            let mut arrivals = Arrivals { random: StdRng::seed_from_u64(seed), per_second: 50.0, due: from };
            let advance = |_| {
                arrivals.advance();
                (arrivals.due - from).as_secs_f64()
            };
            (0..10_000).map(advance).collect::<Vec<_>>()
        };
        let a = times(1);
        assert!((a[9_999] / 200.0 - 1.0).abs() < 0.05, "{}", a[9_999]);
        let gaps: Vec<f64> = a.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        // Exponential gaps have a deviation equal to their mean.
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.05, "{mean} {variance}");
        let close = |x: &f64, y: &f64| (x - y).abs() < 1e-6;
        assert!(a.iter().zip(&times(1)).all(|(x, y)| close(x, y)));
        assert!(!a.iter().zip(&times(2)).all(|(x, y)| close(x, y)));
    }
}
