//! `prediction`: what the client expects the reply to be.

use std::sync::Arc;

use super::messages::ChatContent;
use crate::request::InvalidRequest;
use crate::request::field::{Field, Required, join, object};
use crate::request::images::Images;

const FIELD: &str = "prediction";

object! {
    /// What the client expects the reply to be, such as a file that it edits. Only the time of the reply depends on it.
    pub(crate) struct PredictionBody {
        /// The kind of prediction: `content`.
        r#type: Field<String>,
        /// The expected text.
        content: Required<ChatContent>,
    }
}

impl PredictionBody {
    /// Returns the expected text.
    pub(crate) fn check(self) -> Result<Arc<str>, InvalidRequest> {
        if self.r#type.get(FIELD)?.is_some_and(|kind| kind != "content") {
            return Err(InvalidRequest::at(join(FIELD, "type"), "must be content"));
        }
        let mut images = Images::default();
        let text = self.content.get(FIELD)?.check(&join(FIELD, "content"), &mut images)?;
        match images.into_vec().is_empty() {
            true => Ok(text.into()),
            false => Err(InvalidRequest::unsupported(FIELD, "An image as a prediction")),
        }
    }
}
