//! The settings of `baton-bench serve`: the load, and the servers that it is put on.

use std::time::Duration;

use baton_link::transport::Transport;
use clap::ValueEnum;
use serde::Serialize;
use serde_json::{Map, Value};

/// The API that is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum CalledApi {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Completions,
}

/// The form of replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum AskedForm {
    /// Server-sent events.
    Stream,
    /// One JSON object.
    Json,
}

/// Checks that do not hold for every server.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct ReplyChecks {
    pub(super) token_per_chunk: bool,
    pub(super) same_replies: bool,
    pub(super) stamps: bool,
}

/// When requests are sent.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Pace {
    /// So many at once: the next one follows a reply.
    Closed { concurrency: u32 },
    /// At random times, at most so many at once.
    Open { per_second: f64, concurrency: u32 },
}

/// The words of prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct InputWords {
    pub(super) least: u32,
    pub(super) most: u32,
}

/// The end of a round.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RoundLength {
    Time(Duration),
    Requests(u64),
}

/// The load and the rounds, the same for all servers.
#[derive(Debug, Clone, Serialize)]
pub(super) struct LoadSettings {
    pub(super) api: CalledApi,
    pub(super) reply: AskedForm,
    pub(super) pace: Pace,
    pub(super) length: RoundLength,
    pub(super) warm_up: Duration,
    pub(super) rounds: u32,
    pub(super) input_words: InputWords,
    pub(super) prefix_words: u32,
    pub(super) prompts: Option<u32>,
    pub(super) output_tokens: u32,
    pub(super) ignore_eos: bool,
    pub(super) extra_body: Map<String, Value>,
    pub(super) timeout: Duration,
    pub(super) seed: u64,
    pub(super) checks: ReplyChecks,
}

/// A server to measure.
#[derive(Debug, Clone)]
pub(super) struct ServerSettings {
    pub(super) name: String,
    /// Without `/v1`.
    pub(super) base: String,
    pub(super) key: Option<String>,
    pub(super) model: Option<String>,
    /// Its processes, if they are measured.
    pub(super) pids: Vec<u32>,
    /// The authorities that its certificate may be of.
    pub(super) transport: Transport,
}
