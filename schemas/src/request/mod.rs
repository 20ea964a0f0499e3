//! Reads and checks request bodies for all dialects: bytes → typed fields → checked values.
//!
//! Nothing here knows a dialect. `field::object!` declares a body once: `read` reads it, its dialect checks it, and
//! schemars derives its description in `/openapi.json` from the same fields, limits and words. Fields that several
//! dialects share, such as llama.cpp's for sampling, are here.

pub mod invalid;

pub(crate) mod demand;
pub(crate) mod echoed;
pub(crate) mod field;
pub(crate) mod foreign;
pub(crate) mod history;
pub(crate) mod images;
pub(crate) mod inputs;
pub(crate) mod read;
pub(crate) mod room;
pub(crate) mod samplers;
pub(crate) mod sampling;
pub(crate) mod schema;
pub(crate) mod stop;
pub(crate) mod tool_choice;
pub(crate) mod tools;
pub(crate) mod values;

pub(crate) mod notes;

mod foreign_fields;
mod place;
mod refused_field;

pub use invalid::InvalidRequest;
pub use notes::BodyNotes;
pub use room::{MeasuredParse, measured};
