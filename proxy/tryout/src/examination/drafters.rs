//! What each drafter brings on a device: one prompt, continued without guesses and with those of each drafter.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::Duration;

use baton_link::Engine;
use baton_model::gguf::Gguf;
use baton_model::options::CacheTypes;
use baton_proxy::serve::CommandFailure;
use baton_schemas::draft::DraftTotals;
use baton_schemas::generate::Sampling;
use baton_schemas::handoff::KvSource;
use baton_schemas::sequence::{DraftCounts, Timings};
use baton_schemas::{SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;

use super::examine::Examination;
use super::figures::{DrafterSpeed, ExaminedDrafter};
use crate::node_process::NodeProcess;

/// The longest reply.
const DEADLINE: Duration = Duration::from_secs(600);

/// Tokens of the prompt. A draft model catches up with it in a small share of the steps' time, so after a long one it would guess nothing.
const N_PROMPT: usize = 32;

/// The fewest tokens of a reply that leave time to guess.
const LEAST_REPLY: u32 = 128;

/// Replies of each node: the first one shows it what its steps cost, the last one's speed counts.
const N_REPLIES: usize = 2;

/// A drafter with fewer verified guesses gets further replies, up to so many.
const ENOUGH_GUESSES: u32 = 16;
const MOST_REPLIES: usize = 4;

/// A node that drafts for another one.
enum DraftingNode {
    Here(Box<NodeProcess>),
    /// Its URL.
    Elsewhere(String),
}

impl DraftingNode {
    fn url(&self) -> &str {
        match self {
            DraftingNode::Here(process) => &process.url,
            DraftingNode::Elsewhere(url) => url,
        }
    }
}

impl Examination {
    /// Measures every drafter. One node runs at a time, and its draft node beside it. What fails with one drafter is in its result. Errors:
    /// the node does not run without any.
    pub(super) async fn drafters(
        &self,
        device: &str,
        prompt: &[Token],
        draft_nodes: &[&String],
    ) -> Result<Vec<DrafterSpeed>, CommandFailure> {
        let asked = SequenceRequest {
            prompt: prompt[..prompt.len().min(N_PROMPT)].to_vec(),
            // Greedy replies of small models soon repeat themselves, which any drafter guesses. A sampled one is the same each time, too:
            // its draws depend on the seed.
            sampling: Sampling::default(),
            max_tokens: Some(self.n_new.max(LEAST_REPLY)),
            ignore_eos: true,
            ..SequenceRequest::default()
        };
        eprintln!("{device}: replies without guesses");
        let without = measured(&self.drafting(device, "off", None).await?, &asked, None).await?;
        let mut speeds = Vec::new();
        let mut add = |drafter: ExaminedDrafter, at: Option<String>, with: &Result<DraftedReplies, CommandFailure>| {
            speeds.push(speed(drafter, at, without.tps, with));
        };
        let has_head =
            Gguf::open(Path::new(&self.model)).is_ok_and(|file| file.prediction_head(CacheTypes::default()).is_ok());
        {
            eprintln!("{device}: replies with guesses from the text");
            let node = self.drafting(device, "auto", None).await?;
            let awaited = if has_head { ExaminedDrafter::Head } else { ExaminedDrafter::PromptLookup };
            let guessed = measured(&node, &asked, Some(awaited)).await;
            add(ExaminedDrafter::PromptLookup, None, &guessed);
            if has_head {
                add(ExaminedDrafter::Head, None, &guessed);
            }
            let predicted = SequenceRequest { predicted: without.said.clone(), ..asked.clone() };
            let prediction = ExaminedDrafter::Prediction;
            add(prediction, None, &measured(&node, &predicted, Some(prediction)).await);
        }
        if let Some(draft) = self.draft.as_ref().filter(|draft| draft.runs_beside_model) {
            let drafter = ExaminedDrafter::DraftModel;
            eprintln!("{device}: replies with guesses of {}", drafter.words());
            let with = async {
                measured(&self.drafting(device, "auto", Some(&draft.file)).await?, &asked, Some(drafter)).await
            };
            add(drafter, None, &with.await);
        }
        // A model with a head of its own asks no draft node.
        let places = self.devices.iter().filter_map(|device| Some((&device.name, Some(&self.draft.as_ref()?.file))));
        let places = places.chain(draft_nodes.iter().map(|url| (*url, None))).filter(|_| !has_head);
        for (at, draft) in places {
            let drafter = ExaminedDrafter::DraftNode;
            eprintln!("{device}: replies with guesses of {}, on {at}", drafter.words());
            let with = async {
                let process = self.draft_node(at, draft).await?;
                let node = self.drafting(device, "auto", None).await?;
                let asked = SequenceRequest { draft_source: Some(KvSource::at(process.url())), ..asked.clone() };
                measured(&node, &asked, Some(drafter)).await
            };
            add(drafter, Some(at.clone()), &with.await);
        }
        Ok(speeds)
    }

    /// A draft node with this draft model on a device here, or the one at an address.
    async fn draft_node(&self, at: &str, draft: Option<&OsString>) -> Result<DraftingNode, CommandFailure> {
        let Some(draft) = draft else { return Ok(DraftingNode::Elsewhere(at.to_owned())) };
        let mut args: Vec<OsString> = ["--role", "draft", "--device", at, "--slots", "1"].map(OsString::from).into();
        args.extend(["--model".into(), draft.clone()]);
        args.extend(self.node_args.iter().cloned());
        Ok(DraftingNode::Here(Box::new(NodeProcess::start(&self.key, args).await?)))
    }

    async fn drafting(
        &self,
        device: &str,
        speculation: &str,
        draft: Option<&OsStr>,
    ) -> Result<NodeProcess, CommandFailure> {
        let mut args: Vec<OsString> =
            ["--device", device, "--slots", "1", "--speculation", speculation].map(OsString::from).into();
        args.extend(["--model".into(), self.model.clone()]);
        args.extend(draft.into_iter().flat_map(|file| ["--draft".into(), file.to_owned()]));
        args.extend(self.node_args.iter().cloned());
        NodeProcess::start(&self.key, args).await
    }
}

/// The results of some equal replies.
struct DraftedReplies {
    said: Vec<Token>,
    /// Tokens per second of the last reply.
    tps: f64,
    /// All guesses.
    drafts: DraftTotals,
}

/// The speed with a drafter. Without guesses there is none: the difference would be noise.
fn speed(
    drafter: ExaminedDrafter,
    at: Option<String>,
    without_tps: f64,
    with: &Result<DraftedReplies, CommandFailure>,
) -> DrafterSpeed {
    let untried =
        DrafterSpeed { drafter, at, without_tps, with_tps: None, drafts: DraftCounts::default(), failure: None };
    match with {
        Err(CommandFailure(why)) => DrafterSpeed { failure: Some(why.clone()), ..untried },
        Ok(replies) => {
            let drafts = replies.drafts.of(drafter.kind());
            DrafterSpeed { with_tps: (!drafts.is_empty()).then_some(replies.tps), drafts, ..untried }
        }
    }
}

/// Asks for equal replies, until there are enough guesses of a drafter or no more replies are allowed.
async fn measured(
    node: &NodeProcess,
    asked: &SequenceRequest,
    drafter: Option<ExaminedDrafter>,
) -> Result<DraftedReplies, CommandFailure> {
    summed_up(drafter, async || {
        let reply = tokio::time::timeout(DEADLINE, reply(node, asked.clone())).await;
        reply.map_err(|_| CommandFailure("a reply takes too long".into()))?
    })
    .await
}

async fn summed_up(
    drafter: Option<ExaminedDrafter>,
    reply: impl AsyncFn() -> Result<(Vec<Token>, Timings), CommandFailure>,
) -> Result<DraftedReplies, CommandFailure> {
    let mut sum = DraftedReplies { said: Vec::new(), tps: 0.0, drafts: DraftTotals::default() };
    for n_replies in 1..=MOST_REPLIES {
        let (said, timings) = reply().await?;
        let tps = f64::from(timings.predicted_n.saturating_sub(1)) * 1e3 / timings.predicted_ms.max(1e-3);
        sum = DraftedReplies { said, tps, drafts: sum.drafts.plus(timings.drafts) };
        let is_enough = drafter.is_none_or(|drafter| sum.drafts.of(drafter.kind()).n >= ENOUGH_GUESSES);
        if n_replies >= N_REPLIES && is_enough {
            break;
        }
    }
    Ok(sum)
}

async fn reply(node: &NodeProcess, request: SequenceRequest) -> Result<(Vec<Token>, Timings), CommandFailure> {
    let mut events = node.engine.generate(request).await?;
    let (mut tokens, mut at_end) = (Vec::new(), Timings::default());
    while let Some(event) = events.next().await {
        match event? {
            SequenceEvent::Token(token) => tokens.push(token.id),
            SequenceEvent::Finished { timings, .. } => at_end = timings,
            SequenceEvent::Started(_) | SequenceEvent::PrefillBegun | SequenceEvent::Handoff(_) => {}
        }
    }
    Ok((tokens, at_end))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// How many replies a drafter gets that has so many guesses in each, and how many of them are counted, if any are.
    async fn check(guesses: &[u32], expected: (usize, Option<u32>)) {
        let n_replies = Cell::new(0);
        let drafter = ExaminedDrafter::DraftModel;
        let replies = summed_up(Some(drafter), async || {
            let model = DraftCounts { n: guesses[n_replies.get()], n_accepted: 0 };
            n_replies.set(n_replies.get() + 1);
            let lookup = DraftCounts { n: 99, n_accepted: 99 };
            let drafts = DraftTotals { model, lookup, ..DraftTotals::default() };
            Ok((Vec::new(), Timings { predicted_n: 11, predicted_ms: 1e3, drafts, ..Timings::default() }))
        });
        let speed = speed(drafter, None, 10.0, &replies.await);
        assert_eq!((n_replies.get(), speed.with_tps.map(|_| speed.drafts.n)), expected, "{guesses:?}");
        assert_eq!(speed.with_tps, expected.1.map(|_| 10.0));
    }

    #[tokio::test]
    async fn a_drafter_gets_replies_until_it_has_enough_guesses_and_without_any_no_speed() {
        check(&[20, 20], (2, Some(40))).await;
        check(&[0, 16], (2, Some(16))).await;
        check(&[0, 0, 15, 1], (4, Some(16))).await;
        check(&[0, 0, 16], (3, Some(16))).await;
        check(&[1, 0, 0, 0], (4, Some(1))).await;
        check(&[0, 0, 0, 0], (4, None)).await;
    }
}
