//! `baton chat` without an endpoint starts one, and takes it along when it ends.

use harness::{Terminal, children_of, eventually, is_alive, model};
use rustix::process::Pid;

/// Starts a chat with an endpoint of its own. Returns the endpoint's process and its engine's, too.
fn chat(state: &tempfile::TempDir) -> (Terminal, [Pid; 2]) {
    let variables = [("XDG_STATE_HOME", state.path().to_str().unwrap())];
    let terminal = Terminal::start(&["chat", "--own", model().to_str().unwrap()], &variables);
    terminal.shows("/help lists the commands.", 1);
    let child = |of: u32| eventually("a child", || children_of(of).first().copied());
    let endpoint = child(terminal.pid());
    let engine = child(endpoint.as_raw_nonzero().get().unsigned_abs());
    (terminal, [endpoint, engine])
}

#[test]
fn a_chat_takes_its_own_endpoint_along() {
    let state = tempfile::tempdir().unwrap();
    let (mut terminal, processes) = chat(&state);
    terminal.types_line(1, "Count to one thousand.");
    eventually("the reply", || {
        let shown = terminal.shown();
        // Leaving the editor ends bracketed paste.
        let reply = shown.rsplit_once("\x1b[?2004l")?.1.trim();
        (!reply.is_empty()).then_some(())
    });
    terminal.types("\x03");
    terminal.shows("Stopped.", 1);
    terminal.shows("direct; decode=local", 1);
    terminal.shows("\x1b[?2004h", 2);
    // Ctrl-C at the prompt ends the chat.
    terminal.types("\x03");
    assert!(terminal.ends().success());
    assert!(processes.iter().all(|pid| !is_alive(*pid)), "a chat ends after its endpoint");
}

#[test]
fn a_killed_chat_leaves_no_process() {
    let state = tempfile::tempdir().unwrap();
    let (mut terminal, processes) = chat(&state);
    terminal.kill();
    for pid in processes {
        eventually("the end of a process", || (!is_alive(pid)).then_some(()));
    }
}
