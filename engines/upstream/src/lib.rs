//! Clients of other model servers, which speak text and not tokens: Ollama, llama-server, vLLM, and any server of
//! OpenAI's dialect.
//!
//! An upstream gets the parsed request, messages and tools included, and answers with pieces of text, reasoning and
//! calls. A request that it cannot serve is refused before anything is sent. No field is dropped in silence: it is sent if
//! the upstream takes it, left out if it stands at its default, and an error otherwise.
//!
//! This is one attempt at one server. The proxy decides which server is asked, how often, and what its failures mean
//! for the next request. Redirects are not followed; every wait has a deadline, every line and reply a limit.
//!
//! ```
//! use std::time::Duration;
//!
//! use baton_link::transport::Transport;
//! use baton_upstream::{Upstream, UpstreamDeadlines, UpstreamKind, UpstreamSettings};
//!
//! let second = Duration::from_secs(1);
//! let settings = UpstreamSettings {
//!     name: "gpu".into(),
//!     kind: UpstreamKind::Vllm,
//!     url: "http://127.0.0.1:1".into(),
//!     key: None,
//!     headers: Vec::new(),
//!     models: Vec::new(),
//!     aliases: Vec::new(),
//!     is_adopted: false,
//!     hidden: vec![],
//!     fields: UpstreamKind::Vllm.default_fields().iter().copied().collect(),
//!     same_models: false,
//!     capabilities: None,
//!     max_concurrent: 1,
//!     num_ctx: None,
//!     default_max_tokens: None,
//!     images: None,
//!     image_urls: false,
//!     abort: true,
//!     prefill: Vec::new(),
//!     deadlines: UpstreamDeadlines { connect: second, first: second, idle: second },
//! };
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let upstream = Upstream::new(settings, &Transport::default()).unwrap();
//! assert!(upstream.models().await.is_err(), "no server listens there");
//! # });
//! ```
//!
//! Rooms in reading order:
//!
//! | room | what it has |
//! |---|---|
//! | `client` | [`Upstream`]: one server, and every call of it |
//! | `kinds` | how each kind of server is spoken to |
//! | `request`, `reply` | bodies that are sent; replies, from their bytes to [`TextDelta`]s |
//! | `connections` | the HTTP connections to one server |
//! | `settings`, `kind`, `field`, `capability` | what the configuration says of a server, and a list of its models |
//! | `strict_gap` | why a schema is not sent as a strict one |
//! | `failure` | why a call failed, and what that means for the next one |
//! | `arrived` | replies that are already here, for the fuzz targets |
//!
//! To add a kind, implement `kinds::protocol::Protocol` in a file of its own and name it in `kinds` and `kind`.
//!
//! It uses `baton-link` (transport, deadlines) and `baton-schemas`. It knows no nodes, engines or model files.

mod arrived;
mod capability;
mod client;
mod connections;
mod failure;
mod field;
mod kind;
mod kinds;
mod reply;
mod request;
mod settings;
mod strict_gap;

pub use self::capability::ModelCapability;
pub use self::client::{PrefilledPrompt, Upstream};
pub use self::failure::{PrefillFailure, UpstreamError, UpstreamFailure};
pub use self::field::UpstreamField;
pub use self::kind::UpstreamKind;
pub use self::kinds::tokens::{PromptCount, TokenAnswer, TokenQuestion};
pub use self::reply::delta::{LeftOut, TextDelta, TextEnd, TextStream, TextToken, TextUsage};
pub use self::reply::model_list::{ListedModel, ModelListing};
pub use self::reply::vectors::ReceivedVectors;
use self::request::call::{ApiCall, ApiPath, ModelInfoCall, ReplyDelivery};
pub use self::request::call::{ChoiceRequest, PreparedChoice};
pub use self::settings::{ModelAlias, UpstreamDeadlines, UpstreamSettings};
pub use self::strict_gap::StrictGap;
