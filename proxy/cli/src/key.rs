//! `baton key`: makes and replaces API keys, and lists those of a running endpoint.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_proxy::config::{ConfigFile, hash_text};
use baton_proxy::http::baton::usage::{KeyList, KeyState, SecretState};
use baton_proxy::http::key_hash;
use baton_proxy::serve::CommandFailure;
use baton_proxy::utc_day::UtcDay;
use clap::{Args, Subcommand};

use super::columns::{seconds_ago, table};
use super::endpoint::EndpointArgs;
use super::terminal;

/// Days for which the old key is accepted after `baton key rotate`.
const OVERLAP_DAYS: u16 = 14;

const DEADLINE: Duration = Duration::from_secs(15);

/// Some thousand keys.
const MAX_LIST_BYTES: usize = 16 << 20;

/// Options of `baton key`.
#[derive(Args)]
pub(super) struct KeyArgs {
    #[command(subcommand)]
    command: KeyCommand,
}

#[derive(Subcommand)]
enum KeyCommand {
    /// Create a key and print it once, with lines for the configuration that hold only its hash.
    New {
        /// Whose key it is
        #[arg(long, default_value = "somebody", value_parser = name)]
        name: String,
        /// The last day on which it is accepted (UTC), such as 2026-12-31
        #[arg(long, value_name = "DAY", value_parser = day)]
        expires: Option<UtcDay>,
    },
    /// Create a new secret for a key of a configuration. The old one is accepted beside it for some days.
    Rotate {
        /// The key's name in the configuration
        name: String,
        /// The configuration, which is only read
        #[arg(long, short, value_name = "FILE")]
        config: PathBuf,
        /// How long the old secret is accepted, days from today
        #[arg(long, value_name = "N", default_value_t = OVERLAP_DAYS, value_parser = clap::value_parser!(u16).range(0..=366))]
        days: u16,
    },
    /// List the keys of a running endpoint: their limits, use and last use, never their secrets.
    List {
        #[command(flatten)]
        endpoint: EndpointArgs,
        /// Print the keys as JSON
        #[arg(long)]
        json: bool,
    },
}

/// Accepts a name that needs no escapes in a TOML string.
fn name(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || " ._@-".contains(c);
    let is_fine = !text.trim().is_empty() && text.chars().all(is_plain);
    is_fine.then(|| text.to_owned()).ok_or_else(|| "must be letters, digits, spaces and . _ @ -".into())
}

fn day(text: &str) -> Result<UtcDay, String> {
    text.parse().map_err(|_| "must be a day such as 2026-12-31".into())
}

/// Makes, replaces or lists keys. Errors: the configuration has no such key, or the endpoint refuses.
pub(super) async fn run(args: KeyArgs) -> Result<(), CommandFailure> {
    match args.command {
        KeyCommand::New { name, expires } => {
            let (key, hash) = new_key();
            let expires = expires.map(|day| format!("\nexpires = {day}")).unwrap_or_default();
            let lines = format!("[[keys]]\nname = \"{name}\"\nhash = \"{hash}\"{expires}");
            print_new(&key, &lines, "the rest goes into the configuration file")
        }
        KeyCommand::Rotate { name, config, days } => {
            let file = ConfigFile::read(&config)?;
            let Some(known) = file.raw.keys.iter().find(|key| key.name == name) else {
                let config = config.display();
                return Err(CommandFailure(format!("{config} has no key with the name {name:?} in [[keys]]")));
            };
            let (key, hash) = new_key();
            let until = UtcDay::today().days_after(days.into());
            let lines = format!("hash = \"{hash}\"\nprevious_hash = \"{}\"\nprevious_expires = {until}", known.hash);
            print_new(&key, &lines, &format!("the rest replaces the line with the hash of {name} in the file"))
        }
        KeyCommand::List { endpoint, json } => {
            let ask = |client: &reqwest::Client, base: &str| client.get(format!("{base}/baton/keys"));
            let list: KeyList = endpoint.json(DEADLINE, MAX_LIST_BYTES, ask).await?;
            let text = if json { serde_json::to_string(&list)? + "\n" } else { render(&list) };
            terminal::print(text)?;
            Ok(())
        }
    }
}

/// A key, and its hash for the configuration.
fn new_key() -> (String, String) {
    // 256 random bits cannot be guessed, so a fast hash is enough.
    let secret: [u8; 32] = rand::random();
    let key = format!("baton-{}", blake3::Hash::from_bytes(secret).to_hex());
    let hash = hash_text(&key_hash(key.as_bytes()));
    (key, hash)
}

fn print_new(key: &str, lines: &str, what_to_do: &str) -> Result<(), CommandFailure> {
    terminal::print_line(format_args!("{key}\n\n{lines}"))?;
    terminal::note(format_args!("\nThe first line is the key. It is shown this once; {what_to_do}."));
    Ok(())
}

fn render(KeyList { keys }: &KeyList) -> String {
    if keys.is_empty() {
        return "The endpoint needs no key.\n".to_owned();
    }
    let head = ["NAME", "SECRET", "EXPIRES", "LAST USED", "LIMITS", "TODAY", "THIS MONTH"];
    let rows = keys.iter().flat_map(|key| key.secrets.iter().enumerate().map(move |(i, secret)| row(key, i, secret)));
    table(&head, rows)
}

/// The line of a key's secret. The first one has what they share.
fn row(key: &KeyState, i: usize, secret: &SecretState) -> Vec<String> {
    let shared = |text: String| if i == 0 { text } else { String::new() };
    let of_budget = |used: u64, budget: Option<u64>| match budget {
        Some(budget) => format!("{used} of {budget}"),
        None => used.to_string(),
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    vec![
        shared(key.name.clone()),
        secret.id.clone(),
        expires(secret),
        secret.last_used_ms.map_or_else(|| "never".into(), |at_ms| seconds_ago(now.saturating_sub(at_ms / 1_000))),
        shared(limits(key)),
        shared(of_budget(key.tokens_today, key.tokens_per_day)),
        shared(of_budget(key.tokens_this_month, key.tokens_per_month)),
    ]
}

/// The last day of a secret, in words.
fn expires(secret: &SecretState) -> String {
    let Some(day) = &secret.expires else { return "never".to_owned() };
    let is_over = day.parse().is_ok_and(|day: UtcDay| day < UtcDay::today());
    if is_over { format!("{day} (over)") } else { day.clone() }
}

/// Describes a key's permissions.
fn limits(key: &KeyState) -> String {
    let mut words = Vec::new();
    if key.operator {
        words.push("operator".to_owned());
    }
    let per_minute = [("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)];
    words.extend(per_minute.into_iter().filter_map(|(unit, n)| Some(format!("{} {unit}/min", n?))));
    words.extend(key.max_concurrent.map(|n| format!("{n} at once")));
    if !key.models.is_empty() {
        words.push(format!("only {}", key.models.join(", ")));
    }
    if words.is_empty() { "none".to_owned() } else { words.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_listed_with_their_limits_and_each_secret() {
        let secret = |id: &str, expires: Option<&str>| SecretState {
            id: id.into(),
            expires: expires.map(str::to_owned),
            last_used_ms: None,
        };
        let key = KeyState {
            name: "anna".into(),
            operator: true,
            models: vec!["m".into()],
            requests_per_minute: Some(60),
            max_concurrent: Some(4),
            tokens_per_day: Some(1_000),
            tokens_today: 25,
            tokens_this_month: 30,
            secrets: vec![
                secret("0a1b2c3d", None),
                secret("ffffffff", Some("9999-12-31")),
                secret("00000000", Some("2020-02-29")),
            ],
            ..KeyState::default()
        };
        let text = render(&KeyList { keys: vec![key] });
        let expected = "\x20 NAME  SECRET    EXPIRES            LAST USED  LIMITS                                        TODAY       THIS MONTH\n\
                        \x20 anna  0a1b2c3d  never              never      operator; 60 requests/min; 4 at once; only m  25 of 1000  30\n\
                        \x20       ffffffff  9999-12-31         never\n\
                        \x20       00000000  2020-02-29 (over)  never\n";
        assert_eq!(text, expected);
        assert_eq!(render(&KeyList::default()), "The endpoint needs no key.\n");
    }
}
