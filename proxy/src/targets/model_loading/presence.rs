//! What is shown of a model that comes and goes.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

/// Why a model was unloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unloaded {
    /// Nobody had used it for long enough.
    Idle,
    /// A request said so.
    Asked,
    /// Another one needed its memory.
    Memory,
    /// It could not be loaded.
    Failed,
    /// The configuration has it no more.
    Removed,
}

impl Unloaded {
    /// In one word, for counting.
    pub fn as_str(self) -> &'static str {
        match self {
            Unloaded::Idle => "idle",
            Unloaded::Asked => "asked",
            Unloaded::Memory => "memory",
            Unloaded::Failed => "failed",
            Unloaded::Removed => "removed",
        }
    }
}

/// What has happened to a model since the start.
#[derive(Debug, Clone, Default)]
pub(super) struct Record {
    pub(super) n_loads: u64,
    pub(super) load_time: Duration,
    pub(super) last_load: Duration,
    pub(super) unloads: BTreeMap<Unloaded, u64>,
}

/// A resident at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Presence {
    /// `unloaded`, `loading`, `loaded`, `unloading` or `failed`.
    pub life: &'static str,
    /// What it takes, or would take.
    pub bytes: u64,
    /// What its process holds.
    pub measured_bytes: u64,
    /// Requests that use it.
    pub n_active: u32,
    /// Requests that wait for it to be loaded.
    pub n_waiting: usize,
    /// When it goes if nobody uses it; `None`: not by itself, or it is not there.
    pub expires_at: Option<SystemTime>,
    /// How often it was loaded.
    pub n_loads: u64,
    /// How long that took together.
    pub load_time: Duration,
    /// And the last time.
    pub last_load: Duration,
    /// How often it was unloaded, by reason.
    pub unloads: BTreeMap<Unloaded, u64>,
    /// Why the last attempt to load it failed; safe to show.
    pub last_failure: Option<String>,
}
