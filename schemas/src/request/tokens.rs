//! Arrays of token ids.

use serde_json::Value;

use super::invalid::InvalidRequest;
use crate::sequence::Token;

/// Reads the field `name`.
pub(crate) fn parse(items: &[Value], name: &str) -> Result<Vec<Token>, InvalidRequest> {
    let token = |item: &Value| item.as_u64().and_then(|id| Token::try_from(id).ok());
    let tokens = items
        .iter()
        .map(|item| token(item).ok_or_else(|| InvalidRequest::at(name, "has an item that is not a token's id")));
    tokens.collect()
}
