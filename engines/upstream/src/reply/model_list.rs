//! Reads a server's list of models, in all forms that servers write: `{"data": […]}` as OpenAI's, `{"models": […]}` as
//! Ollama's, or the list alone; with entries that are objects or names.

use std::collections::BTreeSet;

use serde_json::Value;

use super::model_info;
use crate::{ModelCapability, UpstreamError, capability};

/// The fields that have the size of a model's context: vLLM's, and those of hosted servers.
const CONTEXTS: [&str; 3] = ["max_model_len", "context_length", "context_window"];

/// A model that an upstream lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedModel {
    pub name: String,
    /// The size of its context, if the list has it.
    pub n_ctx: Option<u32>,
    /// True if it sees images; `None` if the list does not say.
    pub sees_images: Option<bool>,
    /// Capabilities that the list denies.
    pub lacks: BTreeSet<ModelCapability>,
}

/// A server's list of models.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelListing {
    pub models: Vec<ListedModel>,
    /// Entries without a name.
    pub n_unnamed: usize,
}

/// Reads a list. Null and `[]` are an empty one. Errors: the reply has another form, or no entry has a name.
pub(crate) fn read(reply: &Value) -> Result<ModelListing, UpstreamError> {
    let entries = match reply {
        Value::Array(entries) => entries.as_slice(),
        Value::Null => &[],
        _ => match ["data", "models"].iter().find_map(|field| reply.get(field).filter(|list| !list.is_null())) {
            Some(Value::Array(entries)) => entries.as_slice(),
            None if ["data", "models"].iter().any(|field| reply.get(field).is_some()) => &[],
            _ => return Err(UpstreamError::malformed("a list of models without `data` or `models`")),
        },
    };
    let models: Vec<ListedModel> = entries.iter().filter_map(model).collect();
    if models.is_empty() && !entries.is_empty() {
        return Err(UpstreamError::malformed("a list of models in which no entry has a name"));
    }
    Ok(ModelListing { n_unnamed: entries.len() - models.len(), models })
}

fn model(entry: &Value) -> Option<ListedModel> {
    let name = |value: Option<&'_ Value>| value?.as_str().filter(|name| !name.is_empty()).map(str::to_owned);
    let fields = ["id", "name", "model"];
    let name = name(Some(entry)).or_else(|| fields.iter().find_map(|field| name(entry.get(field))))?;
    let n_ctx = CONTEXTS.into_iter().find_map(|field| model_info::of_context(entry.get(field)).n_ctx);
    Some(ListedModel { name, n_ctx, sees_images: model_info::listed_sight(entry), lacks: capability::lacking(entry) })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_of_models_are_read_in_every_form() {
        let names = |reply: Value| {
            let list = read(&reply).unwrap();
            (list.models.into_iter().map(|model| model.name).collect::<Vec<_>>().join(" "), list.n_unnamed)
        };
        for list in [
            json!({"object": "list", "data": [{"id": "a", "object": "model"}, {"id": "b"}]}),
            json!({"data": [{"id": "a", "name": "A model"}, {"name": "b"}]}),
            json!({"models": [{"name": "a", "model": "a"}, {"model": "b"}]}),
            json!({"data": null, "models": ["a", "b"]}),
            json!([{"id": "a"}, {"id": "b"}]),
            json!(["a", "b"]),
        ] {
            assert_eq!(names(list.clone()), ("a b".to_owned(), 0), "{list}");
        }
        assert_eq!(
            names(json!({"data": [{"id": "a"}, {"id": 7}, null, {"id": "", "name": "b"}, ""]})),
            ("a b".to_owned(), 3)
        );
        for empty in [json!({"data": null}), json!({"data": []}), json!({"models": null}), json!([]), json!(null)] {
            assert_eq!(names(empty.clone()), (String::new(), 0), "{empty}");
        }
        for unread in
            [json!({}), json!({"data": {}}), json!({"data": "a"}), json!([{"file": "a"}]), json!("a"), json!(7)]
        {
            assert!(read(&unread).is_err(), "{unread}");
        }
    }
}
