//! Whether an upstream's model is in memory, where the upstream lets others decide that: Ollama.

use baton_schemas::EngineError;
use baton_schemas::keep_alive::KeepAlive;
use serde_json::{Map, Value};

use super::{Call, Kind, UpstreamError};

/// What makes a model come, or go if `keep_alive` is nothing. `None`: nothing has to be done, as this kind has its
/// model in memory for as long as it runs. Errors: it cannot be made to go.
pub(super) fn call(kind: Kind, model: &str, keep_alive: Option<KeepAlive>) -> Result<Option<Call>, UpstreamError> {
    if kind != Kind::Ollama {
        return match keep_alive.is_some_and(KeepAlive::is_nothing) {
            true => {
                let feature = format!("unloading a model that an upstream of kind {} serves", kind.as_str());
                Err(UpstreamError::Refused(EngineError::Unsupported { feature }))
            }
            false => Ok(None),
        };
    }
    // Without a prompt nothing is generated.
    let mut body = Map::new();
    body.insert("model".to_owned(), model.into());
    body.insert("stream".to_owned(), false.into());
    if let Some(keep_alive) = keep_alive {
        body.insert(FIELD.to_owned(), value(keep_alive));
    }
    Ok(Some(Call { path: "api/generate", body }))
}

/// How long a model is to stay, in Ollama's requests.
pub(super) const FIELD: &str = "keep_alive";

/// See [`FIELD`].
pub(super) fn value(keep_alive: KeepAlive) -> Value {
    match keep_alive {
        KeepAlive::Forever => Value::from(-1),
        // With a unit: some versions take a bare number for whole seconds.
        KeepAlive::For(time) => format!("{}s", time.as_secs_f64()).into(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_model_comes_and_goes_where_the_kind_has_words_for_it() {
        let of = |kind, keep_alive| call(kind, "m", keep_alive).map(|call| call.map(|call| Value::Object(call.body)));
        let zero = Some(KeepAlive::For(Duration::ZERO));
        assert_eq!(of(Kind::Ollama, None), Ok(Some(json!({ "model": "m", "stream": false }))));
        assert_eq!(of(Kind::Ollama, zero).unwrap().unwrap()["keep_alive"], "0s");
        assert_eq!(of(Kind::Ollama, Some(KeepAlive::Forever)).unwrap().unwrap()["keep_alive"], -1);
        let short = Some(KeepAlive::For(Duration::from_millis(1500)));
        assert_eq!(of(Kind::Ollama, short).unwrap().unwrap()["keep_alive"], "1.5s");
        assert_eq!(of(Kind::Vllm, short), Ok(None));
        let refused = of(Kind::LlamaServer, zero);
        assert!(matches!(refused, Err(UpstreamError::Refused(EngineError::Unsupported { .. }))), "{refused:?}");
    }
}
