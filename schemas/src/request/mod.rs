//! Reading and checking of bodies, shared by all dialects: bytes → typed fields → checked values.
//!
//! Nothing here knows a dialect. A body is declared once with `field::object!`: `read` reads it, its dialect checks
//! it, and schemars derives its description in `/openapi.json` from the same fields, limits and words. Names that
//! several dialects share (llama.cpp's for sampling, say) are here.

pub mod invalid;

pub(crate) mod field;
pub(crate) mod history;
pub(crate) mod images;
pub(crate) mod inputs;
pub(crate) mod read;
pub(crate) mod sampling;
pub(crate) mod schema;
pub(crate) mod stop;
pub(crate) mod tools;
pub(crate) mod unsupported;
pub(crate) mod values;

pub use invalid::InvalidRequest;
