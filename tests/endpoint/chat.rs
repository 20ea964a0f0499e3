//! `baton chat` in a terminal and in a pipe.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};

use harness::mock::{Mock, Step, done, event, head, says, text};
use harness::{BATON, BatonServer, Terminal, eventually_async, free_address};
use serde_json::json;

/// A chat with a scripted endpoint, and the folder of its history.
struct Chat {
    terminal: Terminal,
    mock: Mock,
    state: tempfile::TempDir,
}

impl Chat {
    /// Starts a chat whose messages are answered by the script, each with the number of earlier ones.
    async fn with(script: impl Fn(usize) -> Vec<Step> + Send + Sync + 'static, variables: &[(&str, &str)]) -> Chat {
        let mock = Mock::listing(&["m", "other"], move |n, _| script(n)).await;
        let state = tempfile::tempdir().unwrap();
        let folder = [("XDG_STATE_HOME", state.path().to_str().unwrap())];
        let terminal = Terminal::start(&["chat", "--url", &mock.url], &[&folder, variables].concat());
        terminal.shows("/help lists the commands.", 1);
        terminal.shows("> ", 1);
        Chat { terminal, mock, state }
    }

    /// The contents of the messages of a request.
    fn asked(&self, i: usize) -> Vec<String> {
        let messages = self.mock.asked(i).body["messages"].clone();
        messages.as_array().unwrap().iter().map(|m| m["content"].as_str().unwrap().to_owned()).collect()
    }
}

/// The head of a stream with a route.
fn routed() -> Step {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-baton-route: direct; decode=mac\r\n";
    Step::Send(format!("{head}connection: close\r\n\r\n"))
}

fn reasoning(text: &str) -> Step {
    event(&json!({ "choices": [{ "index": 0, "delta": { "reasoning_content": text, "reasoning": text } }] }))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_is_styled_while_it_streams_and_its_route_is_shown() {
    let script = |_| {
        vec![routed(), reasoning("let me see"), text("a **bo"), text("ld** word\n```sh\nls *\n"), text("```\n"), done()]
    };
    let chat = Chat::with(script, &[]).await;
    chat.terminal.types_line(1, "hi");
    chat.terminal.shows("direct; decode=mac", 1);
    let shown = chat.terminal.shown();
    assert!(shown.contains("\x1b[2mlet me see\x1b[0m"), "reasoning is dim: {shown:?}");
    assert!(shown.contains("\x1b[1mbo\x1b[0m\x1b[1mld\x1b[0m word"), "{shown:?}");
    assert!(shown.contains("\x1b[36mls *\x1b[0m"), "{shown:?}");
    assert!(shown.contains("\x1b[2mdirect; decode=mac\x1b[0m"), "{shown:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_that_comes_after_the_head_is_shown() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-baton-route: pending; place=2\r\n";
    let waits =
        format!("{head}connection: close\r\n\r\n: place 1 in the queue\n\n: x-baton-route: direct; decode=late\n\n");
    let chat = Chat::with(move |_| vec![Step::Send(waits.clone()), text("word"), done()], &[]).await;
    chat.terminal.types_line(1, "hi");
    chat.terminal.shows("\x1b[2mdirect; decode=late\x1b[0m", 1);
    assert!(!chat.terminal.shown().contains("pending"));
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_stops_the_reply_and_the_chat_goes_on_until_ctrl_d() {
    let script = |n| if n == 0 { vec![head(), text("first words"), Step::Hang] } else { says("second reply") };
    let mut chat = Chat::with(script, &[]).await;
    chat.terminal.types_line(1, "one");
    chat.terminal.shows("first words", 1);
    chat.terminal.types("\x03");
    chat.terminal.shows("Stopped.", 1);
    eventually_async("the endpoint sees that the client left", async || chat.mock.n_left() == 1).await;
    chat.terminal.types_line(2, "two");
    chat.terminal.shows("second reply", 1);
    assert_eq!(chat.asked(1), ["one", "first words", "two"], "the partial reply stays");
    chat.terminal.shows("\x1b[?2004h", 3);
    chat.terminal.types("\x04");
    assert!(chat.terminal.ends().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_reply_is_cancelled_in_the_engine() {
    let server = BatonServer::with(&["--engine", "sim", "--name", "sim", "--sim-decode-tps", "5"]);
    let state = tempfile::tempdir().unwrap();
    let variables = [("XDG_STATE_HOME", state.path().to_str().unwrap()), ("BATON_URL", server.base.as_str())];
    let terminal = Terminal::start(&["chat"], &variables);
    terminal.shows("> ", 1);
    terminal.types_line(1, "tell me all");
    // What the editor of lines shows last is the end of bracketed paste; the reply follows. Before its first word arrives the chat
    // does not know the route.
    let has_begun = |shown: &str| shown.split_once("\x1b[?2004l").is_some_and(|(_, reply)| !reply.trim().is_empty());
    eventually_async("the reply", async || has_begun(&terminal.shown())).await;
    terminal.types("\x03");
    terminal.shows("Stopped.", 1);
    terminal.shows("decode=local", 1);
    eventually_async("the end of the request", async || server.state().await["routes"][0]["outcome"] == "cancelled")
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_endpoint_keeps_the_partial_reply_and_the_chat() {
    let script = |n| if n == 0 { vec![head(), text("half a ")] } else { says("back again") };
    let chat = Chat::with(script, &[]).await;
    chat.terminal.types_line(1, "one");
    chat.terminal.shows("the endpoint was lost", 1);
    assert!(chat.terminal.shown().contains("half a "));
    chat.terminal.types_line(2, "two");
    chat.terminal.shows("back again", 1);
    assert_eq!(chat.asked(1), ["one", "half a ", "two"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_control_character_of_a_model_reaches_the_terminal() {
    let script = |_| {
        vec![
            head(),
            reasoning("\x1b]0;thief\x07think"),
            text("\x1b]0;thi"),
            text("ef\x07safe \x1b[2"),
            text("Jtext\x1b[1;1H \u{9b}31mred\x08\x08"),
            event(&json!({ "choices": [{ "index": 0, "delta": { "tool_calls": [{ "index": 0, "function":
            { "name": "f\x1b[5m", "arguments": "{\"a\": \"\x1b]52;c;aGk=\x07\"}" } }] } }] })),
            done(),
        ]
    };
    let chat = Chat::with(script, &[]).await;
    chat.terminal.types_line(1, "hi");
    chat.terminal.shows("tool call: f({\"a\": \"\"})", 1);
    let shown = chat.terminal.shown();
    assert!(shown.contains("think") && shown.contains("safe text red"), "{shown:?}");
    for bad in ["thief", "\x1b]", "\x07", "\x08\x08", "\x1b[2J", "\x1b[1;1H", "\u{9b}", "\x1b[5m"] {
        assert!(!shown.contains(bad), "{bad:?} in {shown:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_change_the_next_request() {
    let chat = Chat::with(|_| says("fine"), &[]).await;
    chat.terminal.types_line(1, "/system be brief");
    chat.terminal.types_line(2, "/model other");
    chat.terminal.shows("other answers from now on.", 1);
    chat.terminal.types_line(3, "one");
    chat.terminal.shows("fine", 1);
    assert_eq!(
        (chat.asked(0), chat.mock.asked(0).body["model"].as_str()),
        (vec!["be brief".into(), "one".into()], Some("other"))
    );
    chat.terminal.types_line(4, "/clear");
    chat.terminal.shows("The conversation is forgotten.", 1);
    chat.terminal.types_line(5, "/nope");
    chat.terminal.shows("There is no command /nope.", 1);
    chat.terminal.types_line(6, "two");
    chat.terminal.shows("fine", 2);
    assert_eq!(chat.asked(1), ["be brief", "two"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn typed_lines_are_kept_for_their_owner_alone() {
    let mut chat = Chat::with(|_| says("fine"), &[]).await;
    chat.terminal.types_line(1, "remember me");
    chat.terminal.shows("fine", 1);
    chat.terminal.shows("\x1b[?2004h", 2);
    chat.terminal.types("\x04");
    assert!(chat.terminal.ends().success());
    let file = chat.state.path().join("baton/chat_history");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(std::fs::read_to_string(&file).unwrap().contains("remember me"));
    // The next chat finds the line with the key "up".
    let variables = [("XDG_STATE_HOME", chat.state.path().to_str().unwrap())];
    let next = Terminal::start(&["chat", "--url", &chat.mock.url], &variables);
    next.shows("> ", 1);
    next.types_line(1, "\x1b[A");
    next.shows("fine", 1);
    assert_eq!(chat.asked(1), ["remember me"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_colours_text_stays_as_it_is() {
    let chat = Chat::with(|_| says("a **bold** word"), &[("NO_COLOR", "1")]).await;
    chat.terminal.types_line(1, "hi");
    chat.terminal.shows("a **bold** word", 1);
    assert!(!chat.terminal.shown().contains("\x1b[1m") && !chat.terminal.shown().contains("\x1b[2m"));
}

/// Pipes a text into `baton chat`.
async fn pipe(input: &'static str, url: &str) -> Output {
    let url = url.to_owned();
    let run = move || {
        let mut command = Command::new(&*BATON);
        command.args(["chat", "--url", &url]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.env_remove("BATON_API_KEY").spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipe_gets_the_plain_reply_and_an_exit_code() {
    let script = |n, _: &_| match n {
        0 => vec![head(), reasoning("hm"), text("a **bold**"), text("\x1b[31m reply"), done()],
        _ => vec![head(), text("half")],
    };
    let mock = Mock::listing(&["m"], script).await;
    let whole = pipe("hi\nthere\n", &mock.url).await;
    assert_eq!(
        (String::from_utf8(whole.stdout).unwrap().as_str(), whole.status.code()),
        ("a **bold** reply\n", Some(0))
    );
    assert_eq!(mock.asked(0).body["messages"][0]["content"], "hi\nthere");
    let half = pipe("hi", &mock.url).await;
    assert_eq!((String::from_utf8(half.stdout).unwrap().as_str(), half.status.code()), ("half\n", Some(1)));
    assert!(String::from_utf8(half.stderr).unwrap().contains("the endpoint was lost"));
    let none = pipe("hi", &free_address()).await;
    assert_eq!((none.stdout.len(), none.status.code()), (0, Some(1)));
    assert!(String::from_utf8(none.stderr).unwrap().contains("no endpoint answers"));
    assert_eq!(pipe("\n", &mock.url).await.status.code(), Some(1), "nothing to answer");
}
