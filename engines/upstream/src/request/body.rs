//! Writes a request's body for one upstream. Fields that the upstream does not take are left out while they stand at
//! their defaults, and are errors otherwise: no field is dropped that the client asked for.

use baton_schemas::generate::{Message, Sampling};
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::ollama::default_sampling;
use baton_schemas::written_number::{self, arguments_text};
use serde_json::{Map, Value, json};

use crate::request::fields::Fields;
use crate::{ChoiceRequest, UpstreamError, UpstreamField, UpstreamSettings};

/// One number of a request's sampling.
type SamplingNumber = fn(&Sampling) -> f32;

/// The body of one choice's request, while it is written.
pub(crate) struct BodyWriter<'a> {
    pub(crate) asked: &'a ChoiceRequest<'a>,
    pub(crate) settings: &'a UpstreamSettings,
    pub(crate) body: Fields,
}

impl<'a> BodyWriter<'a> {
    pub(crate) fn new(asked: &'a ChoiceRequest<'a>, settings: &'a UpstreamSettings) -> Self {
        BodyWriter { asked, settings, body: Fields::default() }
    }

    /// Sets a field that every server of this kind takes.
    pub(crate) fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        self.body.set(name, value);
    }

    /// Sets a field under its own name if the upstream takes it. Errors: it does not, and `is_needed`.
    pub(crate) fn put(
        &mut self,
        field: UpstreamField,
        value: impl Into<Value>,
        is_needed: bool,
    ) -> Result<(), UpstreamError> {
        if self.takes(field) {
            self.set(field.as_str(), value);
        } else if is_needed {
            return Err(unsupported(field));
        }
        Ok(())
    }

    pub(crate) fn takes(&self, field: UpstreamField) -> bool {
        self.settings.takes(field)
    }

    /// The limit of new tokens, at least 1: no server computes a prompt without generating. Some take 0 for no limit,
    /// and others refuse it. For `max_tokens: 0` the one token is dropped where the reply is read.
    pub(crate) fn max_tokens(&self) -> Option<u32> {
        let ChoiceRequest { request, n_left, .. } = self.asked;
        let n = self.settings.max_tokens(request)?;
        Some(n.min(n_left.unwrap_or(n)).max(1))
    }

    /// Stop strings for a server whose replies are read to their end. Otherwise only Baton looks for them, and closes
    /// the connection: it reports which one was reached.
    pub(crate) fn set_stops(&mut self) {
        let stops = &self.asked.request.stop;
        if !self.settings.abort && !stops.is_empty() {
            self.set("stop", stops.to_vec());
        }
    }

    /// Writes the sampling parameters.
    pub(crate) fn sampling(&mut self) -> Result<(), UpstreamError> {
        let sampling = &self.asked.request.sampling;
        // The defaults of both dialects: a client that sends none gets these.
        let usual = [Sampling::default(), default_sampling(0)];
        let differs = |of: SamplingNumber| usual.iter().all(|usual| of(usual) != of(sampling));
        let numbers: [(UpstreamField, SamplingNumber); 5] = [
            (UpstreamField::Temperature, |s| s.temperature),
            (UpstreamField::TopP, |s| s.top_p),
            (UpstreamField::MinP, |s| s.min_p),
            (UpstreamField::FrequencyPenalty, |s| s.frequency_penalty),
            (UpstreamField::PresencePenalty, |s| s.presence_penalty),
        ];
        for (field, of) in numbers {
            self.put(field, decimal(of(sampling)), differs(of))?;
        }
        // 0 turns the sampler off, and so does leaving the field out.
        let top_k = sampling.top_k;
        self.put(UpstreamField::TopK, top_k, top_k != 0 && usual.iter().all(|usual| usual.top_k != top_k))?;
        let is_repeating = differs(|s| s.repeat_penalty);
        if self.takes(UpstreamField::RepetitionPenalty) {
            self.set(UpstreamField::RepetitionPenalty.as_str(), decimal(sampling.repeat_penalty));
        } else {
            self.put(UpstreamField::RepeatPenalty, decimal(sampling.repeat_penalty), is_repeating)?;
        }
        self.put(
            UpstreamField::RepeatLastN,
            sampling.repeat_last_n,
            is_repeating && sampling.repeat_last_n != usual[0].repeat_last_n,
        )?;
        let biases: Map<String, Value> =
            sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), decimal(*bias))).collect();
        if !biases.is_empty() {
            self.put(UpstreamField::LogitBias, biases, true)?;
        }
        // Not needed: a client that sends no seed gets a random one here, which looks the same.
        self.put(UpstreamField::Seed, seed(sampling.seed, self.asked.choice), false)
    }
}

pub(crate) fn unsupported(field: UpstreamField) -> UpstreamError {
    UpstreamError::Unsupported { field: field.as_str() }
}

/// The time that a model stays in memory, as Ollama writes it.
pub(crate) fn keep_alive(keep_alive: KeepAlive) -> Value {
    match keep_alive {
        KeepAlive::Forever => Value::from(-1),
        // With a unit: some versions take a bare number for whole seconds.
        KeepAlive::For(time) => format!("{}s", time.as_secs_f64()).into(),
    }
}

/// A choice's seed, in the range that every server takes.
fn seed(seed: u64, choice: u32) -> u64 {
    const RANGE: u64 = i32::MAX as u64;
    let first = if seed <= RANGE { seed } else { seed ^ (seed >> 33) };
    // Added within the range, so that no two choices of a request share a seed.
    (first & RANGE).wrapping_add(u64::from(choice)) & RANGE
}

/// The number in its shortest form: 0.8 and not 0.800000011920929.
fn decimal(value: f32) -> Value {
    if value.trunc() == value {
        return Value::from(f64::from(value));
    }
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// A message's calls with their arguments as text (OpenAI) or as objects (Ollama).
pub(crate) fn calls_of(message: &Message, arguments_are_text: bool) -> Vec<Value> {
    let call = |call: &Value| {
        let function = call.get("function").unwrap_or(call);
        let arguments = match function.get("arguments") {
            Some(Value::String(text)) if arguments_are_text => Value::String(text.clone()),
            Some(Value::String(text)) => written_number::parse(text).unwrap_or_else(|| json!({})),
            Some(_) if arguments_are_text => Value::String(arguments_text(call)),
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
    use baton_schemas::written_number::AsWritten;

    use super::*;

    #[test]
    fn arguments_of_earlier_calls_keep_their_digits() {
        let arguments = r#"{"id":12345678901234567890123}"#;
        let call = json!([{"function": {"name": "f", "arguments": arguments}}]);
        let chat = json!({"model": "m", "messages": [{"role": "assistant", "tool_calls": call}]}).to_string();
        let chat = baton_schemas::openai::ChatRequest::parse(chat.as_bytes(), 0).unwrap().generate;
        let item = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments});
        let response = json!({"model": "m", "input": [item]}).to_string();
        let response = baton_schemas::openai::ResponsesRequest::parse(response.as_bytes(), 0).unwrap().generate;
        for request in [chat, response] {
            let baton_schemas::generate::Input::Chat(conversation) = request.input else { panic!("not a chat") };
            let calls = calls_of(&conversation.messages[0], true);
            assert_eq!(calls[0]["function"]["arguments"], arguments);
            let calls = calls_of(&conversation.messages[0], false);
            assert_eq!(AsWritten(&calls[0]["function"]["arguments"]).to_string(), arguments);
        }
    }

    #[test]
    fn numbers_are_written_as_they_were_meant() {
        assert_eq!(decimal(0.8).to_string(), "0.8");
        assert_eq!(decimal(-2.0).to_string(), "-2.0");
        assert_eq!(decimal(0.0).to_string(), "0.0");
        assert_eq!(decimal(f32::INFINITY), Value::Null);
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
