//! The sampling fields that the dialects share: OpenAI's, and those that llama-server and vLLM added.

use std::ops::RangeInclusive;

use schemars::json_schema;
use serde::de::MapAccess;

use super::field::{Field, object};
use super::invalid::{InvalidRequest, quoted};
use super::read::{JsonReader, Read, Reading, ValueProblem, each_field};
use super::samplers::Samplers;
use super::schema::described;
use super::values::{Integer, Range, Real, WideInteger};
use crate::sampling::Sampling;
use crate::sampling_fields::{OCCURRENCE_PENALTY, PROBABILITY, REPEAT_PENALTY, SamplingFields, TEMPERATURE};
use crate::token::Token;

/// Each bias costs time at every token, and travels to the engine with every choice.
const MAX_LOGIT_BIASES: usize = 1024;
/// OpenAI's range.
const BIAS: RangeInclusive<f64> = -100.0..=100.0;

/// A count. vLLM's clients send -1 for 'off', llama.cpp's send 0.
type OffOrCount = Integer<-1, { i32::MAX as i64 }>;

macro_rules! ranges {
    ($($name:ident: $range:ident),*) => {
        $(#[derive(Debug, Clone, Copy)]
        pub(crate) struct $name;
        impl Range for $name {
            const RANGE: RangeInclusive<f64> = $range;
        })*
    };
}
ranges!(
    Temperature: TEMPERATURE, Probability: PROBABILITY, Occurrence: OCCURRENCE_PENALTY, Repeat: REPEAT_PENALTY,
    Bias: BIAS
);

object! {
    /// How tokens are sampled. Defaults are llama-server's; in Ollama's routes, Ollama's.
    pub(crate) struct SamplingBody {
        /// Any 64-bit integer. If missing or -1, the server draws a seed.
        seed: Field<WideInteger>,
        /// Divides the logits. 0 always takes the most likely token.
        temperature: Field<Real<Temperature>>,
        /// Keeps the smallest set of tokens whose total probability reaches this number.
        top_p: Field<Real<Probability>>,
        /// Keeps tokens whose probability is at least this share of the most likely token's.
        min_p: Field<Real<Probability>>,
        /// Keeps this many of the most likely tokens; 0 or -1 keeps all.
        top_k: Field<OffOrCount>,
        /// Subtracted from a token's logit for each time it has occurred.
        frequency_penalty: Field<Real<Occurrence>>,
        /// Subtracted from a token's logit once if it has occurred.
        presence_penalty: Field<Real<Occurrence>>,
        /// Divides the logits of tokens that have occurred; multiplies negative logits.
        repeat_penalty: Field<Real<Repeat>>,
        /// vLLM's name of `repeat_penalty`.
        repetition_penalty: Field<Real<Repeat>>,
        /// How many of the last tokens `repeat_penalty` considers; -1 is all.
        repeat_last_n: Field<OffOrCount>,
        /// Added to the logits of tokens: from token ids to numbers.
        logit_bias: Field<LogitBias>,
        #[schemars(skip)]
        samplers: Field<Samplers>,
    }
}

impl SamplingBody {
    /// Returns the sampling in effect and the fields that the client chose. `defaults`, with the drawn seed, has the
    /// values of the other fields. `at` is the path of the object with the fields.
    pub(crate) fn check(self, at: &str, defaults: Sampling) -> Result<(Sampling, SamplingFields), InvalidRequest> {
        let top_k = self.top_k.get(at)?;
        let repetition_penalty = self.repetition_penalty.get(at)?;
        let last_n = self.repeat_last_n.get(at)?;
        let mut chosen = SamplingFields {
            temperature: self.temperature.get(at)?.map(|n| n.0),
            top_k: top_k.map(|k| k.count().unwrap_or(0)),
            // 0 is accepted, though OpenAI refuses it: it keeps the most likely token alone.
            top_p: self.top_p.get(at)?.map(|n| n.0),
            min_p: self.min_p.get(at)?.map(|n| n.0),
            repeat_penalty: self.repeat_penalty.get(at)?.or(repetition_penalty).map(|n| n.0),
            repeat_last_n: last_n.map(|n| i32::try_from(n.0).unwrap_or(i32::MAX)),
            frequency_penalty: self.frequency_penalty.get(at)?.map(|n| n.0),
            presence_penalty: self.presence_penalty.get(at)?.map(|n| n.0),
        };
        if let Some(samplers) = self.samplers.get(at)? {
            samplers.leave_out_others(&mut chosen);
        }
        let mut sampling = defaults;
        chosen.apply(&mut sampling);
        // llama.cpp draws a seed for -1, and many front ends send -1 by default. Other negative numbers are OpenAI's
        // signed seeds: their bits are used.
        if let Some(seed) = self.seed.get(at)?.map(|seed| seed.0).filter(|&seed| seed != -1) {
            (sampling.seed, sampling.repeatable) = (seed as u64, true);
        }
        if let Some(biases) = self.logit_bias.get(at)? {
            sampling.logit_bias = biases.0.map_err(|problem| InvalidRequest::at("logit_bias", problem))?.into();
        }
        Ok((sampling, chosen))
    }
}

/// `{"token id": bias}`, or the problem with one of its entries. The error's path is `logit_bias` even inside Ollama's
/// `options`.
#[derive(Debug)]
pub(crate) struct LogitBias(Result<Vec<(Token, f32)>, ValueProblem>);

impl Read for LogitBias {
    const EXPECTED: &'static str = "an object";

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        let mut n = 0;
        let mut biases = Ok(Vec::new());
        each_field(fields, |key, fields| {
            n += 1;
            let bias = fields.next_value_seed(JsonReader::<Real<Bias>>::new())?;
            if let Ok(read) = &mut biases {
                match one_bias(&key, bias) {
                    Ok(bias) => read.push(bias),
                    Err(problem) => biases = Err(problem),
                }
            }
            Ok(())
        })?;
        if n > MAX_LOGIT_BIASES {
            let problem = format!("must have at most {MAX_LOGIT_BIASES} entries, but has {n}");
            biases = Err(ValueProblem::Value(problem));
        }
        Ok(Ok(LogitBias(biases)))
    }
}

fn one_bias(key: &str, bias: Reading<Real<Bias>>) -> Reading<(Token, f32)> {
    let token: Token =
        key.parse().map_err(|_| ValueProblem::Value(format!("key {} is not a token id", quoted(key))))?;
    match bias {
        Ok(bias) => Ok((token, bias.0)),
        Err(problem) => Err(ValueProblem::Value(format!("token {token} {problem}"))),
    }
}

described!([] LogitBias: |_generator| json_schema!({
    "type": "object",
    "maxProperties": MAX_LOGIT_BIASES,
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": BIAS.start(), "maximum": BIAS.end()},
}));

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::request::read::read;

    fn parsed(body: Value) -> Result<Sampling, InvalidRequest> {
        let body: SamplingBody = read(body.to_string().as_bytes())?;
        body.check("", Sampling { seed: 99, ..Sampling::default() }).map(|(sampling, _)| sampling)
    }

    fn check(body: Value, expected: Sampling) {
        assert_eq!(parsed(body.clone()).as_ref(), Ok(&expected), "{body}");
    }

    fn refused(body: Value, param: &str) {
        assert_eq!(parsed(body.clone()).unwrap_err().param.as_deref(), Some(param), "{body}");
    }

    #[test]
    fn fields_reach_the_sampler() {
        let base = || Sampling { seed: 99, ..Sampling::default() };
        check(json!({}), base());
        check(json!({"temperature": null, "logit_bias": null, "seed": null, "top_k": null}), base());
        check(json!({"temperature": 0}), Sampling { temperature: 0.0, ..base() });
        check(json!({"temperature": 2, "top_p": 0}), Sampling { temperature: 2.0, top_p: 0.0, ..base() });
        check(json!({"top_p": 1, "min_p": 0.25}), Sampling { top_p: 1.0, min_p: 0.25, ..base() });
        check(json!({"top_k": -1}), Sampling { top_k: 0, ..base() });
        check(json!({"top_k": 0}), Sampling { top_k: 0, ..base() });
        check(json!({"top_k": 20.0}), Sampling { top_k: 20, ..base() });
        check(
            json!({"frequency_penalty": -2, "presence_penalty": 2}),
            Sampling { frequency_penalty: -2.0, presence_penalty: 2.0, ..base() },
        );
        check(json!({"repetition_penalty": 1.5}), Sampling { repeat_penalty: 1.5, ..base() });
        check(
            json!({"repetition_penalty": 1.5, "repeat_penalty": 1.25, "repeat_last_n": -1}),
            Sampling { repeat_penalty: 1.25, repeat_last_n: -1, ..base() },
        );
        check(
            json!({"logit_bias": {"5": -100, "7": 0.5}}),
            Sampling { logit_bias: vec![(5, -100.0), (7, 0.5)].into(), ..base() },
        );
    }

    #[test]
    fn a_bias_is_the_nearest_float_of_its_digits() {
        let bias = |number: &str| {
            let body: SamplingBody = read(format!(r#"{{"logit_bias": {{"5": {number}}}}}"#).as_bytes())?;
            Ok::<_, InvalidRequest>(body.check("", Sampling::default())?.0.logit_bias.to_vec())
        };
        for (number, nearest) in [
            ("0.69999999999999995559107901499", 0.7),
            ("99.99999999999999999999999999999", 100.0),
            ("1e-400", 0.0),
            ("0.12345678901234567890", 0.123_456_79),
        ] {
            assert_eq!(bias(number), Ok(vec![(5, nearest)]), "{number}");
        }
        for (number, problem) in [
            ("1e999", "token 5 is a number out of range"),
            ("100.000000000000000000000001e1", "token 5 must be from -100 to 100, but is 1000"),
            ("null", "token 5 must be a number, but is null"),
            ("{}", "token 5 must be a number, but is an object"),
        ] {
            let error = bias(number).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("logit_bias"), "{number}");
            assert!(error.message.contains(problem), "{number}: {}", error.message);
        }
    }

    #[test]
    fn samplers_that_a_list_leaves_out_are_off() {
        let base = || Sampling { seed: 99, ..Sampling::default() };
        let all = json!(["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]);
        check(json!({ "samplers": all, "top_k": 7 }), Sampling { top_k: 7, ..base() });
        check(json!({ "samplers": "edskypmxt" }), base());
        check(json!({ "samplers": ["top_k", "temperature"] }), Sampling { top_p: 1.0, min_p: 0.0, ..base() });
        check(
            json!({ "samplers": "kt", "top_p": 0.5, "temperature": 2 }),
            Sampling { top_p: 1.0, min_p: 0.0, temperature: 2.0, ..base() },
        );
        let greedy_list = Sampling { top_k: 0, top_p: 0.5, min_p: 0.0, temperature: 1.0, ..base() };
        check(json!({ "samplers": ["top_p"], "top_p": 0.5, "temperature": 0 }), greedy_list);
        refused(json!({ "samplers": ["temperature", "top_k"] }), "samplers");
        refused(json!({ "samplers": ["top_k", "top_k"] }), "samplers");
        refused(json!({ "samplers": ["made_up"] }), "samplers");
        refused(json!({ "samplers": 1 }), "samplers");
    }

    #[test]
    fn any_64_bit_seed_counts() {
        let seed = |seed: Value| parsed(json!({ "seed": seed })).unwrap().seed;
        assert_eq!(seed(json!(0)), 0);
        assert_eq!(seed(json!(7.0)), 7);
        assert_eq!(seed(json!(u64::MAX)), u64::MAX);
        assert_eq!(seed(json!(i64::MIN)), 1 << 63);
        assert_eq!(seed(json!(-2)), u64::MAX - 1);
        assert_eq!(seed(json!(-1)), 99);
        let is_repeatable = |seed: Value| parsed(json!({ "seed": seed })).unwrap().repeatable;
        assert!(is_repeatable(json!(99)) && !is_repeatable(json!(-1)) && !is_repeatable(json!(null)));
        refused(json!({"seed": 1e30}), "seed");
        refused(json!({"seed": 0.5}), "seed");
        refused(json!({"seed": "7"}), "seed");
    }

    #[test]
    fn what_is_out_of_range_or_mistyped_is_named() {
        refused(json!({"temperature": -0.1}), "temperature");
        refused(json!({"temperature": 2.1}), "temperature");
        refused(json!({"temperature": "hot"}), "temperature");
        refused(json!({"temperature": true}), "temperature");
        refused(json!({"temperature": 1e300}), "temperature");
        refused(json!({"top_p": 1.5}), "top_p");
        refused(json!({"top_p": -1}), "top_p");
        refused(json!({"min_p": 1.5}), "min_p");
        refused(json!({"top_k": -2}), "top_k");
        refused(json!({"top_k": 1.5}), "top_k");
        refused(json!({"top_k": 1e12}), "top_k");
        refused(json!({"frequency_penalty": 2.5}), "frequency_penalty");
        refused(json!({"presence_penalty": -2.5}), "presence_penalty");
        refused(json!({"repeat_penalty": 0}), "repeat_penalty");
        refused(json!({"repetition_penalty": 11}), "repetition_penalty");
        refused(json!({"repeat_last_n": -2}), "repeat_last_n");
        refused(json!({"logit_bias": []}), "logit_bias");
        refused(json!({"logit_bias": {"five": 1}}), "logit_bias");
        refused(json!({"logit_bias": {"-5": 1}}), "logit_bias");
        refused(json!({"logit_bias": {"5": 101}}), "logit_bias");
        refused(json!({"logit_bias": {"5": "1"}}), "logit_bias");
        let many: serde_json::Map<_, _> = (0..1025).map(|id| (id.to_string(), json!(1))).collect();
        refused(json!({"logit_bias": many}), "logit_bias");
    }
}
