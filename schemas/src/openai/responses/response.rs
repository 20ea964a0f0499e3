//! The response object: the whole reply, and the object in a stream's first and last events.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::client_tools::ClientTools;
use super::output::{Output, OutputItem};
use crate::json_values::memory_bytes;
use crate::sampling::Sampling;
use crate::sequence::FinishReason;
use crate::written_number::as_written;

/// The fields of a request that its reply repeats.
#[derive(Debug, Clone, PartialEq)]
pub struct Echo {
    /// `instructions`.
    pub instructions: Option<String>,
    /// `max_output_tokens`.
    pub max_output_tokens: Option<u32>,
    /// `metadata`.
    pub metadata: Map<String, Value>,
    /// `temperature` in effect.
    pub temperature: f32,
    /// `top_p` in effect.
    pub top_p: f32,
    /// `presence_penalty` in effect.
    pub presence_penalty: f32,
    /// `frequency_penalty` in effect.
    pub frequency_penalty: f32,
    /// `text.format`.
    pub format: Value,
    /// `reasoning.effort`.
    pub effort: Option<String>,
    /// `parallel_tool_calls`.
    pub parallel_tool_calls: bool,
    /// `tool_choice` as the client wrote it.
    pub tool_choice: Value,
    /// The tools that are in effect.
    pub tools: Vec<Value>,
    /// `top_logprobs`.
    pub top_logprobs: u32,
    /// `max_tool_calls`. It limits calls of OpenAI's own tools, which do not exist here.
    pub max_tool_calls: Option<u32>,
    /// `safety_identifier`.
    pub safety_identifier: Option<String>,
    /// `prompt_cache_key`.
    pub prompt_cache_key: Option<String>,
    /// `user`.
    pub user: Option<String>,
}

impl Echo {
    /// Sets the sampling that is in effect: a model may have defaults of its own for fields that the client did not
    /// send.
    pub fn samples_with(&mut self, sampling: &Sampling) {
        self.temperature = sampling.temperature;
        self.top_p = sampling.top_p;
        self.presence_penalty = sampling.presence_penalty;
        self.frequency_penalty = sampling.frequency_penalty;
    }
}

/// The fields of a response that are known before its first token.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponseHead {
    /// The unique part of the ids of the response and its items.
    pub stem: String,
    /// Seconds since the Unix epoch.
    pub created_at: u64,
    /// The model's name, as the client wrote it.
    pub model: String,
    /// The fields of the request that it repeats.
    pub echo: Echo,
    /// The names by which the client knows its tools.
    pub tools: ClientTools,
}

/// How and when a response ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseEnd {
    /// The engine's reason.
    pub reason: FinishReason,
    /// Seconds since the Unix epoch.
    pub at: u64,
}

/// A response, finished or not.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Response {
    id: String,
    #[schemars(extend("const" = "response"))]
    object: &'static str,
    created_at: u64,
    completed_at: Option<u64>,
    #[schemars(extend("enum" = ["in_progress", "completed", "incomplete", "failed"]))]
    status: &'static str,
    background: bool,
    error: Option<ResponseFailure>,
    frequency_penalty: f32,
    incomplete_details: Option<Value>,
    instructions: Option<String>,
    max_output_tokens: Option<u32>,
    max_tool_calls: Option<u32>,
    #[serde(serialize_with = "as_written")]
    metadata: Map<String, Value>,
    model: String,
    output: Vec<OutputItem>,
    parallel_tool_calls: bool,
    presence_penalty: f32,
    previous_response_id: Option<()>,
    prompt_cache_key: Option<String>,
    reasoning: Value,
    safety_identifier: Option<String>,
    service_tier: &'static str,
    store: bool,
    temperature: f32,
    #[serde(serialize_with = "as_written")]
    text: Value,
    #[serde(serialize_with = "as_written")]
    tool_choice: Value,
    #[serde(serialize_with = "as_written")]
    tools: Vec<Value>,
    top_logprobs: u32,
    top_p: f32,
    truncation: &'static str,
    usage: Option<ResponseUsage>,
    user: Option<String>,
}

/// Why a response failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ResponseFailure {
    /// The reason, for programs.
    pub code: &'static str,
    /// The message, for people.
    pub message: String,
}

/// Token counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ResponseUsage {
    input_tokens: u32,
    input_tokens_details: ResponseInputDetails,
    output_tokens: u32,
    output_tokens_details: ResponseOutputDetails,
    total_tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
struct ResponseInputDetails {
    cached_tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
struct ResponseOutputDetails {
    reasoning_tokens: u32,
}

impl ResponseUsage {
    /// The token counts of a request.
    pub fn new(n_prompt: u32, n_cached: u32, n_completion: u32, n_reasoning: u32) -> Self {
        ResponseUsage {
            input_tokens: n_prompt,
            input_tokens_details: ResponseInputDetails { cached_tokens: n_cached },
            output_tokens: n_completion,
            output_tokens_details: ResponseOutputDetails { reasoning_tokens: n_reasoning },
            total_tokens: n_prompt.saturating_add(n_completion),
        }
    }
}

impl ResponseHead {
    /// Returns the bytes that it takes in memory, about.
    pub fn memory_bytes(&self) -> usize {
        let Echo { instructions, metadata, format, tool_choice, tools, .. } = &self.echo;
        let of_field = |(name, value): (&String, &Value)| name.capacity() + memory_bytes(value);
        let values = [format, tool_choice].into_iter().chain(tools).map(memory_bytes).sum::<usize>();
        let texts = instructions.as_ref().map_or(0, String::capacity);
        texts + values + metadata.iter().map(of_field).sum::<usize>()
    }

    /// Returns an empty output.
    pub fn no_output(&self) -> Output {
        Output::new(self.stem.clone(), self.tools.clone())
    }

    /// Returns the response before its first item.
    pub fn in_progress(&self) -> Response {
        self.response("in_progress", Vec::new())
    }

    /// Returns the response at its end. Only a completed one has a time of completion.
    pub fn finished(&self, end: ResponseEnd, output: Vec<OutputItem>, usage: ResponseUsage) -> Response {
        let (status, completed_at, incomplete_details) = match end.reason {
            FinishReason::Stop | FinishReason::ToolCalls | FinishReason::Refusal => ("completed", Some(end.at), None),
            FinishReason::Length => ("incomplete", None, Some(json!({"reason": "max_output_tokens"}))),
            FinishReason::ContentFilter => ("incomplete", None, Some(json!({"reason": "content_filter"}))),
        };
        Response { usage: Some(usage), completed_at, incomplete_details, ..self.response(status, output) }
    }

    /// Returns the response of a request that failed after this output.
    pub fn failed(&self, failure: ResponseFailure, output: Vec<OutputItem>) -> Response {
        Response { error: Some(failure), ..self.response("failed", output) }
    }

    fn response(&self, status: &'static str, output: Vec<OutputItem>) -> Response {
        let echo = self.echo.clone();
        Response {
            id: format!("resp_{}", self.stem),
            object: "response",
            created_at: self.created_at,
            completed_at: None,
            status,
            background: false,
            error: None,
            frequency_penalty: echo.frequency_penalty,
            incomplete_details: None,
            instructions: echo.instructions,
            max_output_tokens: echo.max_output_tokens,
            max_tool_calls: echo.max_tool_calls,
            metadata: echo.metadata,
            model: self.model.clone(),
            output,
            parallel_tool_calls: echo.parallel_tool_calls,
            presence_penalty: echo.presence_penalty,
            previous_response_id: None,
            prompt_cache_key: echo.prompt_cache_key,
            reasoning: json!({"effort": echo.effort, "summary": null}),
            safety_identifier: echo.safety_identifier,
            service_tier: "default",
            store: false,
            temperature: echo.temperature,
            text: json!({"format": echo.format}),
            tool_choice: echo.tool_choice,
            tools: echo.tools,
            top_logprobs: echo.top_logprobs,
            top_p: echo.top_p,
            truncation: "disabled",
            usage: None,
            user: echo.user,
        }
    }
}
