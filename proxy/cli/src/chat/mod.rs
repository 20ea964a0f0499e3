//! `baton chat`: a chat in the terminal, with a running endpoint or with one of its own.
//!
//! `interactive` is the chat of a person; `one_shot` answers what is piped in. `stream` reads a reply. What it hands on was
//! cleaned (`clean`), so that no control character of a model's text reaches the terminal.

mod clean;
mod command;
mod connect;
mod conversation;
mod interactive;
mod line_editor;
mod markdown;
mod one_shot;
mod screen;
mod stream;
mod style;

use std::io::IsTerminal;

use baton_proxy::config::API_KEY_VARIABLE;
use baton_proxy::serve::CommandFailure;
use clap::Args;

/// The variable with the endpoint's address.
const URL_VARIABLE: &str = "BATON_URL";

/// Options of `baton chat`.
#[derive(Args)]
pub(super) struct ChatArgs {
    /// The model: one that the endpoint serves, or for an endpoint of its own what `baton serve --model` takes
    /// [default: the endpoint's first, or smollm2]
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    /// Address of a running endpoint [default: 127.0.0.1:8080 if one answers there, or an endpoint of its own]
    #[arg(long, value_name = "HOST:PORT|URL", env = URL_VARIABLE)]
    url: Option<String>,
    /// Start an endpoint of its own, also if one answers
    #[arg(long, conflicts_with = "url")]
    own: bool,
    /// The endpoint's key, if it needs one
    #[arg(long = "api-key", value_name = "KEY", env = API_KEY_VARIABLE, hide_env_values = true)]
    api_key: Option<String>,
    /// The system message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Keep no history of typed lines
    #[arg(long)]
    no_history: bool,
}

/// Chats until the person ends it, or answers standard input if it is no terminal.
pub(super) async fn run(args: ChatArgs) -> Result<(), CommandFailure> {
    let is_person = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    match is_person {
        true => interactive::run(args).await,
        false => one_shot::run(args).await,
    }
}
