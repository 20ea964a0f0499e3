//! Renders chat templates in Jinja as Hugging Face's `apply_chat_template` does.
//!
//! Templates come from a model file or the operator, never from a client. Still they are programs, so their
//! instructions, recursion and output are limited, and engines render in a process with limited memory ([`apart`]). A
//! client's text is always plain text in a prompt, see `guard`.

pub mod apart;
mod error;
mod guard;
mod nesting;
mod python;
mod system;
mod turns;
mod values;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::sync::OnceLock;
use std::time::SystemTime;

use baton_schemas::MessageRole;
use baton_schemas::generate::{Conversation, Message};
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, Output, State, UndefinedBehavior};
use serde::{Deserialize, Serialize};

pub use self::error::TemplateError;
pub use self::guard::TemplatePiece;
use self::guard::{ControlTokens, Marking};
use self::system::SystemRoles;
use self::values::value_of;

/// The most instructions of a rendering. A long chat with tools takes some hundred thousand.
const FUEL: u64 = 50_000_000;

/// The deepest nesting of macros and includes. minijinja's default is too deep for the stack of a worker thread.
const RECURSION_LIMIT: usize = 64;

/// The longest rendered prompt, bytes: more than any context holds.
const MAX_OUTPUT_BYTES: usize = 64 << 20;

/// The longest source of a template, bytes. The largest known ones have about 30 KB.
const MAX_SOURCE_BYTES: usize = 1 << 20;

/// The spellings of special tokens.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SpecialTokens {
    /// The template's variable `bos_token`.
    pub bos: String,
    /// The template's variable `eos_token`.
    pub eos: String,
    /// All control tokens. A client's text must not be able to produce them.
    pub control: Vec<String>,
}

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: SpecialTokens,
    control: ControlTokens,
    /// How it takes system messages: without tools, and with tools. Found at the first conversation that has one.
    system: [OnceLock<SystemRoles>; 2],
}

const NAME: &str = "chat";

impl ChatTemplate {
    /// Parses a template. Errors: the source is too long, nests too deep or does not parse.
    pub fn compile(source: &str, special: SpecialTokens) -> Result<ChatTemplate, TemplateError> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(TemplateError::Failed(format!("the template is larger than {MAX_SOURCE_BYTES} bytes")));
        }
        let source = without_generation_tags(source);
        nesting::check(&source)?;
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION_LIMIT);
        environment.set_formatter(write_as_python);
        python::extend(&mut environment);
        environment.add_function("raise_exception", raise_exception);
        environment.add_template_owned(NAME, source).map_err(failed)?;
        let control = ControlTokens::new(&special.control)?;
        Ok(ChatTemplate { environment, special, control, system: Default::default() })
    }

    /// Renders a conversation and distinguishes the template's control tokens from those that are spelled in the
    /// conversation. The pieces are tokenized one by one; joined, they are the exact prompt. Where the template does not
    /// render a system message in its place, its text is in a user message: see `system`. Where it requires that roles
    /// alternate, neighbours are joined: see `turns`. Errors: the template fails, or the prompt has more than `max_bytes`.
    pub fn render_pieces(
        &self,
        conversation: &Conversation,
        now: SystemTime,
        max_bytes: usize,
    ) -> Result<Vec<TemplatePiece>, TemplateError> {
        let with_system = self.with_system(conversation, now);
        let joined = with_system.iter().filter_map(|form| turns::joined(form)).map(Cow::Owned).collect();
        let mut forms = [with_system, joined].concat();
        let last = forms.pop();
        for form in forms {
            match self.pieces(&form, now, max_bytes) {
                Err(TemplateError::Rejected(_)) => {}
                rendered => return rendered,
            }
        }
        self.pieces(last.as_deref().unwrap_or(conversation), now, max_bytes)
    }

    /// The forms of a conversation with its system messages where the template takes them, the best first.
    fn with_system<'c>(&self, conversation: &'c Conversation, now: SystemTime) -> Vec<Cow<'c, Conversation>> {
        if !conversation.messages.iter().any(|message| message.role == MessageRole::System) {
            return vec![Cow::Borrowed(conversation)];
        }
        let with_tools = !conversation.tools.is_empty();
        let roles = self.system[usize::from(with_tools)]
            .get_or_init(|| SystemRoles::try_out(with_tools, |chat| self.render(chat, now).ok()));
        roles.forms(conversation)
    }

    /// Renders a conversation as it is, in pieces.
    fn pieces(
        &self,
        conversation: &Conversation,
        now: SystemTime,
        max_bytes: usize,
    ) -> Result<Vec<TemplatePiece>, TemplateError> {
        let plain = self.render(conversation, now)?;
        if plain.len() > max_bytes {
            return Err(TemplateError::TooLong { prompt: plain });
        }
        let mark = guard::unused_mark(conversation)?;
        let marked = self.control.mark(conversation, mark, Marking::EveryStart);
        if marked == *conversation {
            return Ok(vec![TemplatePiece { text: plain, has_control: true }]);
        }
        if let Ok(rendered) = self.render(&marked, now)
            && let (text, marks) = guard::take_out(&rendered, mark)
            && text == plain
        {
            return Ok(self.control.pieces(&text, &marks));
        }
        // The template searches the messages, so that marks changed its output. With marks only in complete spellings
        // such a change is intended: to the template, these are not control tokens.
        let marked = self.control.mark(conversation, mark, Marking::Spellings);
        let (text, marks) = guard::take_out(&self.render(&marked, now)?, mark);
        Ok(self.control.pieces(&text, &marks))
    }

    /// Renders a conversation as it is. `now` is what `strftime_now` formats, in the machine's time zone.
    pub fn render(&self, conversation: &Conversation, now: SystemTime) -> Result<String, TemplateError> {
        let mut variables: BTreeMap<String, Value> = BTreeMap::new();
        variables.insert("add_generation_prompt".into(), true.into());
        variables.extend(conversation.template_args.iter().map(|(k, v)| (k.clone(), value_of(v))));
        // DeepSeek's and Granite's name for the switch that Qwen calls `enable_thinking`. Without the switch, an effort
        // turns thinking on.
        let effort = variables.get("reasoning_effort").filter(|effort| !effort.is_none());
        let effort = || effort.map(|effort| Value::from(effort.as_str() != Some("none")));
        if let Some(thinks) = variables.get("enable_thinking").cloned().or_else(effort) {
            variables.entry("thinking".into()).or_insert(thinks);
        }
        // Inserted after the client's arguments, so that those cannot replace these variables.
        let tools = Some(&conversation.tools).filter(|tools| !tools.is_empty());
        let tools: Option<Value> = tools.map(|tools| tools.iter().map(value_of).collect());
        variables.extend([
            ("messages".into(), conversation.messages.iter().map(message).collect()),
            ("tools".into(), tools.into()),
            ("bos_token".into(), self.special.bos.clone().into()),
            ("eos_token".into(), self.special.eos.clone().into()),
            ("strftime_now".into(), Value::from_function(move |format: &str| strftime(format, now))),
        ]);
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let mut text = Capped(Vec::new());
        template.render_captured_to(variables, &mut text).map_err(failed)?;
        String::from_utf8(text.0).map_err(|e| TemplateError::Failed(e.to_string()))
    }
}

/// A message as templates read it.
fn message(message: &Message) -> Value {
    let value = Value::from_serialize(message);
    if message.tool_calls.is_empty() {
        return value;
    }
    let calls: Value = message.tool_calls.iter().map(value_of).collect();
    let field = |key: Value| {
        let field =
            if key.as_str() == Some("tool_calls") { calls.clone() } else { value.get_item(&key).unwrap_or_default() };
        (key, field)
    };
    value.try_iter().map(|keys| keys.map(field).collect()).unwrap_or_default()
}

/// The cause of an error that the template raised itself.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn failed(error: Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(source) = cause {
        if let Some(Raised(message)) = source.downcast_ref() {
            return TemplateError::Rejected(message.clone());
        }
        cause = source.source();
    }
    TemplateError::Failed(error.to_string())
}

/// Formats values like Python's `str`.
fn write_as_python(out: &mut Output, _: &State, value: &Value) -> Result<(), Error> {
    out.write_str(&python::str_of(value)).map_err(Error::from)
}

fn strftime(format: &str, now: SystemTime) -> Result<String, Error> {
    let wrong = |e: jiff::Error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}"));
    let now = jiff::Timestamp::try_from(now).map_err(wrong)?.to_zoned(jiff::tz::TimeZone::system());
    jiff::fmt::strtime::format(format, &now).map_err(wrong)
}

/// Replaces `{% generation %}…{% endgeneration %}`, which mark the assistant's text for training, by `{% if true %}`
/// blocks.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let tag = &rest[start..start + len + 2];
        out.push_str(&rest[..start]);
        let name = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match name {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[start + len + 2..];
    }
    out + rest
}

/// A buffer that refuses to grow past [`MAX_OUTPUT_BYTES`].
struct Capped(Vec<u8>);

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT_BYTES {
            return Err(io::Error::other("the rendered prompt is too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
