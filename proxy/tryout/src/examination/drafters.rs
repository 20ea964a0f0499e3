//! What each drafter brings on a device: one prompt, continued without guesses and with those of each drafter.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::Duration;

use baton_link::Engine;
use baton_model::gguf::Gguf;
use baton_model::options::CacheTypes;
use baton_proxy::serve::CommandFailure;
use baton_schemas::generate::Sampling;
use baton_schemas::handoff::KvSource;
use baton_schemas::sequence::Timings;
use baton_schemas::{SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;

use super::examine::Examination;
use super::figures::{DrafterSpeed, ExaminedDrafter};
use crate::node_process::NodeProcess;

/// The longest reply.
const DEADLINE: Duration = Duration::from_secs(600);

/// Replies of each node: the first one shows it what its steps cost, the last one counts.
const N_REPLIES: usize = 2;

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
    /// Measures every drafter. One node runs at a time, and its draft node beside it.
    pub(super) async fn drafters(
        &self,
        device: &str,
        prompt: &[Token],
        draft_nodes: &[&String],
    ) -> Result<Vec<DrafterSpeed>, CommandFailure> {
        let asked = SequenceRequest {
            prompt: prompt.to_vec(),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            max_tokens: Some(self.n_new),
            ignore_eos: true,
            ..SequenceRequest::default()
        };
        let (said, without) = last_reply(&self.drafting(device, "off", None).await?, &asked).await?;
        let mut speeds = Vec::new();
        let mut add = |drafter: ExaminedDrafter, at: Option<String>, timings: &Timings| {
            let [without_tps, with_tps] = [&without, timings].map(tps);
            speeds.push(DrafterSpeed { drafter, at, without_tps, with_tps, drafts: timings.drafts.of(drafter.kind()) });
        };
        let has_head =
            Gguf::open(Path::new(&self.model)).is_ok_and(|file| file.prediction_head(CacheTypes::default()).is_ok());
        {
            let node = self.drafting(device, "auto", None).await?;
            let (_, guessed) = last_reply(&node, &asked).await?;
            add(ExaminedDrafter::PromptLookup, None, &guessed);
            if has_head {
                add(ExaminedDrafter::Head, None, &guessed);
            }
            let predicted = SequenceRequest { predicted: said, ..asked.clone() };
            add(ExaminedDrafter::Prediction, None, &last_reply(&node, &predicted).await?.1);
        }
        if let Some(draft) = &self.draft {
            let node = self.drafting(device, "auto", Some(draft)).await?;
            add(ExaminedDrafter::DraftModel, None, &last_reply(&node, &asked).await?.1);
        }
        // A model with a head of its own asks no draft node.
        let places = self.devices.iter().filter_map(|device| Some((&device.name, Some(self.draft.as_ref()?))));
        let places = places.chain(draft_nodes.iter().map(|url| (*url, None))).filter(|_| !has_head);
        for (at, draft) in places {
            let draft_node = match self.draft_node(at, draft).await {
                Ok(draft_node) => draft_node,
                Err(CommandFailure(why)) => {
                    eprintln!("{at}: no draft node starts: {why}");
                    continue;
                }
            };
            let node = self.drafting(device, "auto", None).await?;
            let asked = SequenceRequest { draft_source: Some(KvSource::at(draft_node.url())), ..asked.clone() };
            add(ExaminedDrafter::DraftNode, Some(at.clone()), &last_reply(&node, &asked).await?.1);
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

fn tps(timings: &Timings) -> f64 {
    f64::from(timings.predicted_n.saturating_sub(1)) * 1e3 / timings.predicted_ms.max(1e-3)
}

/// The tokens and the timings of the last of some equal replies.
async fn last_reply(node: &NodeProcess, asked: &SequenceRequest) -> Result<(Vec<Token>, Timings), CommandFailure> {
    let mut last = (Vec::new(), Timings::default());
    for _ in 0..N_REPLIES {
        let reply = tokio::time::timeout(DEADLINE, reply(node, asked.clone())).await;
        last = reply.map_err(|_| CommandFailure("a reply takes too long".into()))??;
    }
    Ok(last)
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
