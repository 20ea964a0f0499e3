//! `baton demo` shows a handoff, and leaves nothing behind.

use std::process::{Command, Stdio};

use harness::{BATON, children_of, eventually, is_alive, model};
use rustix::process::{Pid, Signal};

fn demo() -> Command {
    let mut command = Command::new(&*BATON);
    command.args(["demo", "--words", "300", "--model"]).arg(model());
    command.stdout(Stdio::piped()).stderr(Stdio::inherit());
    command
}

#[test]
fn the_demo_draws_a_handoff_and_a_direct_reply() {
    let output = demo().output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    println!("{text}");
    assert!(output.status.success());
    assert!(text.contains("route: handoff; prefill=") && text.contains("route: direct;"), "{text}");
    for bar in
        ["queue on node A", "prefill on node A", "sent during prefill", "import on node B", "first token on node B"]
    {
        assert!(text.contains(bar), "{bar}: {text}");
    }
    assert!(!text.contains("failed"), "{text}");
}

#[test]
fn an_interrupted_demo_leaves_no_process() {
    let mut process = demo().spawn().unwrap();
    // The prefill node, the endpoint, and its engine.
    let nodes = eventually("both nodes", || Some(children_of(process.id())).filter(|nodes| nodes.len() == 2));
    let engines = eventually("the endpoint's engine", || {
        let engines: Vec<Pid> =
            nodes.iter().flat_map(|pid| children_of(pid.as_raw_nonzero().get().unsigned_abs())).collect();
        (!engines.is_empty()).then_some(engines)
    });
    rustix::process::kill_process(Pid::from_child(&process), Signal::INT).unwrap();
    assert!(!process.wait().unwrap().success());
    for pid in nodes.into_iter().chain(engines) {
        eventually("the end of a process", || (!is_alive(pid)).then_some(()));
    }
}
