//! `baton demo --simulate`: the real endpoint on simulated machines, in real time, every figure marked.

use std::process::{Command, Stdio};

use harness::BATON;

/// Plays on a cluster and returns what was printed.
fn play(cluster: &str) -> String {
    let mut command = Command::new(&*BATON);
    command.args(["demo", "--simulate", cluster, "--no-open", "--exit"]).env_remove("BATON_API_KEY");
    let output = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    println!("{text}");
    assert!(output.status.success());
    for line in text.lines().filter(|line| line.chars().any(|c| c.is_ascii_digit())) {
        assert!(line.starts_with("simulated "), "{line}");
    }
    text
}

/// The lines under a heading, up to the next empty line.
fn under<'a>(text: &'a str, heading: &str) -> Vec<&'a str> {
    let lines = text.lines().skip_while(|line| line.strip_prefix("simulated ") != Some(heading));
    let lines: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
    assert!(!lines.is_empty(), "{heading}: {text}");
    lines
}

/// The seconds after which the request under a heading was done.
fn seconds(text: &str, heading: &str) -> f64 {
    let lines = under(text, heading);
    let done = lines.iter().find_map(|line| line.split_once("done after ")).unwrap();
    done.1.trim_end_matches(" s").parse().unwrap()
}

fn has(lines: &[&str], words: &str) -> bool {
    lines.iter().any(|line| line.contains(words))
}

#[test]
fn a_simulated_pair_hands_over_and_survives_an_unplugged_machine() {
    let text = play("spark-mac");
    let handed = "Handed over: the Spark prefills, the Mac decodes";
    let lines = under(&text, handed);
    assert!(has(&lines, "route: handoff; prefill=prefill-1; decode=decode-1"), "{text}");
    assert!(has(&lines, " 107") && has(&lines, "MB in all"), "the whole KV of 8,192 tokens: {text}");
    let (mac, spark, both) =
        (seconds(&text, "The Mac alone"), seconds(&text, "The Spark alone"), seconds(&text, handed));
    assert!(both < mac && both < spark, "{both} s, {mac} s on the Mac, {spark} s on the Spark");
    // The published table, and a busy machine.
    assert!((6.2..8.0).contains(&mac) && (4.2..6.0).contains(&spark) && (2.2..3.8).contains(&both), "{text}");
    assert!(text.contains("submission 6"), "{text}");
    assert!(has(&under(&text, "The request during which it left"), "the handoff broke (prefill_lost)"), "{text}");
    assert!(has(&under(&text, "Without it"), "route: direct; decode=decode-1"), "{text}");
    assert!(has(&under(&text, "With it"), "route: handoff; prefill=prefill-1"), "{text}");
}

#[test]
fn with_two_pairs_a_reply_goes_on_without_its_machine() {
    let text = play("two-sparks-two-macs");
    let left = under(&text, "The request during which it left, continued on the other Mac");
    assert!(has(&left, "64 of reply"), "no token is missing: {text}");
    assert!(has(&under(&text, "With it"), "route: "), "{text}");
}
