//! Wakes a node's machine once, however many requests wait for it, and remembers how long that takes.

use std::net::SocketAddrV4;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_link::wake_on_lan;
use baton_pairing::mac_address::MacAddress;
use baton_planner::reason::FailureReason;
use tokio::time::Instant;

use super::breaker::Breaker;
use super::health::Health;
use super::wake_times::WakeTimes;
use crate::log_target::NOTICE;

/// The pauses after the first packets. A machine that was just falling asleep hears only a later one.
const FIRST_PAUSES: [Duration; 3] = [Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2)];

/// The pause after each further packet, until the machine is awake or is given up.
const PAUSE: Duration = Duration::from_secs(5);

/// How long a machine that did not wake is left alone: at first, and at most.
const FIRST_REST: Duration = Duration::from_secs(30);
const LONGEST_REST: Duration = Duration::from_secs(3_600);

/// How a machine is woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WakeSettings {
    /// The address of its network card.
    pub mac: MacAddress,
    /// Where magic packets are sent; `None`: to everybody in each network of this machine.
    pub to: Option<SocketAddrV4>,
    /// When it is given up.
    pub longest: Duration,
}

/// Wakes the machine of one node.
#[derive(Debug)]
pub(super) struct MachineWaker {
    pub(super) settings: WakeSettings,
    times: Arc<WakeTimes>,
    /// Opens when it did not wake.
    pub(super) breaker: Breaker<FailureReason>,
    /// The start of the attempt that runs now.
    began: Mutex<Option<Instant>>,
}

impl MachineWaker {
    /// A machine that has not been woken yet.
    pub(super) fn new(settings: WakeSettings, times: Arc<WakeTimes>) -> Arc<MachineWaker> {
        let breaker = Breaker::pausing(FIRST_REST, LONGEST_REST);
        Arc::new(MachineWaker { settings, times, breaker, began: Mutex::default() })
    }

    /// The node has answered.
    pub(super) fn note_answer(&self, asked: Instant) {
        self.breaker.succeeded(asked);
    }

    /// The time until it will probably be ready. Near 0 for one that is late.
    pub(super) fn expected(&self) -> Duration {
        let whole = self.times.expected(self.settings.mac).min(self.settings.longest);
        let passed = self.began().map_or(Duration::ZERO, |began| began.elapsed());
        // It is never certain to be ready at once.
        whole.saturating_sub(passed).max(whole / 10)
    }

    fn began(&self) -> Option<Instant> {
        *self.began.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) {
        *self.began.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Begins to wake it, unless that is under way. Returns false if it did not wake a short time ago.
    pub(super) fn begin(self: &Arc<MachineWaker>, name: &str, health: &Arc<Health>) -> bool {
        let mut began = self.began.lock().unwrap_or_else(PoisonError::into_inner);
        if began.is_some() {
            return true;
        }
        if !self.breaker.try_pass() {
            return false;
        }
        *began = Some(Instant::now());
        health.note_waking();
        tokio::spawn(run(Arc::clone(self), name.to_owned(), Arc::clone(health)));
        true
    }

    /// Sends packets until it is dropped.
    async fn keep_sending(&self, name: &str) {
        let WakeSettings { mac, to, .. } = self.settings;
        let mut pauses = FIRST_PAUSES.into_iter();
        loop {
            if let Err(error) = wake_on_lan::wake(mac.to_bytes(), to).await {
                tracing::warn!(node = name, %error, "a packet that wakes a machine could not be sent; it is tried again");
            }
            tokio::time::sleep(pauses.next().unwrap_or(PAUSE)).await;
        }
    }
}

/// Wakes the machine, and notes how long it took, or that it did not wake.
async fn run(waker: Arc<MachineWaker>, name: String, health: Arc<Health>) {
    let began = Instant::now();
    let WakeSettings { mac, longest, .. } = waker.settings;
    let mut status = health.subscribe();
    let is_awake = tokio::select! {
        biased;
        ready = status.wait_for(|status| status.usable().is_some()) => ready.is_ok(),
        () = waker.keep_sending(&name) => false,
        () = tokio::time::sleep(longest) => false,
    };
    if is_awake {
        let took = began.elapsed();
        tracing::info!(target: NOTICE, node = name, seconds = took.as_secs_f64(), "a machine was woken");
        waker.breaker.succeeded(Instant::now());
        waker.ended();
        let times = Arc::clone(&waker.times);
        let _ = tokio::task::spawn_blocking(move || times.note(mac, took)).await;
    } else {
        waker.breaker.failed(FailureReason::NotWoken);
        // Unlike other breakers, this one must not wait for an answer: a sleeping machine gives none.
        waker.breaker.answered(Instant::now());
        let rest = waker.breaker.pause_left();
        tracing::warn!(node = name, %mac, seconds = longest.as_secs_f64(), rests_for = rest.as_secs_f64(), "a machine did not wake");
        health.note_not_woken(rest);
        waker.ended();
    }
}
