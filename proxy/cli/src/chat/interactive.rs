//! A person's chat: a prompt, a reply that Ctrl-C stops, and so on, until Ctrl-C or Ctrl-D at the prompt.

use baton_proxy::serve::CommandFailure;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::ChatArgs;
use super::clean::clean;
use super::command::{HELP, Typed};
use super::connect::Connection;
use super::conversation::ChatHistory;
use super::line_editor::{Line, LineEditor};
use super::screen::Screen;
use super::stream::{ChatReply, ReplyPiece};

const PROMPT: &str = "> ";

/// Chats until the person ends it.
pub(super) async fn run(args: ChatArgs) -> Result<(), CommandFailure> {
    // First, because the editor's handler of Ctrl-C replaces the one before it, and ours calls the editor's.
    let (editor, problem) = LineEditor::open(!args.no_history)?;
    // From here on Ctrl-C ends no process by itself. At the prompt it is a key.
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut connection = tokio::select! {
        opened = Connection::open(&args) => opened?,
        _ = interrupts.recv() => return Err(CommandFailure("stopped".into())),
    };
    let mut screen = Screen::new();
    if let Some(problem) = problem {
        screen.remark(&problem)?;
    }
    let chat = Chat { connection: &mut connection, conversation: ChatHistory::new(args.system), screen, editor };
    let chatted = chat.run(&mut interrupts).await;
    connection.close().await;
    chatted
}

/// A chat that goes on.
struct Chat<'a> {
    connection: &'a mut Connection,
    conversation: ChatHistory,
    screen: Screen,
    editor: LineEditor,
}

impl Chat<'_> {
    async fn run(self, interrupts: &mut Signal) -> Result<(), CommandFailure> {
        let Chat { connection, mut conversation, mut screen, mut editor } = self;
        screen.remark(&format!("{} at {}. /help lists the commands.", clean(&connection.model), connection.base))?;
        loop {
            let read = tokio::task::spawn_blocking(move || {
                let line = editor.read(PROMPT);
                (editor, line)
            });
            let (returned, line) = read.await?;
            editor = returned;
            let Line::Text(line) = line? else { return Ok(()) };
            match Typed::parse(&line) {
                Typed::Empty => {}
                Typed::Quit => return Ok(()),
                Typed::Help => screen.remark(HELP)?,
                Typed::Clear => {
                    conversation.clear();
                    screen.remark("The conversation is forgotten.")?;
                }
                Typed::System(text) => {
                    let is_set = text.is_some();
                    screen.remark(if is_set { "The system message is set." } else { "There is no system message." })?;
                    conversation.system = text;
                }
                Typed::Model(wanted) => choose_model(connection, &mut screen, wanted).await?,
                Typed::Unknown(name) => {
                    screen.problem(&format!("There is no command /{}. /help lists them.", clean(&name)))?;
                }
                Typed::Message(message) => {
                    let asked = Asked { connection, conversation: &conversation, message: &message };
                    let text = answer(asked, &mut screen, interrupts).await?;
                    conversation.keep(message, text);
                }
            }
        }
    }
}

/// A message that is to be answered.
struct Asked<'a> {
    connection: &'a mut Connection,
    conversation: &'a ChatHistory,
    message: &'a str,
}

/// Shows the reply to a message. Returns its text as far as it came. Errors: the screen cannot be written.
async fn answer(asked: Asked<'_>, screen: &mut Screen, interrupts: &mut Signal) -> Result<String, CommandFailure> {
    let mut text = String::new();
    let mut route = None;
    // A Ctrl-C that came after the last reply is not for this one.
    tokio::select! {
        biased;
        _ = interrupts.recv() => {}
        () = std::future::ready(()) => {}
    }
    let shown = tokio::select! {
        shown = show(asked, screen, &mut text, &mut route) => Some(shown),
        // Dropping the reply closes its connection, which cancels it.
        _ = interrupts.recv() => None,
    };
    screen.end_reply()?;
    match shown {
        None => screen.remark("Stopped.")?,
        Some(Err(CommandFailure(problem))) => screen.problem(&problem)?,
        Some(Ok(())) => {}
    }
    if let Some(route) = route {
        screen.remark(&route)?;
    }
    Ok(text)
}

async fn show(
    asked: Asked<'_>,
    screen: &mut Screen,
    text: &mut String,
    route: &mut Option<String>,
) -> Result<(), CommandFailure> {
    let Asked { connection, conversation, message } = asked;
    connection.revive().await?;
    let mut reply = ChatReply::ask(connection, &conversation.request(&connection.model, message)).await?;
    *route = reply.route.take();
    while let Some(piece) = reply.next().await? {
        if let Some(late) = reply.route.take() {
            *route = Some(late);
        }
        match piece {
            ReplyPiece::Text(more) => {
                screen.text(&more)?;
                *text += &more;
            }
            ReplyPiece::Reasoning(more) => screen.reasoning(&more)?,
            ReplyPiece::Call { name, arguments } => {
                screen.end_reply()?;
                screen.remark(&format!("tool call: {name}({arguments})"))?;
            }
        }
    }
    Ok(())
}

/// Lists the models, or answers with another one from now on.
async fn choose_model(
    connection: &mut Connection,
    screen: &mut Screen,
    wanted: Option<String>,
) -> Result<(), CommandFailure> {
    let models = match connection.models().await {
        Ok(models) => models,
        Err(CommandFailure(problem)) => return Ok(screen.problem(&clean(&problem))?),
    };
    if let Some(wanted) = wanted {
        let is_listed = models.contains(&wanted);
        let remark =
            if is_listed { "answers from now on." } else { "is not listed; the endpoint may know it by another name." };
        screen.remark(&format!("{} {remark}", clean(&wanted)))?;
        connection.model = wanted;
        return Ok(());
    }
    for model in models {
        let mark = if model == connection.model { '*' } else { ' ' };
        screen.remark(&format!("{mark} {}", clean(&model)))?;
    }
    Ok(())
}
