//! Puts a request's fields into a body: those the upstream takes, and never one that it would have to ignore.

use baton_schemas::generate::{Message, Sampling};
use baton_schemas::ollama::default_sampling;
use serde_json::{Map, Value, json};

use super::{UpstreamError, Wish};

/// One number of a request's sampling.
type Stage = fn(&Sampling) -> f32;

/// A body that is being written for one upstream.
pub(super) struct Fields<'a> {
    pub(super) wish: &'a Wish<'a>,
    pub(super) body: Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(wish: &'a Wish<'a>) -> Self {
        Fields { wish, body: Map::new() }
    }

    /// Sets a field that every server of this kind takes.
    pub(super) fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.body.insert(name.to_owned(), value.into());
    }

    /// Sets a field if the upstream takes it. Errors: it does not, and the request needs it.
    pub(super) fn put(
        &mut self,
        name: &'static str,
        value: impl Into<Value>,
        is_needed: bool,
    ) -> Result<(), UpstreamError> {
        if self.takes(name) {
            self.set(name, value);
        } else if is_needed {
            return Err(self.unsupported(name));
        }
        Ok(())
    }

    pub(super) fn takes(&self, name: &str) -> bool {
        self.wish.settings.takes(name)
    }

    pub(super) fn unsupported(&self, field: &'static str) -> UpstreamError {
        UpstreamError::Unsupported { field, kind: self.wish.settings.kind.as_str() }
    }

    /// How tokens are drawn. What stands at its default is left out where the upstream does not take it.
    pub(super) fn sampling(&mut self) -> Result<(), UpstreamError> {
        let sampling = &self.wish.request.sampling;
        // Each dialect's own defaults: nobody has asked for them.
        let usual = [Sampling::default(), default_sampling(0)];
        let differs = |of: Stage| usual.iter().all(|usual| of(usual) != of(sampling));
        let numbers: [(&'static str, Stage); 5] = [
            ("temperature", |s| s.temperature),
            ("top_p", |s| s.top_p),
            ("min_p", |s| s.min_p),
            ("frequency_penalty", |s| s.frequency_penalty),
            ("presence_penalty", |s| s.presence_penalty),
        ];
        for (name, of) in numbers {
            self.put(name, decimal(of(sampling)), differs(of))?;
        }
        // 0 is off, and so is leaving it out where there is no such sampler.
        let top_k = sampling.top_k;
        self.put("top_k", top_k, top_k != 0 && usual.iter().all(|usual| usual.top_k != top_k))?;
        let is_repeating = differs(|s| s.repeat_penalty);
        if self.takes("repetition_penalty") {
            self.set("repetition_penalty", decimal(sampling.repeat_penalty));
        } else {
            self.put("repeat_penalty", decimal(sampling.repeat_penalty), is_repeating)?;
        }
        self.put(
            "repeat_last_n",
            sampling.repeat_last_n,
            is_repeating && sampling.repeat_last_n != usual[0].repeat_last_n,
        )?;
        let biases: Map<String, Value> =
            sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), decimal(*bias))).collect();
        if !biases.is_empty() {
            self.put("logit_bias", biases, true)?;
        }
        // Nobody can tell whether the client sent it: without one the dialect draws one.
        self.put("seed", seed(sampling.seed, self.wish.choice), false)
    }
}

/// A choice's seed, in the range that every server takes.
fn seed(seed: u64, choice: u32) -> u64 {
    const RANGE: u64 = i32::MAX as u64;
    let first = if seed <= RANGE { seed } else { seed ^ (seed >> 33) };
    // Added within the range, so that no two choices of a request meet.
    (first & RANGE).wrapping_add(u64::from(choice)) & RANGE
}

/// A number as a person wrote it: 0.8 and not 0.800000011920929.
fn decimal(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// A message's calls with their arguments as text (OpenAI) or as objects (Ollama).
pub(super) fn calls_of(message: &Message, arguments_are_text: bool) -> Vec<Value> {
    let call = |call: &Value| {
        let function = call.get("function").unwrap_or(call);
        let arguments = match function.get("arguments") {
            Some(Value::String(text)) if arguments_are_text => Value::String(text.clone()),
            Some(Value::String(text)) => serde_json::from_str(text).unwrap_or_else(|_| json!({})),
            Some(object) if arguments_are_text => Value::String(object.to_string()),
            Some(object) => object.clone(),
            None if arguments_are_text => Value::String("{}".to_owned()),
            None => json!({}),
        };
        let mut written = Map::new();
        if let Some(id) = call.get("id") {
            written.insert("id".to_owned(), id.clone());
        }
        if arguments_are_text {
            written.insert("type".to_owned(), "function".into());
        }
        let name = function.get("name").cloned().unwrap_or_default();
        written.insert("function".to_owned(), json!({ "name": name, "arguments": arguments }));
        Value::Object(written)
    };
    message.tool_calls.iter().map(call).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_they_were_meant() {
        assert_eq!(decimal(0.8).to_string(), "0.8");
        assert_eq!(decimal(-2.0).to_string(), "-2.0");
        assert_eq!(decimal(f32::NAN), Value::Null);
    }

    #[test]
    fn seeds_fit_every_server_and_differ_by_choice() {
        assert_eq!(seed(7, 1), 8);
        for large in [u64::MAX, u64::MAX - 1, 1 << 63, 1 << 31, (1 << 31) - 1, 0x1234_5678_9ABC_DEF0] {
            let choices: std::collections::BTreeSet<u64> = (0..128).map(|choice| seed(large, choice)).collect();
            assert_eq!(choices.len(), 128, "{large}");
            assert!(choices.iter().all(|seed| i32::try_from(*seed).is_ok()), "{large}");
        }
    }
}
