//! `options`: what Ollama's Modelfiles call parameters.

use crate::request::InvalidRequest;
use crate::request::demand::Off;
use crate::request::field::{Field, object};
use crate::request::foreign::{Foreign, ForeignFields, OwnName, RefusedField};
use crate::request::sampling::SamplingBody;
use crate::request::stop::StopStrings;
use crate::request::values::{Integer, MAX_U32};
use crate::sampling::Sampling;
use crate::sampling_fields::SamplingFields;

object! {
    /// Sampling and limits. Options that only change how Ollama loads a model are ignored.
    ///
    /// `num_ctx` can only lower the limit: the size of the context is fixed when a model is loaded. A prompt that does
    /// not fit is refused. Ollama would silently cut off its beginning.
    #[schemars(rename = "OllamaOptions")]
    pub(crate) struct OptionsBody {
        /// How tokens are sampled.
        #[schemars(flatten)]
        sampling: SamplingBody,
        /// The most tokens in a reply. 0 or less: until the context ends.
        num_predict: Field<Integer<{ i32::MIN as i64 }, MAX_U32>>,
        /// The most tokens in prompt and reply together. A longer prompt is a 400; a reply that reaches the limit ends
        /// with `length`. 0, or more than the model's context: no limit.
        num_ctx: Field<Integer<0, MAX_U32>>,
        /// Texts before which the reply ends.
        stop: Field<StopStrings>,
        #[schemars(skip)]
        foreign: Foreign<OptionsFields>,
    }
}

/// The checked options that have an effect.
pub(super) struct Options {
    pub(super) max_tokens: Option<u32>,
    pub(super) num_ctx: Option<u32>,
    pub(super) stop: Vec<String>,
    pub(super) sampling: Sampling,
    pub(super) chosen: SamplingFields,
}

const NUM_PREDICT: &str = "send 'num_predict'";
const PENALTY: &str = "lower 'repeat_penalty'";

/// Options that only change how Ollama loads a model.
#[derive(Debug)]
pub(crate) struct OptionsFields;

impl ForeignFields for OptionsFields {
    const AT: &'static str = "options";
    const WITHOUT_EFFECT: &'static [&'static str] = &[
        "numa",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "low_vram",
        "f16_kv",
        "logits_all",
        "vocab_only",
        "use_mmap",
        "use_mlock",
        "embedding_only",
        "num_thread",
        "num_keep",
        "num_gqa",
        "draft_num_predict",
    ];
    const REFUSED: &'static [RefusedField] = &[
        RefusedField::new("penalize_newline", Off::TRUE, "A penalty that spares newlines", PENALTY),
        RefusedField::new("rope_frequency_base", Off::ZERO, "Other frequencies of positions", ""),
        RefusedField::new("rope_frequency_scale", Off::ONE, "Other frequencies of positions", ""),
        RefusedField::new("max_tokens", Off::NEVER, "'max_tokens'", NUM_PREDICT),
        RefusedField::new("max_new_tokens", Off::NEVER, "'max_new_tokens'", NUM_PREDICT),
        RefusedField::new("n_predict", Off::NEVER, "'n_predict'", NUM_PREDICT),
    ];
    const NAMES: &'static [OwnName] = &[
        OwnName::new("max_tokens", "'num_predict'"),
        OwnName::new("reasoning_effort", "'think' beside 'options'"),
        OwnName::new("response_format", "'format' beside 'options'"),
        OwnName::new("regex", "'regex' beside 'options'"),
        OwnName::new("grammar", "'grammar' beside 'options'"),
        OwnName::new("structured_outputs", "'format' beside 'options'"),
        OwnName::new("tools", "'tools' beside 'options'"),
        OwnName::new("logprobs", "'logprobs' beside 'options'"),
        OwnName::new("top_logprobs", "'top_logprobs' beside 'options'"),
        OwnName::new("tool_choice", ""),
        OwnName::new("ignore_eos", ""),
        OwnName::new("n", ""),
    ];
}

/// Returns Ollama's sampling defaults: `DefaultOptions` in its `api/types.go`.
pub fn defaults(seed: u64) -> Sampling {
    Sampling { top_k: 40, top_p: 0.9, min_p: 0.0, temperature: 0.8, repeat_penalty: 1.1, seed, ..Sampling::default() }
}

impl OptionsBody {
    /// Checks `options`. `drawn_seed` is used if the client sent no seed.
    pub(super) fn check(self, drawn_seed: u64) -> Result<Options, InvalidRequest> {
        const AT: &str = "options";
        self.foreign.check()?;
        let num_ctx = self.num_ctx.get(AT)?.and_then(Integer::count).filter(|&n| n > 0);
        // 0 and negative numbers mean 'until the context ends'.
        let max_tokens = self.num_predict.get(AT)?.and_then(Integer::count).filter(|&n| n > 0);
        let (sampling, chosen) = self.sampling.check(AT, defaults(drawn_seed))?;
        Ok(Options { max_tokens, num_ctx, stop: self.stop.get(AT)?.unwrap_or_default().0, sampling, chosen })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::request::field::ObjectMember as _;
    use crate::request::read::read;

    object! {
        /// Has options.
        struct WithOptions {
            options: Field<OptionsBody>,
        }
    }

    fn parsed(options: Value) -> Result<Options, InvalidRequest> {
        let body: WithOptions = read(json!({ "options": options }).to_string().as_bytes())?;
        body.options.get("")?.unwrap_or_else(|| OptionsBody::named("")).check(99)
    }

    fn check(options: Value, change: impl FnOnce(&mut Options)) {
        let chosen = SamplingFields::default();
        let mut expected = Options { max_tokens: None, num_ctx: None, stop: vec![], sampling: defaults(99), chosen };
        change(&mut expected);
        let got = parsed(options.clone()).unwrap();
        assert_eq!((got.max_tokens, got.stop), (expected.max_tokens, expected.stop), "{options}");
        assert_eq!(got.num_ctx, expected.num_ctx, "{options}");
        assert_eq!(got.sampling, expected.sampling, "{options}");
    }

    fn refused(options: Value, param: &str) {
        assert_eq!(parsed(options.clone()).err().and_then(|e| e.param).as_deref(), Some(param), "{options}");
    }

    #[test]
    fn options_reach_the_request() {
        check(json!(null), |_| {});
        check(json!({"num_ctx": 8192, "num_gpu": 99, "made_up": "x"}), |o| o.num_ctx = Some(8192));
        check(json!({"num_ctx": 0}), |_| {});
        check(json!({"num_predict": 7}), |o| o.max_tokens = Some(7));
        check(json!({"num_predict": -1}), |_| {});
        check(json!({"num_predict": -2}), |_| {});
        check(json!({"num_predict": 0}), |_| {});
        check(json!({"stop": ["a", "b"]}), |o| o.stop = vec!["a".into(), "b".into()]);
        check(json!({"stop": "a"}), |o| o.stop = vec!["a".into()]);
        check(json!({"seed": 5, "temperature": 0}), |o| {
            (o.sampling.seed, o.sampling.repeatable, o.sampling.temperature) = (5, true, 0.0);
        });
        check(json!({"top_k": 3, "top_p": 0.5}), |o| (o.sampling.top_k, o.sampling.top_p) = (3, 0.5));
        check(json!({"min_p": 0.25, "repeat_last_n": -1}), |o| {
            o.sampling.min_p = 0.25;
            o.sampling.repeat_last_n = -1;
        });
        check(json!({"repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": -1}), |o| {
            let s = &mut o.sampling;
            (s.repeat_penalty, s.presence_penalty, s.frequency_penalty) = (1.5, 1.0, -1.0);
        });
        check(json!({"mirostat": 0, "typical_p": 1.0, "tfs_z": 1}), |_| {});
        check(json!({"penalize_newline": true, "rope_frequency_base": 0, "rope_frequency_scale": 1}), |_| {});
    }

    #[test]
    fn what_is_out_of_range_or_mistyped_is_named() {
        refused(json!([]), "options");
        refused(json!({"num_ctx": -1}), "options.num_ctx");
        refused(json!({"num_ctx": "8k"}), "options.num_ctx");
        refused(json!({"num_predict": 1.5}), "options.num_predict");
        refused(json!({"num_predict": 1e12}), "options.num_predict");
        refused(json!({"temperature": -1}), "options.temperature");
        refused(json!({"top_p": 2}), "options.top_p");
        refused(json!({"stop": [""]}), "options.stop");
        refused(json!({"logit_bias": []}), "options.logit_bias");
        refused(json!({"logit_bias": {"five": 1}}), "logit_bias");
        refused(json!({"logit_bias": {"5": 101}}), "logit_bias");
        refused(json!({"mirostat": 2}), "options.mirostat");
        refused(json!({"typical_p": 0.5}), "options.typical_p");
        refused(json!({"penalize_newline": false}), "options.penalize_newline");
        refused(json!({"rope_frequency_base": 1e6}), "options.rope_frequency_base");
        refused(json!({"rope_frequency_scale": 0.5}), "options.rope_frequency_scale");
    }
}
