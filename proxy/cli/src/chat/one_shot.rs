//! Answers what is piped in, with the plain reply and nothing else on standard output.

use std::io::Read;

use baton_proxy::serve::CommandFailure;

use super::super::terminal;
use super::ChatArgs;
use super::connect::Connection;
use super::conversation::ChatHistory;
use super::stream::{ChatReply, ReplyPiece};

/// The longest input. Endpoints refuse longer bodies by default.
const MAX_INPUT_BYTES: u64 = 16 << 20;

/// Reads standard input to its end and prints the reply. Errors: there is no input, no endpoint, or no whole reply.
pub(super) async fn run(args: ChatArgs) -> Result<(), CommandFailure> {
    let message = tokio::task::spawn_blocking(input).await??;
    let connection = Connection::open(&args).await?;
    let conversation = ChatHistory::new(args.system);
    let printed = print_reply(&connection, &conversation, &message).await;
    connection.close().await;
    printed
}

async fn print_reply(to: &Connection, conversation: &ChatHistory, message: &str) -> Result<(), CommandFailure> {
    let mut reply = ChatReply::ask(to, &conversation.request(&to.model, message)).await?;
    let mut ends_line = true;
    let printed = loop {
        match reply.next().await {
            Ok(Some(ReplyPiece::Text(text))) => {
                ends_line = text.ends_with('\n');
                if !terminal::print(&text)? {
                    // The reader has enough.
                    return Ok(());
                }
            }
            Ok(Some(ReplyPiece::Call { name, arguments })) => {
                terminal::note(format_args!("tool call: {name}({arguments})"))
            }
            Ok(Some(ReplyPiece::Reasoning(_))) => {}
            Ok(None) => break Ok(()),
            Err(failure) => break Err(failure),
        }
    };
    if !ends_line {
        terminal::print("\n")?;
    }
    printed
}

fn input() -> Result<String, CommandFailure> {
    let mut text = String::new();
    std::io::stdin().lock().take(MAX_INPUT_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_INPUT_BYTES {
        return Err(CommandFailure(format!("the input is larger than {MAX_INPUT_BYTES} bytes")));
    }
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err(CommandFailure("there is nothing to answer: standard input is empty".into())),
        message => Ok(message.to_owned()),
    }
}
