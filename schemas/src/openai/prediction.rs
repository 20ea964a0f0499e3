//! `prediction`: what the client expects the reply to be.

use std::sync::Arc;

use super::messages::ChatContent;
use crate::request::InvalidRequest;
use crate::request::field::{Field, Required, join, object};
use crate::request::images::Images;
use crate::request::read::{Read, Reading, ValueProblem};
use crate::request::schema::described;

const FIELD: &str = "prediction";

object! {
    /// What the client expects the reply to be, such as a file that it edits. Only the time of the reply depends on it.
    pub(crate) struct PredictionBody {
        /// The kind of prediction: `content`.
        r#type: Field<PredictionKind>,
        /// The expected text.
        content: Required<ChatContent>,
    }
}

/// The kind of a prediction.
#[derive(Debug)]
pub(crate) enum PredictionKind {
    /// The text of the reply.
    Content,
}

impl Read for PredictionKind {
    const EXPECTED: &'static str = String::EXPECTED;

    fn string(word: &str) -> Reading<Self> {
        match word {
            "content" => Ok(PredictionKind::Content),
            _ => Err(ValueProblem::Value("must be content".to_owned())),
        }
    }
}

described!([] PredictionKind: as String);

impl PredictionBody {
    /// Returns the expected text.
    pub(crate) fn check(self) -> Result<Arc<str>, InvalidRequest> {
        self.r#type.get(FIELD)?;
        let mut images = Images::default();
        let text = self.content.get(FIELD)?.check(&join(FIELD, "content"), &mut images)?;
        match images.is_empty() {
            true => Ok(text.into()),
            false => Err(InvalidRequest::unsupported(FIELD, "An image as a prediction")),
        }
    }
}
