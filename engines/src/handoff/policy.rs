//! The rules of pulls: what is allowed, and how long each step may take.

use std::time::Duration;

use baton_schemas::kv::Codec;

use crate::transport::Transport;

/// The longest wait for the queue and the first chunk, and between chunks, for a pull without a predicted time. In a
/// longer time the decode node would compute the prompt itself.
const DEFAULT_ALLOWANCE: Duration = Duration::from_secs(60);

/// The lossless codecs, which are allowed unless the operator names others.
const LOSSLESS: [Codec; 2] = [Codec::None, Codec::PlanesZstd];

/// The bytes that all pulls of an engine together may read ahead while it is busy with a step: some seconds of a fast link.
const DEFAULT_READ_AHEAD: usize = 256 << 20;

#[derive(Debug, Clone)]
pub struct PullPolicy {
    /// KV from other weights of the same base model is accepted up to this canary distance (relative L2). `None`: only
    /// equal weights are accepted.
    pub max_canary_distance: Option<f64>,
    /// The allowed codecs; each link uses the fastest by its measured rates. Empty: the lossless ones.
    pub codecs: Vec<Codec>,
    /// The trusted certificates, and whether plain HTTP to other machines is allowed.
    pub transport: Transport,
    /// The longest time without a new position for a pull without a predicted time; signs of life do not count. The
    /// whole pull may take this plus 50 ms for each position.
    pub allowance: Duration,
    /// Bytes that all pulls together may read ahead of the engine, in addition to the chunks in [`PULL_WINDOW`].
    ///
    /// [`PULL_WINDOW`]: super::PULL_WINDOW
    pub read_ahead: usize,
    /// The longest silences.
    pub timeouts: PullTimeouts,
}

impl PullPolicy {
    /// The allowed codecs, at least one.
    pub(super) fn allowed_codecs(&self) -> &[Codec] {
        if self.codecs.is_empty() { &LOSSLESS } else { &self.codecs }
    }
}

impl Default for PullPolicy {
    fn default() -> Self {
        PullPolicy {
            max_canary_distance: None,
            codecs: Vec::new(),
            transport: Transport::default(),
            allowance: DEFAULT_ALLOWANCE,
            read_ahead: DEFAULT_READ_AHEAD,
            timeouts: PullTimeouts::default(),
        }
    }
}

/// How long a prefill node may be silent.
#[derive(Debug, Clone, Copy)]
pub struct PullTimeouts {
    /// Until the connection is open. A prefill node in the same network answers well within the default.
    pub connect: Duration,
    /// Until the head of the reply. The prefill node answers before it computes.
    pub head: Duration,
    /// Between two bytes. The prefill node sends a sign of life every second.
    pub stall: Duration,
    /// A node that sent a byte within this time is alive: if the pull then misses its deadline, the failure is
    /// `prefill_late` and not `prefill_stalled`.
    pub life_sign: Duration,
}

impl Default for PullTimeouts {
    fn default() -> Self {
        PullTimeouts {
            connect: Duration::from_secs(3),
            head: Duration::from_secs(5),
            stall: Duration::from_secs(5),
            life_sign: Duration::from_secs(3),
        }
    }
}
