//! What a node says of a model whose KV is not handed over.

use baton_schemas::no_handoff::NoHandoffReason;

use super::probe::NoHandoff;
use crate::serving::described::NoKv;

impl From<NoHandoff> for NoKv {
    fn from(error: NoHandoff) -> NoKv {
        let reason = match error {
            NoHandoff::Tokens => NoHandoffReason::TokensInCache,
            NoHandoff::ValueType(_) => NoHandoffReason::KvValueType,
            NoHandoff::Decode(_) | NoHandoff::State(_) => NoHandoffReason::KvNotCopied,
            NoHandoff::UnknownState(_) | NoHandoff::SecondCache | NoHandoff::Layout(_) => NoHandoffReason::UnknownCache,
        };
        NoKv { reason, detail: error.to_string() }
    }
}
