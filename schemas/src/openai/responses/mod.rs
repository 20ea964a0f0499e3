//! `POST /v1/responses`, OpenAI's newer route: its requests, objects and events.
//!
//! Nothing is stored. Every request carries its whole history as `input`, and fields that need a store
//! (`previous_response_id`, `conversation`, `store: true`, `background`) are refused.

pub mod events;
pub mod output;
pub mod request;
pub mod response;

mod client_tools;
mod custom_tool;
mod input;
mod tools;

pub use client_tools::ClientTools;
pub use events::ResponseEventWriter;
pub use output::Output;
pub use request::{ResponsesBody, ResponsesRequest};
pub use response::{Echo, ResponseHead};
