//! `POST /v1/responses`, OpenAI's newer route: what its clients send, and the objects and events they expect back.
//!
//! There is no store: every request carries its whole history as `input`, and what would need one
//! (`previous_response_id`, `conversation`, `store: true`, `background`) is refused by name.

pub mod events;
pub mod output;
pub mod request;
pub mod response;

mod input;
mod tools;

pub use events::ResponseEventWriter;
pub use output::Output;
pub use request::{ResponsesBody, ResponsesRequest};
pub use response::{Echo, ResponseHead};
