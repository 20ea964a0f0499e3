//! What the play prints: every line that is not empty says that it is simulated.

use std::io::Write;

use super::super::ask::DemoReply;
use super::super::waterfall::{PairNames, TimeBar, bars, line};

/// Before each line.
pub(super) const MARK: &str = "simulated";

/// What the machines of a handoff are called.
pub(super) const NAMES: PairNames = PairNames { prefill: "the Spark", decode: "the Mac" };

/// Marks each line that is not empty.
fn marked(text: &str) -> String {
    let mark = |line: &str| if line.is_empty() { "\n".to_owned() } else { format!("{MARK} {line}\n") };
    text.lines().map(mark).collect()
}

/// Prints lines, marked.
pub(super) fn say(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(marked(text).as_bytes())?;
    out.flush()
}

/// A heading with the route that the reply took.
pub(super) fn routed(heading: &str, reply: &DemoReply) -> String {
    format!("{heading}\nroute: {}", reply.route)
}

/// A reply under a heading, as a waterfall over an axis of `scale` milliseconds.
pub(super) fn waterfall(heading: &str, reply: &DemoReply, scale: f64, direct: &str) -> String {
    let mut out = format!("\n{heading}\n");
    let bar = |name: String, from: f64, to: f64, note: &str| TimeBar { name, from, to, note: note.to_owned() };
    match &reply.handoff {
        None => line(&mut out, scale, &bar(format!("prefill on {direct}"), 0.0, reply.ttft_ms, "")),
        Some(handoff) => {
            if let Some(failure) = &handoff.failure {
                out += &format!("the handoff broke ({failure}); {} computed the rest\n", NAMES.decode);
            }
            bars(handoff, reply.ttft_ms, NAMES).iter().for_each(|bar| line(&mut out, scale, bar));
        }
    }
    line(&mut out, scale, &bar(format!("decode on {direct}"), reply.ttft_ms, reply.total_ms, ""));
    out += &format!(
        "{} tokens of prompt, {} of reply: first token after {:.2} s, done after {:.2} s\n",
        reply.n_prompt,
        reply.n_reply,
        reply.ttft_ms / 1e3,
        reply.total_ms / 1e3
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_marked() {
        assert_eq!(marked("a 1\n\nb 2"), "simulated a 1\n\nsimulated b 2\n");
        let reply = DemoReply { ttft_ms: 10.0, total_ms: 20.0, route: "direct".into(), ..DemoReply::default() };
        let text = marked(&waterfall(&routed("One", &reply), &reply, 20.0, "the Mac"));
        assert!(text.lines().all(|line| line.is_empty() || line.starts_with(MARK)), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    }
}
