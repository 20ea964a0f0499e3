//! Other model servers, which speak text and not tokens: Ollama, llama-server, vLLM, and any server of OpenAI's
//! dialect.
//!
//! An upstream gets the parsed request, messages and tools included, and answers with pieces of text, reasoning and
//! calls. A request that it cannot serve is refused before anything is sent, and nothing is dropped in silence: a field
//! is sent if the upstream takes it, left out if it stands at its default, and an error otherwise.
//!
//! This is one attempt at one server. The proxy decides which server is asked, how often, and what its failures mean
//! for the next request. Redirects are not followed; every wait has a deadline, every line and reply a limit.
//!
//! To add a kind, implement `protocol::Protocol` in a file of its own and name it in `registry` and `kind`.

mod arrived;
mod body;
mod call;
mod client;
mod connections;
mod delta;
mod failure;
mod field;
mod fields;
mod kind;
mod llama_server;
mod logprobs;
mod model_info;
mod ollama;
mod openai;
mod protocol;
mod refusal;
mod registry;
mod settings;
mod stream;
mod tokens;
mod vectors;
mod vllm;

use self::call::{ApiCall, ApiPath, ModelInfoCall, ReplyDelivery};
pub use self::call::{ChoiceRequest, PreparedChoice};
pub use self::client::{ListedModel, PrefilledPrompt, Upstream};
pub use self::delta::{TextDelta, TextEnd, TextStream, TextToken, TextUsage};
pub use self::failure::{PrefillFailure, UpstreamError, UpstreamFailure};
pub use self::field::UpstreamField;
pub use self::kind::UpstreamKind;
pub use self::settings::{ModelAlias, UpstreamDeadlines, UpstreamSettings};
pub use self::tokens::{PromptCount, TokenAnswer, TokenQuestion};
pub use self::vectors::TextVectors;
