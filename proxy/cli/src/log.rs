//! The log: its lines, its filter, and its start. [`baton_proxy::log_queue`] writes it.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal};
use std::panic::{self, PanicHookInfo};
use std::sync::OnceLock;
use std::thread;

use baton_engines::QUIET_LLAMA;
use baton_link::trace::TARGET;
use baton_proxy::log_queue::{DropNotice, LOG};
use baton_proxy::log_target::NOTICE;
use baton_proxy::observe::telemetry::Traces;
use baton_schemas::counted::counted;
use clap::ValueEnum;
use tracing::Level;
use tracing_subscriber::filter::{FilterExt, LevelFilter, filter_fn};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The format of this process's log, once it has started.
static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// The format of this process's log.
pub(super) fn format() -> LogFormat {
    FORMAT.get().copied().unwrap_or(LogFormat::Text)
}

impl LogFormat {
    /// The word for children.
    fn word(self) -> &'static str {
        match self {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        }
    }

    /// A line that no filter holds back. It is made without tracing, which may be what panics.
    pub(super) fn line(self, level: Level, message: &str) -> String {
        let mut time = String::new();
        // A string takes whatever is written.
        let _ = SystemTime.format_time(&mut Writer::new(&mut time));
        match self {
            LogFormat::Text => format!("{time} {level} {message}\n"),
            LogFormat::Json => {
                format!("{}\n", serde_json::json!({ "timestamp": time, "level": level.as_str(), "message": message }))
            }
        }
    }
}

fn dropped(n: u64) -> String {
    let lines = counted(n, "line");
    format!("the log dropped {lines} here, because its reader was too slow or did not read")
}

fn panic_message(panic: &PanicHookInfo<'_>) -> String {
    let message = format!("thread {:?} {panic}", thread::current().name().unwrap_or("without a name"));
    // RUST_BACKTRACE asks for it.
    let backtrace = Backtrace::capture();
    match backtrace.status() {
        BacktraceStatus::Captured => format!("{message}\n{backtrace}"),
        _ => message,
    }
}

/// The log filter without RUST_LOG.
fn default_filter() -> String {
    format!("{QUIET_LLAMA},warn,{NOTICE}=info")
}

/// The filter of RUST_LOG, and what is wrong with it.
fn log_filter(asked: Option<String>) -> (EnvFilter, Option<String>) {
    let Some(asked) = asked else { return (EnvFilter::new(default_filter()), None) };
    let misspelt = asked.split(',').map(str::trim).find(|part| {
        // A directive without a level enables everything of the module that it names.
        let is_word = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
        is_word && !part.starts_with("baton") && part.parse::<LevelFilter>().is_err()
    });
    let misspelt = misspelt.map(|word| {
        format!("RUST_LOG: {word:?} is no level (error, warn, info, debug, trace, off), so it is taken as a module")
    });
    let filter = if asked.contains("llama") { asked.clone() } else { format!("{QUIET_LLAMA},{asked}") };
    match EnvFilter::try_new(filter) {
        Ok(filter) => (filter, misspelt),
        Err(error) => {
            let problem = format!("RUST_LOG={asked:?} is ignored: {error}");
            (EnvFilter::new(default_filter()), Some(problem))
        }
    }
}

/// Starts the log, also for panics. Returns what is wrong with RUST_LOG.
pub(super) fn start(format: LogFormat, traces: Option<&Traces>) -> Option<String> {
    let _ = FORMAT.set(format);
    baton_process::log_children_as(format.word());
    let (filter, problem) = log_filter(std::env::var(EnvFilter::DEFAULT_ENV).ok());
    let log = log(filter, format);
    let notice: DropNotice = match format {
        LogFormat::Text => |n| LogFormat::Text.line(Level::ERROR, &dropped(n)),
        LogFormat::Json => |n| LogFormat::Json.line(Level::ERROR, &dropped(n)),
    };
    // Without the thread lines are written at once, as by any other program.
    let started = LOG.start(notice);
    panic::set_hook(Box::new(move |panic| LOG.push_last(format.line(Level::ERROR, &panic_message(panic)).as_bytes())));
    // Not as an `Option`: a layer that is `None` makes tracing build every span, and ask the filter again each time.
    match traces {
        Some(traces) => log.with(traces.layer()).init(),
        None => log.init(),
    }
    if let Err(error) = started {
        tracing::warn!(%error, "the log has no thread of its own: if nobody reads it, this process stops");
    }
    problem
}

/// The log on standard error.
fn log(filter: EnvFilter, format: LogFormat) -> impl SubscriberExt + for<'a> LookupSpan<'a> + Send + Sync {
    // Spans of traces go to the collector alone.
    let filter = filter.and(filter_fn(|metadata| metadata.target() != TARGET));
    // Reporting a line that cannot be written would fail as well, and panic.
    let log = fmt::layer().with_writer(&LOG).with_target(false).log_internal_errors(false);
    let log = match format {
        LogFormat::Text => log.with_ansi(io::stderr().is_terminal()).with_filter(filter).boxed(),
        LogFormat::Json => log.json().flatten_event(true).with_ansi(false).with_filter(filter).boxed(),
    };
    tracing_subscriber::registry().with(log)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_in_the_log_filter_is_named() {
        let problem = |asked: &str| log_filter(Some(asked.to_owned())).1.unwrap_or_default();
        for fine in ["info", "WARN", "debug,hyper=info", "baton_proxy", "off,baton_engines::llama=trace", ""] {
            assert_eq!(problem(fine), "", "{fine}");
        }
        assert!(problem("inof").contains("\"inof\" is no level"));
        assert!(problem("warn,debgu").contains("\"debgu\" is no level"));
        assert!(problem("hyper=inof").contains("is ignored"));
    }

    /// Runs itself in a process of its own, because a panic hook and a log are a whole process's.
    #[test]
    fn a_panic_is_a_line_of_the_log() {
        if std::env::var_os("BATON_TEST_PANICS").is_some() {
            start(LogFormat::Json, None);
            panic!("on purpose");
        }
        let mut own = std::process::Command::new(std::env::current_exe().unwrap());
        let test = "log::tests::a_panic_is_a_line_of_the_log";
        let output = own.args([test, "--exact", "--nocapture"]).env("BATON_TEST_PANICS", "1").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        let line: serde_json::Value = text.lines().find_map(|line| serde_json::from_str(line).ok()).expect(&text);
        let message = line["message"].as_str().unwrap();
        assert!(message.contains("panicked at ") && message.contains("on purpose"), "{message}");
    }

    #[test]
    fn without_a_collector_no_span_is_built() {
        let filter = EnvFilter::new(default_filter());
        tracing::subscriber::with_default(log(filter, LogFormat::Text), || {
            assert!(tracing::info_span!("request", id = "r").is_disabled());
            assert!(tracing::info_span!(target: TARGET, "request").is_disabled());
            assert!(!tracing::error_span!("failure").is_disabled(), "the log is there");
        });
    }

    #[test]
    fn lines_without_tracing_look_as_those_of_the_log() {
        let text = LogFormat::Text.line(Level::ERROR, &dropped(2));
        assert!(text.contains("Z ERROR the log dropped 2 lines here") && text.ends_with('\n'), "{text}");
        let json: serde_json::Value =
            serde_json::from_str(&LogFormat::Json.line(Level::ERROR, "a \"quoted\"\nmessage")).unwrap();
        assert_eq!((&json["level"], &json["message"]), (&"ERROR".into(), &"a \"quoted\"\nmessage".into()));
        assert!(json["timestamp"].as_str().unwrap().ends_with('Z'), "{json}");
    }
}
