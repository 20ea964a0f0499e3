//! How pulls are made: what is allowed, and how long each step may take.

use std::time::Duration;

use baton_schemas::kv::Codec;

use crate::transport::Transport;

/// Limit on waiting for the queue and the first chunk, and between chunks, if nothing was predicted. The decode node
/// computes a prompt itself in less than a longer wait.
const DEFAULT_ALLOWANCE: Duration = Duration::from_secs(60);

/// The lossless codecs, which are allowed unless the operator names others.
const LOSSLESS: [Codec; 2] = [Codec::None, Codec::PlanesZstd];

/// How pulls are made.
#[derive(Debug, Clone)]
pub struct PullPolicy {
    /// Accept KV of other weights of the same base model up to this canary distance. `None`: only equal weights.
    pub max_canary_distance: Option<f64>,
    /// Codecs that KV may travel in; each link gets the one that its measured rates favour. Empty: the lossless ones.
    pub codecs: Vec<Codec>,
    /// Trusted certificates, and whether plain HTTP to other machines is allowed.
    pub transport: Transport,
    /// Longest time without a new position (signs of life do not count) for a pull without a predicted time. The whole
    /// pull may take this plus 50 ms for each position.
    pub allowance: Duration,
    /// Limits on silence.
    pub timeouts: PullTimeouts,
}

impl PullPolicy {
    /// The codecs that KV may travel in, at least one.
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
    /// A node that sent a byte within this time is alive: a pull that passes its deadline is then late, not stalled.
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
