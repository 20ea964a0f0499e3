//! `modalities`: the kinds of output.

use serde_json::Value;

use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, object};

object! {
    /// The kinds of output.
    pub(crate) struct ModalitiesBody {
        /// The kinds of output: only `text` is supported.
        #[schemars(extend("items" = {"type": "string", "const": "text"}))]
        modalities: Field<Items<Value>>,
    }
}

impl ModalitiesBody {
    /// Refuses output other than text.
    pub(crate) fn check(self) -> Result<(), InvalidRequest> {
        if self.modalities.get("")?.unwrap_or_default().sound().any(|modality| modality != "text") {
            return Err(InvalidRequest::unsupported("modalities", "Output other than text"));
        }
        Ok(())
    }
}
