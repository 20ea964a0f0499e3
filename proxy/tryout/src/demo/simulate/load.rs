//! A grading load: submissions that share a long rubric, graded at the same time.

use baton_proxy::serve::CommandFailure;

use super::super::ask::{DemoReply, ask};
use super::super::waterfall::{TimeBar, line};
use super::cluster::{RunningCluster, all, text};
use super::said::say;

/// Tokens of the rubric, of a submission, and of a grade.
const N_RUBRIC: usize = 4_000;
const N_SUBMISSION: usize = 1_000;
const N_GRADE: u32 = 48;

/// Submissions after the first one.
const N_TOGETHER: usize = 5;

pub(super) async fn play(cluster: &RunningCluster) -> Result<(), CommandFailure> {
    let intro = format!(
        "\n2. A grading load: {} submissions of {N_SUBMISSION} tokens, after one rubric of {N_RUBRIC}\n\
         The first request brings the rubric; {N_TOGETHER} more come together.",
        N_TOGETHER + 1
    );
    say(&intro)?;
    let rubric = text("Rubric", N_RUBRIC);
    let grade = |at: usize| {
        let prompt = format!("{rubric}{}", text(&format!("Submission {at}"), N_SUBMISSION));
        async move { ask(&cluster.endpoint.base, &prompt, N_GRADE).await }
    };
    let mut replies = vec![grade(1).await?];
    replies.extend(all((2..N_TOGETHER + 2).map(grade)).await?);
    say(&drawn(&replies))?;
    Ok(())
}

/// A bar for each request, from its start to its end.
fn drawn(replies: &[DemoReply]) -> String {
    let scale = replies.iter().map(|reply| reply.total_ms).fold(1.0, f64::max);
    let mut out = "\n".to_owned();
    for (at, reply) in (1..).zip(replies) {
        let how = if reply.handoff.is_some() { "handed over" } else { "direct" };
        let note = format!("first {:.2} s, {} cached, {how}", reply.ttft_ms / 1e3, reply.n_cached);
        line(&mut out, scale, &TimeBar { name: format!("submission {at}"), from: 0.0, to: reply.total_ms, note });
    }
    out
}
