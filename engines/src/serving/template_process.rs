//! Renders a model's chat template in a process of its own, whose memory and time are limited.
//!
//! A template comes with a model's file, and may take all memory with a few words (`baton_model::template::apart` says how). There it
//! costs one process, which is started again for the next prompt, and the request that was rendered.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use baton_model::template::apart::RemoteTemplate;
use baton_model::template::{ChatTemplate, SpecialTokens, TemplateError, TemplatePiece};
use baton_process::{CalledChild, ChildCommand};
use baton_schemas::generate::Conversation;

/// The hidden command of the program that renders.
const COMMAND: &str = "render";

/// The longest silence of the process. It is silent while it renders; the longest known prompts take a second.
const DEADLINE: Duration = Duration::from_secs(10);

/// Processes that are kept for the next prompts. More start while more prompts are rendered at once.
const MAX_IDLE: usize = 2;

/// A chat template, and where it is rendered.
pub(crate) enum Renderer {
    /// In this process: for templates of this program's own, and for programs that have no command that renders, as tests.
    Here(Box<ChatTemplate>),
    /// In processes of its own.
    Apart(TemplateProcesses),
}

impl Renderer {
    /// Compiles a template, with a `program` in its process. Errors: it does not compile, or there is no process.
    pub(crate) fn open(
        program: Option<&Path>,
        source: &str,
        special: SpecialTokens,
    ) -> Result<Renderer, TemplateError> {
        let Some(program) = program else { return Renderer::here(source, special) };
        let processes =
            TemplateProcesses { program: program.into(), source: source.into(), special, idle: Mutex::default() };
        let first = processes.start()?;
        processes.keep(first);
        Ok(Renderer::Apart(processes))
    }

    /// Compiles a template for this process. Errors: it does not compile.
    pub(crate) fn here(source: &str, special: SpecialTokens) -> Result<Renderer, TemplateError> {
        ChatTemplate::compile(source, special).map(|template| Renderer::Here(Box::new(template)))
    }

    /// As [`ChatTemplate::render_pieces`]. Blocking.
    pub(crate) fn render_pieces(
        &self,
        conversation: &Conversation,
        max_bytes: usize,
    ) -> Result<Vec<TemplatePiece>, TemplateError> {
        let now = SystemTime::now();
        match self {
            Renderer::Here(template) => template.render_pieces(conversation, now, max_bytes),
            Renderer::Apart(processes) => processes.render_pieces(conversation, now, max_bytes),
        }
    }
}

/// The processes of one template.
pub(crate) struct TemplateProcesses {
    program: PathBuf,
    source: String,
    special: SpecialTokens,
    idle: Mutex<Vec<TemplateProcess>>,
}

struct TemplateProcess {
    template: RemoteTemplate<UnixStream>,
    child: CalledChild,
}

impl TemplateProcesses {
    fn start(&self) -> Result<TemplateProcess, TemplateError> {
        let command = ChildCommand::new("the template's process", &self.program).args([COMMAND]);
        // Its last words say what it lacked. A trace would say where, and take a second of a processor.
        let mut command = command.envs([("RUST_BACKTRACE", "0")]);
        let (stream, child) = command.spawn_called().map_err(|error| failed(&error))?;
        let opened = stream.set_read_timeout(Some(DEADLINE)).and_then(|()| stream.set_write_timeout(Some(DEADLINE)));
        let opened = opened.and_then(|()| RemoteTemplate::open(stream, &self.source, &self.special));
        match opened {
            Ok(template) => Ok(TemplateProcess { template: template?, child }),
            Err(error) => Err(ended(child, &error)),
        }
    }

    fn keep(&self, process: TemplateProcess) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(process);
        }
    }

    fn render_pieces(
        &self,
        conversation: &Conversation,
        now: SystemTime,
        max_bytes: usize,
    ) -> Result<Vec<TemplatePiece>, TemplateError> {
        let kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        // One that has ended meanwhile, by whatever cause, costs no request.
        let kept = kept.and_then(|mut process| (!process.child.has_ended()).then_some(process));
        let mut process = kept.map_or_else(|| self.start(), Ok)?;
        let mut rendered = process.template.render_pieces(conversation, now, max_bytes);
        // The prompt is not at fault if the system, or somebody, killed the process.
        if rendered.is_err() && process.child.was_killed() {
            process = self.start()?;
            rendered = process.template.render_pieces(conversation, now, max_bytes);
        }
        match rendered {
            Ok(rendered) => {
                self.keep(process);
                rendered
            }
            Err(error) => Err(ended(process.child, &error)),
        }
    }
}

/// Ends a process that did not answer. Its last words are for the log.
fn ended(child: CalledChild, error: &io::Error) -> TemplateError {
    let end = child.end();
    tracing::warn!(%error, end, "a chat template did not render this prompt, and its process is started again for the next one");
    TemplateError::Failed("the chat template takes too much memory or time for this prompt".into())
}

fn failed(error: &io::Error) -> TemplateError {
    TemplateError::Failed(format!("the process that renders the chat template cannot be started: {error}"))
}
