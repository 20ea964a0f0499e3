//! Options of `baton-bench serve`.

use std::path::PathBuf;
use std::time::Duration;

use baton_link::transport::Transport;
use baton_proxy::config::API_KEY_VARIABLE;
use baton_proxy::serve::{CommandFailure, endpoint_url};
use clap::Args;
use serde_json::{Map, Value};

use super::settings::{AskedForm, CalledApi, InputWords, LoadSettings, Pace, ReplyChecks, RoundLength, ServerSettings};
use crate::report::{ChartFolder, ReportFiles};

/// Requests at once without `--concurrency`: of a closed loop, and at most of an open one.
const DEFAULT_CONCURRENCY: u32 = 8;
const MAX_OPEN_CONCURRENCY: u32 = 4_096;

/// The longest prompt.
const MAX_INPUT_WORDS: u32 = 200_000;

/// The longest key file.
const MAX_KEY_FILE_BYTES: u64 = 64 << 10;

/// Options of `baton-bench serve`.
#[derive(Args)]
pub(crate) struct ServeBenchArgs {
    /// A server's address, with its name in the table; given several times, the servers are compared with the first
    #[arg(long = "url", value_name = "[NAME=]URL", required = true, value_parser = named_url)]
    urls: Vec<NamedUrl>,
    /// The model [default: the first one that each server lists]
    #[arg(long)]
    model: Option<String>,
    /// The API
    #[arg(long, value_enum, default_value = "chat")]
    api: CalledApi,
    /// The form of replies
    #[arg(long, value_enum, default_value = "stream")]
    reply: AskedForm,
    /// Closed loop: so many requests at once (default: 8). With --request-rate: at most so many (default: 4,096)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    concurrency: Option<u32>,
    /// Open loop: requests a second that arrive at random (Poisson), however fast replies are
    #[arg(long, value_name = "RATE", value_parser = rate, allow_negative_numbers = true)]
    request_rate: Option<f64>,
    /// Seconds of each round that are measured
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = some_seconds)]
    duration: Duration,
    /// Measure so many requests in each round instead of a duration
    #[arg(long, value_name = "N", conflicts_with = "duration", value_parser = clap::value_parser!(u64).range(1..))]
    requests: Option<u64>,
    /// Seconds of load before each measurement
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    warm_up: Duration,
    /// Rounds; in each, all servers are measured one after another, and figures are medians of rounds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rounds: u32,
    /// Words of English in each prompt, or the least and the most (each doubling is as likely as another); a word is 1 to 1.5
    /// tokens, and the table shows the servers' own count
    #[arg(long, value_name = "N|N-M", default_value = "100", value_parser = input_words)]
    input_words: InputWords,
    /// Words of these that all prompts share as their start
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=200_000))]
    prefix_words: u32,
    /// Number of different prompts, which are repeated in turn [default: every request has its own]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prompts: Option<u32>,
    /// max_tokens of each request
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    output_tokens: u32,
    /// Send ignore_eos, so that every reply has --output-tokens tokens; the server must know the field
    #[arg(long)]
    ignore_eos: bool,
    /// Fields to add to each request's body
    #[arg(long, value_name = "JSON", value_parser = json_object)]
    extra_body: Option<JsonObject>,
    /// Seconds a reply may take
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = some_seconds)]
    timeout: Duration,
    /// Seed of the arrivals and of the choice of prompts
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The servers' key
    #[arg(long, value_name = "KEY", env = API_KEY_VARIABLE, hide_env_values = true)]
    api_key: Option<String>,
    /// A file that holds the key, of one server or of all; goes before --api-key
    #[arg(long, value_name = "[NAME=]FILE", value_parser = named_text)]
    api_key_file: Vec<NamedText>,
    /// A PEM file of authorities to trust in addition to the system's, for servers with TLS
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// Measure the processor time and memory of this process of a server, with its descendants; may be repeated
    #[arg(long = "pid", value_name = "[NAME=]PID", value_parser = named_text)]
    pids: Vec<NamedText>,
    /// Fail a stream if its usage is not its number of chunks, for servers that send each token by itself
    #[arg(long)]
    token_per_chunk: bool,
    /// Fail a reply that differs from the first one of the server to the same prompt (temperature 0)
    #[arg(long, requires = "prompts")]
    same_replies: bool,
    /// Replies are of `baton-bench mock` on this machine: check every token, and measure its way from the mock
    #[arg(long)]
    stamps: bool,
    #[command(flatten)]
    pub(super) files: ReportFiles,
    #[command(flatten)]
    pub(super) charts: ChartFolder,
}

#[derive(Debug, Clone)]
struct NamedUrl {
    name: String,
    base: String,
}

/// A value for the server of this name, or for all.
#[derive(Debug, Clone)]
struct NamedText {
    name: Option<String>,
    text: String,
}

#[derive(Debug, Clone)]
struct JsonObject(Map<String, Value>);

impl ServeBenchArgs {
    /// The settings of the load.
    pub(super) fn load(&self) -> LoadSettings {
        LoadSettings {
            api: self.api,
            reply: self.reply,
            pace: match (self.request_rate, self.concurrency) {
                (None, n) => Pace::Closed { concurrency: n.unwrap_or(DEFAULT_CONCURRENCY) },
                (Some(per_second), n) => Pace::Open { per_second, concurrency: n.unwrap_or(MAX_OPEN_CONCURRENCY) },
            },
            length: self.requests.map_or(RoundLength::Time(self.duration), RoundLength::Requests),
            warm_up: self.warm_up,
            rounds: self.rounds,
            input_words: self.input_words,
            prefix_words: self.prefix_words,
            prompts: self.prompts,
            output_tokens: self.output_tokens,
            ignore_eos: self.ignore_eos,
            extra_body: self.extra_body.clone().map(|object| object.0).unwrap_or_default(),
            timeout: self.timeout,
            seed: self.seed,
            checks: ReplyChecks {
                token_per_chunk: self.token_per_chunk,
                same_replies: self.same_replies,
                stamps: self.stamps,
            },
        }
    }

    /// The servers. Errors: names that are not unique or unknown, a process id that is none, an unreadable file.
    pub(super) fn servers(&self) -> Result<Vec<ServerSettings>, CommandFailure> {
        for (i, url) in self.urls.iter().enumerate() {
            if self.urls[..i].iter().any(|earlier| earlier.name == url.name) {
                return Err(CommandFailure(format!("--url: {} is given twice; name the servers NAME=URL", url.name)));
            }
        }
        let known = |name: &String| self.urls.iter().any(|url| url.name == *name);
        let given = self.pids.iter().chain(&self.api_key_file).filter_map(|given| given.name.as_ref());
        if let Some(unknown) = given.into_iter().find(|name| !known(name)) {
            return Err(CommandFailure(format!("there is no --url {unknown}=…")));
        }
        if self.prefix_words > self.input_words.least {
            return Err(CommandFailure("--prefix-words: a prompt has only --input-words words".into()));
        }
        if self.urls.len() > 1 && self.pids.iter().any(|pid| pid.name.is_none()) {
            return Err(CommandFailure("--pid needs a name if there are several servers: NAME=PID".into()));
        }
        // Whoever names a server without TLS wants to measure it so.
        let transport = Transport::new(self.tls_ca.as_deref(), true)?;
        self.urls.iter().map(|url| self.server(url, &transport)).collect()
    }

    fn server(&self, url: &NamedUrl, transport: &Transport) -> Result<ServerSettings, CommandFailure> {
        let is_ours = |given: &&NamedText| given.name.as_ref().is_none_or(|name| *name == url.name);
        let pid = |given: &NamedText| {
            let wrong = || CommandFailure(format!("--pid: {:?} is no process id", given.text));
            given.text.parse().ok().filter(|pid| *pid > 0).ok_or_else(wrong)
        };
        let key = match self.api_key_file.iter().filter(is_ours).max_by_key(|given| given.name.is_some()) {
            None => self.api_key.clone(),
            Some(file) => {
                let unreadable = |error| CommandFailure(format!("--api-key-file: cannot read {}: {error}", file.text));
                let key = baton_proxy::config::read_text(file.text.as_ref(), MAX_KEY_FILE_BYTES).map_err(unreadable)?;
                let key = key.trim();
                if key.is_empty() {
                    return Err(CommandFailure(format!("--api-key-file: {} holds no key", file.text)));
                }
                Some(key.to_owned())
            }
        };
        Ok(ServerSettings {
            name: url.name.clone(),
            base: url.base.clone(),
            key,
            model: self.model.clone(),
            pids: self.pids.iter().filter(is_ours).map(pid).collect::<Result<_, _>>()?,
            transport: transport.clone(),
        })
    }
}

/// Splits `NAME=VALUE`. A URL or a path before the `=` is no name.
fn named_text(text: &str) -> Result<NamedText, String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !name.contains(['/', ':']) => {
            Ok(NamedText { name: Some(name.to_owned()), text: value.to_owned() })
        }
        _ => Ok(NamedText { name: None, text: text.to_owned() }),
    }
}

fn named_url(text: &str) -> Result<NamedUrl, String> {
    let NamedText { name, text } = named_text(text)?;
    let base = endpoint_url(&text).map_err(|failure| failure.0)?;
    let name = name.unwrap_or_else(|| base.split_once("://").map_or(base.as_str(), |(_, host)| host).to_owned());
    Ok(NamedUrl { name, base })
}

fn seconds(text: &str) -> Result<Duration, String> {
    let parsed = text.parse().ok().filter(|seconds| (0.0..=86_400.0).contains(seconds));
    parsed.map(Duration::from_secs_f64).ok_or_else(|| "must be seconds, up to 86400".into())
}

fn some_seconds(text: &str) -> Result<Duration, String> {
    seconds(text).ok().filter(|time| !time.is_zero()).ok_or_else(|| "must be seconds, above 0 and up to 86400".into())
}

fn input_words(text: &str) -> Result<InputWords, String> {
    let (least, most) = text.split_once('-').unwrap_or((text, text));
    let is_possible =
        |words: &InputWords| (1..=MAX_INPUT_WORDS).contains(&words.least) && words.most <= MAX_INPUT_WORDS;
    let parsed = least.parse().ok().zip(most.parse().ok()).map(|(least, most)| InputWords { least, most });
    let parsed = parsed.filter(|words| is_possible(words) && words.least <= words.most);
    parsed.ok_or_else(|| format!("must be words, 1 to {MAX_INPUT_WORDS}, or the least and the most, such as 50-2000"))
}

fn rate(text: &str) -> Result<f64, String> {
    let parsed = text.parse().ok().filter(|rate| (1e-3..=1e6).contains(rate));
    parsed.ok_or_else(|| "must be requests a second, 0.001 to 1000000".into())
}

fn json_object(text: &str) -> Result<JsonObject, String> {
    serde_json::from_str(text).map(JsonObject).map_err(|error| format!("must be a JSON object: {error}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct BenchCommand {
        #[command(flatten)]
        args: ServeBenchArgs,
    }

    fn servers(args: &[&str]) -> Result<Vec<ServerSettings>, String> {
        let command = BenchCommand::try_parse_from([&["x"], args].concat()).map_err(|error| error.to_string())?;
        command.args.servers().map_err(|failure| failure.0)
    }

    #[test]
    fn servers_have_names_keys_and_processes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        std::fs::write(&file, "sk-b\n").unwrap();
        let file = format!("b={}", file.display());
        let args = ["--url", "a=http://127.0.0.1:1/v1", "--url", "b=localhost:2", "--api-key", "sk-a"];
        let more = ["--api-key-file", &file, "--pid", "b=17", "--pid", "b=18"];
        let servers = servers(&[&args[..], &more].concat()).unwrap();
        assert_eq!((servers[0].name.as_str(), servers[0].base.as_str()), ("a", "http://127.0.0.1:1"));
        assert_eq!((servers[1].name.as_str(), servers[1].base.as_str()), ("b", "http://localhost:2"));
        assert_eq!((servers[0].key.as_deref(), servers[1].key.as_deref()), (Some("sk-a"), Some("sk-b")));
        assert_eq!((servers[0].pids.len(), &servers[1].pids[..]), (0, &[17, 18][..]));
    }

    #[test]
    fn mistakes_are_named() {
        let check = |args: &[&str], expected: &str| {
            let error = servers(args).unwrap_err();
            assert!(error.contains(expected), "{error}");
        };
        let a = ["--url", "a=http://h:1"];
        check(&[&a[..], &["--url", "a=http://h:2"]].concat(), "a is given twice");
        check(&[&a[..], &["--pid", "c=1"]].concat(), "no --url c=");
        check(&[&a[..], &["--url", "http://h:2", "--pid", "1"]].concat(), "NAME=PID");
        check(&[&a[..], &["--pid", "x"]].concat(), "no process id");
        check(&["--url", "http://user@h:1"], "an endpoint is HOST:PORT");
        for words in ["0", "9-3", "3-", "200001", "5-200001", "x"] {
            check(&[&a[..], &["--input-words", words]].concat(), "must be words");
        }
        check(&[&a[..], &["--input-words", "10-90", "--prefix-words", "11"]].concat(), "--prefix-words");
        check(&[&a[..], &["--request-rate", "-1"]].concat(), "0.001 to");
        check(&[&a[..], &["--extra-body", "[]"]].concat(), "must be a JSON object");
        check(&[&a[..], &["--same-replies"]].concat(), "--prompts");
        check(&[&a[..], &["--tls-ca", "/nowhere.pem"]].concat(), "cannot read /nowhere.pem");
    }
}
