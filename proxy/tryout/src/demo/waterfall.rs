//! Draws the parts of a request's time as bars over a common time axis.

use std::fmt::Write as _;

use super::ask::{DemoHandoff, DemoReply};

/// Columns of the bars. With names and figures a line has at most 100.
const WIDTH: usize = 42;

/// A bar: its name, its start and end in milliseconds, and a note after its length.
pub(super) struct TimeBar {
    pub(super) name: String,
    pub(super) from: f64,
    pub(super) to: f64,
    pub(super) note: String,
}

/// What the two machines of a handoff are called.
#[derive(Clone, Copy)]
pub(super) struct PairNames {
    pub(super) prefill: &'static str,
    pub(super) decode: &'static str,
}

const NODES: PairNames = PairNames { prefill: "node A", decode: "node B" };

/// Draws a prompt that was handed over, and the same prompt on one node.
pub(super) fn draw(handed: &DemoReply, direct: &DemoReply) -> String {
    let scale = handed.ttft_ms.max(direct.ttft_ms).max(1e-3);
    let mut out = format!("\n{} prompt tokens\n\nroute: {}\n", handed.n_prompt, handed.route);
    match &handed.handoff {
        None => line(&mut out, scale, &whole_prefill(handed)),
        Some(handoff) => {
            if let Some(failure) = &handoff.failure {
                // Writing to a String cannot fail.
                let _ = writeln!(out, "the handoff failed ({failure}); node B computed the rest");
            }
            for bar in bars(handoff, handed.ttft_ms, NODES) {
                line(&mut out, scale, &bar);
            }
        }
    }
    let _ = writeln!(out, "\nroute: {}", direct.route);
    line(&mut out, scale, &whole_prefill(direct));
    let _ = writeln!(
        out,
        "\nfirst token after {:.0} ms with the handoff, {:.0} ms without; whole reply {:.0} and {:.0} ms",
        handed.ttft_ms, direct.ttft_ms, handed.total_ms, direct.total_ms
    );
    out += match handed.text == direct.text {
        true => "Both replies are the same.\n",
        false => {
            "The replies differ in a nearly equal choice: rounding depends on the chunks a prompt is computed in.\n"
        }
    };
    out + "Both nodes run on this machine: what a handoff gains on a real pair is node A's faster prefill."
}

/// The only bar of a request without a handoff.
fn whole_prefill(reply: &DemoReply) -> TimeBar {
    TimeBar { name: "prefill, first token".into(), from: 0.0, to: reply.ttft_ms, note: String::new() }
}

/// The handoff's parts. Node B sends its request at 0. The endpoint's work before that takes a few milliseconds, and is
/// shown with the first token's step.
pub(super) fn bars(handoff: &DemoHandoff, ttft_ms: f64, names: PairNames) -> Vec<TimeBar> {
    let DemoHandoff { total_ms, after_prefill_ms, prefill_ms, queue_ms, transfer_ms, import_ms, .. } = *handoff;
    let prefilled = (total_ms - after_prefill_ms).max(0.0);
    let began = (prefilled - prefill_ms).max(0.0);
    let hidden_from = (total_ms - transfer_ms).clamp(0.0, prefilled);
    let bytes = format!("{:.1} MB in all", handoff.n_bytes as f64 / 1e6);
    let PairNames { prefill, decode } = names;
    let bar = |name: String, from, to, note: &str| TimeBar { name, from, to, note: note.to_owned() };
    vec![
        bar(format!("queue on {prefill}"), (began - queue_ms).max(0.0), began, ""),
        bar(format!("prefill on {prefill}"), began, prefilled, ""),
        bar("sent during prefill".into(), hidden_from, prefilled, &bytes),
        bar("sent after prefill".into(), prefilled, total_ms, ""),
        bar(format!("import on {decode}"), (total_ms - import_ms).max(0.0), total_ms, "sum of chunks"),
        bar(format!("first token on {decode}"), total_ms, ttft_ms, ""),
    ]
}

/// Draws a bar of an axis that is `scale` milliseconds long.
pub(super) fn line(out: &mut String, scale: f64, bar: &TimeBar) {
    let column = |ms: f64| ((ms / scale * WIDTH as f64).round().max(0.0) as usize).min(WIDTH);
    let from = column(bar.from).min(WIDTH - 1);
    let to = column(bar.to);
    // A bar that is shorter than a column is a thin line.
    let filled = if to > from { "█".repeat(to - from) } else { "▏".to_owned() };
    let rest = WIDTH - from - filled.chars().count();
    let text = format!(
        "  {:<22}|{}{filled}{}|{:>9.1} ms  {}",
        bar.name,
        " ".repeat(from),
        " ".repeat(rest),
        bar.to - bar.from,
        bar.note
    );
    let _ = writeln!(out, "{}", text.trim_end());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(ttft_ms: f64, handoff: Option<DemoHandoff>) -> DemoReply {
        DemoReply { route: "a route".into(), ttft_ms, handoff, n_prompt: 1000, ..DemoReply::default() }
    }

    #[test]
    fn bars_lie_one_after_another_and_lines_are_short() {
        let handoff = DemoHandoff {
            n_bytes: 23_000_000,
            queue_ms: 1.0,
            prefill_ms: 4_000.0,
            transfer_ms: 3_000.0,
            import_ms: 12.0,
            after_prefill_ms: 100.0,
            total_ms: 4_150.0,
            failure: None,
        };
        let bars = bars(&handoff, 4_200.0, NODES);
        let find = |name| bars.iter().find(|bar| bar.name == name).unwrap();
        assert_eq!((find("prefill on node A").from, find("prefill on node A").to), (50.0, 4_050.0));
        assert_eq!((find("sent during prefill").from, find("sent during prefill").to), (1_150.0, 4_050.0));
        assert_eq!((find("sent after prefill").from, find("sent after prefill").to), (4_050.0, 4_150.0));
        let text = draw(&reply(4_200.0, Some(handoff)), &reply(4_100.0, None));
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
        let drawn = text.lines().filter(|line| line.contains('|'));
        assert!(drawn.clone().all(|line| line.chars().count() <= 100), "{text}");
        assert_eq!(drawn.count(), 7, "{text}");
    }

    #[test]
    fn impossible_times_draw_nothing_outside() {
        let handoff =
            DemoHandoff { after_prefill_ms: 1e9, prefill_ms: 1e9, transfer_ms: -5.0, ..DemoHandoff::default() };
        let text = draw(&reply(0.0, Some(handoff)), &reply(0.0, None));
        assert!(text.lines().filter(|line| line.contains('|')).all(|line| line.chars().count() <= 100), "{text}");
    }
}
