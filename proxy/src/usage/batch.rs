//! Usage that is not written yet, summed up by day, key and model.

use std::collections::HashMap;
use std::fmt;
use std::ops::AddAssign;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::utc_day::UtcDay;

/// The most sums of a batch, and the most series of the metrics. Keys and models come from the configuration, so only an upstream
/// with thousands of models can reach it: the models beyond share [`OTHER`].
pub(super) const MAX_SERIES: usize = 4_096;

/// The name of all models beyond [`MAX_SERIES`].
pub(super) const OTHER: &str = "other";

/// Sums of usage. Times in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct UsageSums {
    /// Requests that an engine began.
    pub requests: u64,
    /// Tokens of prompts, and of texts for vectors.
    pub prompt_tokens: u64,
    /// The number of these that nobody computed.
    pub cached_tokens: u64,
    /// Tokens of replies.
    pub generated_tokens: u64,
    /// Time in which engines computed the prompts and replies, for each choice.
    pub engine_seconds: f64,
}

impl AddAssign for UsageSums {
    fn add_assign(&mut self, more: UsageSums) {
        self.requests = self.requests.saturating_add(more.requests);
        self.prompt_tokens = self.prompt_tokens.saturating_add(more.prompt_tokens);
        self.cached_tokens = self.cached_tokens.saturating_add(more.cached_tokens);
        self.generated_tokens = self.generated_tokens.saturating_add(more.generated_tokens);
        self.engine_seconds += more.engine_seconds;
    }
}

/// The beginning of a secret's hash, by which people tell the secrets of a key apart. It reveals nothing of the secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SecretId(u32);

impl SecretId {
    /// The id of the secret with this hash.
    pub fn of_hash(hash: &[u8; 32]) -> SecretId {
        let [a, b, c, d, ..] = *hash;
        SecretId(u32::from_be_bytes([a, b, c, d]))
    }

    pub(super) fn number(self) -> u32 {
        self.0
    }

    pub(super) fn of_number(number: u32) -> SecretId {
        SecretId(number)
    }
}

/// Eight hexadecimal digits, as the hash in the configuration begins.
impl fmt::Display for SecretId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// A key and a model.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeptSeries {
    /// The key's name.
    pub key: String,
    /// The model's public name.
    pub model: String,
}

/// The usage of one request.
#[derive(Debug)]
pub(super) struct UsageRecord<'a> {
    pub(super) key: &'a str,
    pub(super) model: &'a str,
    /// `None`: no key was presented.
    pub(super) secret: Option<SecretId>,
    pub(super) at: SystemTime,
    pub(super) sums: UsageSums,
}

/// Usage that is written in one commit.
#[derive(Debug, Default)]
pub(super) struct UsageBatch {
    pub(super) sums: HashMap<(UtcDay, KeptSeries), UsageSums>,
    /// When each secret was last used, milliseconds since the Unix epoch.
    pub(super) last_uses: HashMap<SecretId, u64>,
}

impl UsageBatch {
    pub(super) fn is_empty(&self) -> bool {
        self.sums.is_empty()
    }

    pub(super) fn n_requests(&self) -> u64 {
        self.sums.values().map(|sums| sums.requests).sum()
    }

    pub(super) fn add(&mut self, record: UsageRecord<'_>) {
        let UsageRecord { key, model, secret, at, sums } = record;
        let series = KeptSeries { key: key.to_owned(), model: model.to_owned() };
        self.add_sums(UtcDay::of(at), series, sums);
        if let Some(secret) = secret {
            self.note_use(secret, at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64));
        }
    }

    /// Adds a later batch.
    pub(super) fn append(&mut self, more: UsageBatch) {
        for ((day, series), sums) in more.sums {
            self.add_sums(day, series, sums);
        }
        for (secret, at_ms) in more.last_uses {
            self.note_use(secret, at_ms);
        }
    }

    fn add_sums(&mut self, day: UtcDay, series: KeptSeries, sums: UsageSums) {
        let mut place = (day, series);
        if self.sums.len() >= MAX_SERIES && !self.sums.contains_key(&place) {
            place.1.model = OTHER.to_owned();
        }
        *self.sums.entry(place).or_default() += sums;
    }

    /// Secrets come from the configuration, so there are not many.
    fn note_use(&mut self, secret: SecretId, at_ms: u64) {
        let at = self.last_uses.entry(secret).or_default();
        *at = at_ms.max(*at);
    }
}
