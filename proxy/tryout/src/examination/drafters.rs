//! What each drafter brings on a device: one prompt, continued without guesses and with those of each drafter.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::Duration;

use baton_link::Engine;
use baton_model::gguf::Gguf;
use baton_model::options::CacheTypes;
use baton_proxy::serve::CommandFailure;
use baton_schemas::generate::Sampling;
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

impl Examination {
    /// Measures every drafter. Only one node runs at a time.
    pub(super) async fn drafters(&self, device: &str, prompt: &[Token]) -> Result<Vec<DrafterSpeed>, CommandFailure> {
        let (said, without) = last_reply(&self.drafting(device, "off", None).await?, prompt, &[], self.n_new).await?;
        let mut speeds = Vec::new();
        let mut add = |drafter: ExaminedDrafter, timings: &Timings| {
            let [without_tps, with_tps] = [&without, timings].map(tps);
            speeds.push(DrafterSpeed { drafter, without_tps, with_tps, drafts: timings.drafts.of(drafter.kind()) });
        };
        {
            let node = self.drafting(device, "auto", None).await?;
            let (_, guessed) = last_reply(&node, prompt, &[], self.n_new).await?;
            add(ExaminedDrafter::PromptLookup, &guessed);
            if Gguf::open(Path::new(&self.model)).is_ok_and(|file| file.prediction_head(CacheTypes::default()).is_ok()) {
                add(ExaminedDrafter::Head, &guessed);
            }
            add(ExaminedDrafter::Prediction, &last_reply(&node, prompt, &said, self.n_new).await?.1);
        }
        if let Some(draft) = &self.draft {
            let node = self.drafting(device, "auto", Some(draft)).await?;
            add(ExaminedDrafter::DraftModel, &last_reply(&node, prompt, &[], self.n_new).await?.1);
        }
        Ok(speeds)
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
async fn last_reply(
    node: &NodeProcess,
    prompt: &[Token],
    predicted: &[Token],
    n_new: u32,
) -> Result<(Vec<Token>, Timings), CommandFailure> {
    let mut last = (Vec::new(), Timings::default());
    for _ in 0..N_REPLIES {
        let request = SequenceRequest {
            prompt: prompt.to_vec(),
            predicted: predicted.to_vec(),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            max_tokens: Some(n_new),
            ignore_eos: true,
            ..SequenceRequest::default()
        };
        let reply = tokio::time::timeout(DEADLINE, reply(node, request)).await;
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
