//! Settings of the HTTP surface, from the command line and the configuration file. They stay fixed while the server
//! runs.

use std::sync::Arc;
use std::time::Duration;

use super::access::AccessConfig;
use crate::account::request_memory::RequestMemory;

/// Room for a long conversation with a few pictures in it. A body is held whole in memory while it is parsed.
pub const DEFAULT_MAX_BODY_BYTES: usize = 32 << 20;

/// Time for a whole body to arrive: enough for the largest one at 2.2 Mbit/s. A longer time would let slow bodies hold
/// connections.
pub const DEFAULT_BODY_DEADLINE: Duration = Duration::from_secs(120);

/// How long a stream's head waits for the first result, so that an early error can keep its status. Some reverse proxies
/// give up after 15 s without a byte. The time that the body waits to be parsed counts; its arrival does not.
pub const DEFAULT_HEAD_HOLD: Duration = Duration::from_secs(8);

/// Silence in a stream before a heartbeat is sent. Reverse proxies cut silent streams after 60 s by default, some after
/// 15 s.
pub const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(10);

/// Limits, access and times. No `Debug`: it holds keys.
#[derive(Clone)]
pub struct HttpConfig {
    /// Keys, hosts and origins of accepted requests, at start-up.
    pub access: AccessConfig,
    /// Refuses requests whose `Host` is not this machine. Set when the listener is bound to loopback.
    pub check_host: bool,
    /// The maximum size of a body in bytes, after decompression.
    pub max_body_bytes: usize,
    /// The memory that all requests together may hold.
    pub memory: Arc<RequestMemory>,
    /// Time for a whole body to arrive.
    pub body_deadline: Duration,
    /// How long a stream's head waits for the first result.
    pub head_hold: Duration,
    /// Silence in a stream before a heartbeat is sent.
    pub heartbeat: Duration,
}

impl Default for HttpConfig {
    /// Open access, for a loopback listener.
    fn default() -> Self {
        HttpConfig {
            access: AccessConfig::default(),
            check_host: true,
            max_body_bytes: DEFAULT_MAX_BODY_BYTES,
            memory: RequestMemory::of_endpoint(),
            body_deadline: DEFAULT_BODY_DEADLINE,
            head_hold: DEFAULT_HEAD_HOLD,
            heartbeat: DEFAULT_HEARTBEAT,
        }
    }
}
