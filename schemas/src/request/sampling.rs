//! The sampling fields that OpenAI's routes share, with the names llama-server and vLLM added.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::fields::{Fields, in_range, kind};
use super::invalid::InvalidRequest;
use crate::generate::Sampling;
use crate::sampling_fields::SamplingFields;
use crate::sequence::Token;

/// A bias is applied at every step, so a list costs time on each token; and it crosses to the engine with each choice.
pub(crate) const MAX_LOGIT_BIASES: usize = 1024;
/// OpenAI's.
pub(crate) const BIAS: RangeInclusive<f64> = -100.0..=100.0;
/// Below this a repeat penalty blows logits up beyond what f32 arithmetic keeps apart; above it every repeated token is
/// impossible already.
pub(crate) const REPEAT_PENALTY: RangeInclusive<f64> = 0.1..=10.0;
/// OpenAI's.
pub(crate) const TEMPERATURE: RangeInclusive<f64> = 0.0..=2.0;
/// OpenAI's, of the frequency and the presence penalty.
pub(crate) const OCCURRENCE_PENALTY: RangeInclusive<f64> = -2.0..=2.0;
/// Of `top_p` and `min_p`.
pub(crate) const PROBABILITY: RangeInclusive<f64> = 0.0..=1.0;

/// Reads the sampling fields; a missing one keeps what it has in `defaults`, with a seed that was drawn. Beside it
/// which of them the client chose.
pub(crate) fn parse(fields: Fields<'_>, defaults: Sampling) -> Result<(Sampling, SamplingFields), InvalidRequest> {
    let chosen = chosen(fields)?;
    let mut sampling = defaults;
    chosen.apply(&mut sampling);
    sampling.seed = seed(fields)?.unwrap_or(sampling.seed);
    sampling.logit_bias = logit_bias(fields)?;
    Ok((sampling, chosen))
}

fn chosen(fields: Fields<'_>) -> Result<SamplingFields, InvalidRequest> {
    // vLLM's clients say 'off' as -1, llama.cpp's as 0.
    let top_k = fields.integer("top_k", -1..=i64::from(i32::MAX))?;
    let repetition_penalty = fields.number("repetition_penalty", REPEAT_PENALTY)?;
    let last_n = fields.integer("repeat_last_n", -1..=i64::from(i32::MAX))?;
    Ok(SamplingFields {
        temperature: fields.number("temperature", TEMPERATURE)?,
        top_k: top_k.map(|k| u32::try_from(k).unwrap_or(0)),
        // 0 is accepted, though OpenAI refuses it: the smallest set that reaches it is the best token alone.
        top_p: fields.number("top_p", PROBABILITY)?,
        min_p: fields.number("min_p", PROBABILITY)?,
        repeat_penalty: fields.number("repeat_penalty", REPEAT_PENALTY)?.or(repetition_penalty),
        repeat_last_n: last_n.map(|n| i32::try_from(n).unwrap_or(i32::MAX)),
        frequency_penalty: fields.number("frequency_penalty", OCCURRENCE_PENALTY)?,
        presence_penalty: fields.number("presence_penalty", OCCURRENCE_PENALTY)?,
    })
}

/// Any 64-bit integer. −1 is 'draw one' in llama.cpp's world and many front ends send it by default; other negative
/// numbers are OpenAI's signed seeds, taken bit for bit.
fn seed(fields: Fields<'_>) -> Result<Option<u64>, InvalidRequest> {
    Ok(fields.wide_integer("seed")?.filter(|&seed| seed != -1).map(|seed| seed as u64))
}

/// `{"token id": bias}`.
fn logit_bias(fields: Fields<'_>) -> Result<Vec<(Token, f32)>, InvalidRequest> {
    let Some(biases) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    if biases.len() > MAX_LOGIT_BIASES {
        let problem = format!("must have at most {MAX_LOGIT_BIASES} entries, but has {}", biases.len());
        return Err(InvalidRequest::at("logit_bias", problem));
    }
    biases.iter().map(|(key, value)| one_bias(key, value)).collect()
}

fn one_bias(key: &str, value: &Value) -> Result<(Token, f32), InvalidRequest> {
    let token: Token = key.parse().map_err(|_| {
        InvalidRequest::at("logit_bias", format_args!("key \"{}\" is not a token id", key.escape_debug()))
    })?;
    let problem = |problem: String| InvalidRequest::at("logit_bias", problem);
    let wide = value.as_f64().ok_or_else(|| problem(format!("token {token} needs a number, not {}", kind(value))))?;
    let bias = in_range(wide, &BIAS)
        .ok_or_else(|| problem(format!("token {token} needs a number from -100 to 100, not {wide}")))?;
    Ok((token, bias))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parsed(body: Value) -> Result<Sampling, InvalidRequest> {
        let parsed = parse(Fields::root(body.as_object().unwrap()), Sampling { seed: 99, ..Sampling::default() });
        parsed.map(|(sampling, _)| sampling)
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
            Sampling { logit_bias: vec![(5, -100.0), (7, 0.5)], ..base() },
        );
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
