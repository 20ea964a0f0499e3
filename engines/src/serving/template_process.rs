//! Renders a model's chat template in a process of its own, whose memory and processor time are limited.
//!
//! A template comes with a model's file, and may take all memory with a few words (`baton_model::template::apart` says how). There it
//! costs one process, which is started again for the next prompt, and the request that was rendered. A process that reaches no limit
//! of its own, but is killed, stopped or starved, costs no request: another one renders the prompt.

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

/// The longest silence of the process. It is silent while it renders, and ends itself when it has used up its processor time, a
/// tenth of this: one that is still silent does not run.
const DEADLINE: Duration = Duration::from_secs(30);

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
        let processes = TemplateProcesses {
            program: program.into(),
            source: source.into(),
            special,
            deadline: DEADLINE,
            idle: Mutex::default(),
        };
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
    deadline: Duration,
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
        let (stream, child) = command.spawn_called().map_err(|error| not_started(&error))?;
        let opened = stream.set_read_timeout(Some(self.deadline));
        let opened = opened.and_then(|()| stream.set_write_timeout(Some(self.deadline)));
        let opened = opened.and_then(|()| RemoteTemplate::open(stream, &self.source, &self.special));
        match opened {
            Ok(template) => Ok(TemplateProcess { template: template?, child }),
            Err(error) => Err(lost(child, &error)),
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
        // The prompt is not at fault if the process was killed, or does not run.
        if let Err(error) = &rendered
            && !process.child.has_failed()
        {
            lost(process.child, error);
            process = self.start()?;
            rendered = process.template.render_pieces(conversation, now, max_bytes);
        }
        match rendered {
            Ok(rendered) => {
                self.keep(process);
                rendered
            }
            Err(error) => Err(lost(process.child, &error)),
        }
    }
}

/// Ends a process that did not answer, and says who is at fault: the prompt, if the process reached a limit. Its last words are for
/// the log.
fn lost(mut child: CalledChild, error: &io::Error) -> TemplateError {
    let has_failed = child.has_failed();
    let end = child.end();
    tracing::warn!(%error, end, has_failed, "a chat template did not render this prompt, and its process is started again for the next one");
    match has_failed {
        true => TemplateError::Failed("the chat template takes too much memory or time for this prompt".into()),
        false => TemplateError::Unavailable("the process that renders the chat template does not answer".into()),
    }
}

fn not_started(error: &io::Error) -> TemplateError {
    tracing::warn!(%error, "the process that renders the chat template cannot be started");
    TemplateError::Unavailable("the process that renders the chat template cannot be started".into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// The outcome of rendering, where each process that is started behaves as the next of these lines of a shell says, and how
    /// many were started. Answers are five bytes of zero: no pieces.
    fn rendered(processes: &[&str]) -> (Result<Vec<TemplatePiece>, TemplateError>, usize) {
        let folder = tempfile::tempdir().unwrap();
        let (program, started) = (folder.path().join("program"), folder.path().join("started"));
        let cases: String = processes.iter().zip(1..).map(|(line, n)| format!("{n}) {line};;\n")).collect();
        let script = format!(
            "#!/bin/sh\necho >> {0}\nanswer() {{ printf '\\0\\0\\0\\0\\0' >&0; }}\nanswer\ncase $(wc -l < {0} | tr -d ' ') in\n{cases}esac\ncat > {0}.rest\n",
            started.display()
        );
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let processes = TemplateProcesses {
            program,
            source: String::new(),
            special: SpecialTokens::default(),
            deadline: Duration::from_millis(500),
            idle: Mutex::default(),
        };
        let outcome = processes.render_pieces(&Conversation::default(), SystemTime::now(), 1_000);
        (outcome, std::fs::read_to_string(started).unwrap().lines().count())
    }

    #[test]
    fn a_process_that_is_stopped_or_killed_from_outside_costs_no_request() {
        for end in ["kill -STOP $$", "kill -KILL $$"] {
            assert_eq!(rendered(&[end, "answer"]), (Ok(Vec::new()), 2), "{end}");
            let (outcome, n_started) = rendered(&[end, end, "answer"]);
            assert!(matches!(outcome, Err(TemplateError::Unavailable(_))), "{end}: {outcome:?}");
            assert_eq!(n_started, 2, "{end}");
        }
    }

    #[test]
    fn a_process_that_reaches_a_limit_shows_that_the_prompt_takes_too_much() {
        // Its processor time, its memory.
        for end in ["kill -XCPU $$", "kill -ABRT $$"] {
            let (outcome, n_started) = rendered(&[end, "answer"]);
            assert!(matches!(outcome, Err(TemplateError::Failed(_))), "{end}: {outcome:?}");
            assert_eq!(n_started, 1, "{end}");
        }
    }

    #[test]
    fn a_process_that_cannot_be_started_is_not_the_prompts_fault() {
        let processes = TemplateProcesses {
            program: "/nowhere/baton".into(),
            source: String::new(),
            special: SpecialTokens::default(),
            deadline: DEADLINE,
            idle: Mutex::default(),
        };
        let outcome = processes.render_pieces(&Conversation::default(), SystemTime::now(), 1_000);
        assert!(matches!(outcome, Err(TemplateError::Unavailable(_))), "{outcome:?}");
    }
}
