//! The bodies of requests.

use baton_proxy::serve::CommandFailure;
use bytes::Bytes;
use serde_json::{Value, json};

use super::settings::{AskedForm, CalledApi, InputWords, LoadSettings};
use super::word_prompts::WordPrompts;

/// Stands for the prompt while the rest of the body is written once.
const PROMPT_MARK: &str = "@@prompt@@";

/// Bodies that differ in their prompts only.
pub(super) struct Bodies {
    before_prompt: Vec<u8>,
    after_prompt: Vec<u8>,
    prompts: WordPrompts,
}

impl Bodies {
    pub(super) fn new(settings: &LoadSettings, model: &str) -> Result<Bodies, CommandFailure> {
        let mut body = json!({ "model": model, "max_tokens": settings.output_tokens, "temperature": 0 });
        match settings.api {
            CalledApi::Chat => body["messages"] = json!([{ "role": "user", "content": PROMPT_MARK }]),
            CalledApi::Completions => body["prompt"] = PROMPT_MARK.into(),
        }
        match settings.reply {
            AskedForm::Json => body["stream"] = false.into(),
            AskedForm::Stream => {
                body["stream"] = true.into();
                body["stream_options"] = json!({ "include_usage": true });
            }
        }
        if settings.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        if let Value::Object(fields) = &mut body {
            fields.extend(settings.extra_body.clone());
        }
        let text = serde_json::to_string(&body)?;
        let no_prompt = || CommandFailure("--extra-body must not replace the prompt".into());
        let (before, after) = text.split_once(PROMPT_MARK).ok_or_else(no_prompt)?;
        let InputWords { least, most } = settings.input_words;
        Ok(Bodies {
            before_prompt: before.into(),
            after_prompt: after.into(),
            prompts: WordPrompts::of_lengths(least as usize..=most as usize, settings.prefix_words as usize),
        })
    }

    /// The body with prompt `n`.
    pub(super) fn body(&self, n: u64) -> Bytes {
        let mut body = self.before_prompt.clone();
        self.prompts.write(n, &mut body);
        body.extend_from_slice(&self.after_prompt);
        body.into()
    }
}
