//! A request's steps on their way to the client: as one stream, or collected. Dialects write the bytes.

pub(super) mod collected;
pub(super) mod event_stream;
pub(super) mod refusals_as_text;
pub(super) mod reply_totals;
pub mod request_steps;
pub mod route_header;
pub(super) mod streamed;
pub(super) mod warning;
pub(super) mod when_woken;
