//! `baton key new`: an API key, and what to write into the configuration for it.

use baton_proxy::config::hash_text;
use baton_proxy::http::key_hash;
use baton_proxy::serve::CommandFailure;
use clap::{Args, Subcommand};

use super::terminal;

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
    },
}

/// Accepts a name that needs no escapes in a TOML string.
fn name(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || " ._@-".contains(c);
    let is_fine = !text.trim().is_empty() && text.chars().all(is_plain);
    is_fine.then(|| text.to_owned()).ok_or_else(|| "must be letters, digits, spaces and . _ @ -".into())
}

pub(super) fn run(args: KeyArgs) -> Result<(), CommandFailure> {
    let KeyCommand::New { name } = args.command;
    // 256 random bits cannot be guessed, so a fast hash is enough.
    let secret: [u8; 32] = rand::random();
    let key = format!("baton-{}", blake3::Hash::from_bytes(secret).to_hex());
    let hash = hash_text(&key_hash(key.as_bytes()));
    terminal::print_line(format_args!("{key}\n\n[[keys]]\nname = \"{name}\"\nhash = \"{hash}\""))?;
    terminal::note("\nThe first line is the key. It is shown this once; the rest goes into the configuration file.");
    Ok(())
}
