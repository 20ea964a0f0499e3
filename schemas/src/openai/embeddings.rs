//! `POST /v1/embeddings`, as far as it takes to refuse it: no engine here runs embedding models.

use crate::request::fields::Fields;
use crate::request::{InvalidRequest, json};

/// The model that a body names.
pub fn model(body: &[u8]) -> Result<String, InvalidRequest> {
    Fields::root(&json::read_object(body)?).model()
}
