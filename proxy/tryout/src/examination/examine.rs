//! The checks: each device alone, then every handoff between two of them, then from other machines.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use baton_engines::llama::devices::Device;
use baton_link::Engine;
use baton_link::handoff::canary::{self, ComputedKv, KvDistances};
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_link::transport::Transport;
use baton_model::gguf::Gguf;
use baton_proxy::serve::CommandFailure;
use baton_schemas::Token;
use baton_schemas::held::KvTier;
use baton_schemas::kv::{CodecLoss, KvLayout, VerifiedState};

use super::compare::{ComparedReply, Difference, kept_reply, reply};
use super::figures::{CheckpointCheck, DeviceSpeed, DrafterSpeed, Examined, ExaminedDrafter, HandoffCheck};
use super::restored::RestoreCheck;
use super::verdict::{Ends, Verdict};
use crate::capture::{CaptureSource, capture};
use crate::node_process::NodeProcess;
use crate::prompts::Prompts;

/// Tokens of a reply that only warms a node up.
const WARM_UP: u32 = 2;

/// The options of an examination.
pub struct Examination {
    /// The model's file.
    pub model: OsString,
    /// Devices of this machine.
    pub devices: Vec<Device>,
    /// URLs of nodes on other machines that compute prompts, too, or draft.
    pub prefill: Vec<String>,
    /// Tokens of each prompt.
    pub n_tokens: usize,
    /// Tokens that are generated and compared.
    pub n_new: u32,
    /// Repetitions of each reply, at least one.
    pub n_rounds: u32,
    /// Hand another prompt over before each pair is measured: a new process touches its memory, and a GPU prepares its
    /// kernels.
    pub warms_up: bool,
    /// Also measure what guesses bring, and prove that KV comes back from the store.
    pub is_thorough: bool,
    pub draft: Option<ExaminedDraft>,
    /// Further arguments of every node.
    pub node_args: Vec<OsString>,
    /// How other machines' nodes are reached.
    pub transport: Transport,
    /// The cluster's, or one for this run.
    pub key: String,
}

/// A draft model.
pub struct ExaminedDraft {
    pub file: OsString,
    /// It can guess beside the model, and not only as a draft node.
    pub runs_beside_model: bool,
}

/// Where KV comes from.
struct Origin {
    url: String,
    engine: Arc<RemoteEngine>,
    /// The process, if it was started here.
    _process: Option<NodeProcess>,
}

/// A decode node, with what it computes alone.
struct ComparedNode {
    node: NodeProcess,
    prompt: Vec<Token>,
    warm_up: Vec<Token>,
    alone: ComparedReply,
}

impl Examination {
    /// Runs every check. What fails is in the result; an error is what no check could go on after.
    pub async fn complete(&self) -> Result<Examined, CommandFailure> {
        let mut examined = Examined::default();
        let names: Vec<&String> = self.devices.iter().map(|device| &device.name).collect();
        let (draft_nodes, elsewhere) = self.by_role().await;
        for &to in &names {
            eprintln!("{to}: starting a decode node");
            let node = match self.node(to, "both").await {
                Ok(node) => node,
                Err(CommandFailure(why)) => {
                    examined.speeds.push(DeviceSpeed::failed(to, why));
                    continue;
                }
            };
            let (target, speed) = self.alone(to, node).await?;
            examined.speeds.push(speed);
            for from in names.iter().copied().chain(elsewhere.iter().copied()) {
                eprintln!("{from} → {to}");
                let outcome = self.handoff(from, &target).await;
                let outcome = outcome.unwrap_or_else(|CommandFailure(why)| HandoffCheck::failed(why));
                examined.handoffs.push(HandoffCheck { from: from.clone(), to: to.clone(), ..outcome });
            }
            // The last check of a node: it leaves a conversation in the cache, which moves the cells of others.
            let checkpoint = self.checkpoint(&target).await?;
            if let Some(speed) = examined.speeds.last_mut() {
                speed.checkpoint = checkpoint;
            }
            if !self.is_thorough {
                continue;
            }
            // Its memory is needed for the next one's weights.
            let ComparedNode { node, prompt, .. } = target;
            node.unplug().await;
            let drafters = self.drafters(to, &prompt, &draft_nodes).await;
            let restores = self.restores(to).await;
            if let Some(speed) = examined.speeds.last_mut() {
                speed.drafters = drafters.unwrap_or_else(|CommandFailure(why)| {
                    vec![DrafterSpeed::failed(ExaminedDrafter::PromptLookup, why)]
                });
                speed.restores =
                    restores.unwrap_or_else(|CommandFailure(why)| vec![RestoreCheck::failed(KvTier::Memory, why)]);
            }
        }
        Ok(examined)
    }

    /// Measures a device's speed, and keeps its own reply to a prompt for comparison with replies after a handoff.
    async fn alone(&self, name: &str, node: NodeProcess) -> Result<(ComparedNode, DeviceSpeed), CommandFailure> {
        let mut prompts = Prompts::of(&node.engine).await?;
        let prompt = prompts.next(self.n_tokens);
        let warm_up = prompts.next(self.n_tokens);
        reply(&node.engine, &warm_up, WARM_UP, None).await?;
        let alone = reply(&node.engine, &prompt, self.n_new, None).await?;
        let mut replies = vec![alone];
        for _ in 1..self.n_rounds {
            replies.push(reply(&node.engine, &prompt, self.n_new, None).await?);
        }
        let speed = DeviceSpeed::of(name, prompt.len(), &replies);
        let alone = replies.swap_remove(0);
        Ok((ComparedNode { node, prompt, warm_up, alone }, speed))
    }

    /// Asks the prompt twice; `None` for a model without states.
    async fn checkpoint(&self, of: &ComparedNode) -> Result<Option<CheckpointCheck>, CommandFailure> {
        let engine = &of.node.engine;
        if engine.info().await?.kv.is_none_or(|kv| kv.layout.states.is_empty()) {
            return Ok(None);
        }
        let first = kept_reply(engine, &of.prompt, self.n_new).await?;
        let again = kept_reply(engine, &of.prompt, self.n_new).await?;
        Ok(Some(CheckpointCheck::of(of.prompt.len(), &first, &again)))
    }

    /// Asks a prompt, another one that takes the only slot, and the first one again, which comes from memory; and once more of a new
    /// process, to which it comes from disk. Nothing comes back where conversations stay in their slots, or computing is faster.
    async fn restores(&self, device: &str) -> Result<Vec<RestoreCheck>, CommandFailure> {
        let folder = tempfile::tempdir()?;
        let node = self.storing_node(device, folder.path()).await?;
        let layout = node.engine.info().await?.kv.map(|kv| kv.layout);
        let Some(layout) = layout else { return Ok(Vec::new()) };
        let mut prompts = Prompts::of(&node.engine).await?;
        let [warm_up, prompt, other, again] = [(); 4].map(|()| prompts.next(self.n_tokens));
        kept_reply(&node.engine, &warm_up, WARM_UP).await?;
        let computed = kept_reply(&node.engine, &prompt, self.n_new).await?;
        // In idle time it is copied, and written.
        node.settle().await?;
        kept_reply(&node.engine, &other, WARM_UP).await?;
        let check =
            |from: KvTier, restored: &ComparedReply| RestoreCheck::of(from, prompt.len(), &computed, restored, &layout);
        let from_memory = check(KvTier::Memory, &kept_reply(&node.engine, &prompt, self.n_new).await?);
        node.settle().await?;
        node.unplug().await;
        let from_disk = async || -> Result<_, CommandFailure> {
            let node = self.storing_node(device, folder.path()).await?;
            kept_reply(&node.engine, &again, WARM_UP).await?;
            Ok(check(KvTier::Disk, &kept_reply(&node.engine, &prompt, self.n_new).await?))
        };
        let from_disk = from_disk().await;
        let from_disk = from_disk.unwrap_or_else(|CommandFailure(why)| Some(RestoreCheck::failed(KvTier::Disk, why)));
        Ok(from_memory.into_iter().chain(from_disk).collect())
    }

    async fn handoff(&self, from: &str, to: &ComparedNode) -> Result<HandoffCheck, CommandFailure> {
        let origin = self.origin(from).await?;
        let theirs = origin.engine.info().await?;
        let ours = to.node.engine.info().await?;
        let (Some(their_kv), Some(our_kv)) = (theirs.kv, ours.kv) else {
            return Err(CommandFailure("this model's KV cannot be handed over".into()));
        };
        // On another machine a program may have other kernels for a device of the same name.
        let is_here = origin._process.is_some();
        let same_device = is_here && theirs.devices == ours.devices && !theirs.devices.is_empty();
        if self.warms_up {
            reply(&to.node.engine, &to.warm_up, WARM_UP, Some(&origin.url)).await?;
        }
        // The decode node computes the last token of the prompt itself.
        let tokens = to.prompt[..to.prompt.len() - 1].to_vec();
        let other_weights = their_kv.fingerprint != our_kv.fingerprint;
        let mut rounds = Vec::new();
        let mut worst = Difference::NONE;
        for _ in 0..self.n_rounds {
            let handed = reply(&to.node.engine, &to.prompt, self.n_new, Some(&origin.url)).await?;
            let timings = handed.handoff.ok_or_else(|| CommandFailure("the node did not take the KV".into()))?;
            if let Some(failure) = timings.failure {
                let refused = HandoffCheck { other_weights, ..HandoffCheck::failed(failure.as_str().to_owned()) };
                // What the layers compute shows why.
                let distances = match other_weights && their_kv.layout == our_kv.layout {
                    true => self.distances(&origin, &to.node, tokens, &our_kv.layout).await?,
                    false => KvDistances::default(),
                };
                return Ok(refused.with_distances(&distances));
            }
            worst = worst.or_worse(Difference::between(&to.alone, &handed));
            rounds.push((timings, handed.ttft));
        }
        let distances = self.distances(&origin, &to.node, tokens, &our_kv.layout).await?;
        let has_window = our_kv.layout.sections.iter().any(|section| section.window.is_some());
        let ends = match (other_weights, same_device && !has_window) {
            (true, _) => Ends::OtherWeights,
            (false, false) => Ends::OtherKernels,
            (false, true) => Ends::Same,
        };
        let verdict = Verdict::on(worst, ends);
        let kv_losses = CodecLoss::usable(&their_kv.losses);
        let check = HandoffCheck { other_weights, verdict, kv_losses, ..HandoffCheck::of_rounds(&rounds, worst) };
        Ok(check.with_distances(&distances))
    }

    /// Distances between the KV of two nodes, of every layer. None if they cannot be compared.
    async fn distances(
        &self,
        origin: &Origin,
        to: &NodeProcess,
        tokens: Vec<Token>,
        layout: &KvLayout,
    ) -> Result<KvDistances, CommandFailure> {
        let source =
            |url, engine| CaptureSource { url, engine, key: &self.key, transport: &self.transport, ephemeral: true };
        let theirs = capture(source(&origin.url, &origin.engine), tokens.clone()).await?;
        let ours = capture(source(&to.url, &to.engine), tokens).await?;
        let layers = Gguf::open(Path::new(&self.model)).map(|file| file.layer_numbers(layout)).unwrap_or_default();
        let [ours, theirs] =
            [ours, theirs].map(|kv| ComputedKv { chunks: kv.chunks, states: kv.state.map(VerifiedState::into_part) });
        Ok(canary::compare(layout, &layers, &ours, &theirs).unwrap_or_default())
    }

    /// The nodes on other machines that draft, and the others. One that does not answer is among these, where that is reported.
    async fn by_role(&self) -> (Vec<&String>, Vec<&String>) {
        let mut by_role = (Vec::new(), Vec::new());
        for url in &self.prefill {
            let engine = RemoteEngine::with_transport(&NodeAddress::Url(url.clone()), &self.key, &self.transport);
            let info = match engine {
                Ok(engine) => engine.info().await.ok(),
                Err(_) => None,
            };
            match info.is_some_and(|info| info.role.drafts()) {
                true => by_role.0.push(url),
                false => by_role.1.push(url),
            }
        }
        by_role
    }

    /// A node that computes prompts, on a device here or on another machine.
    async fn origin(&self, name: &str) -> Result<Origin, CommandFailure> {
        if self.devices.iter().any(|device| device.name == name) {
            let process = self.node(name, "prefill").await?;
            let url = process.url.clone();
            let engine = process.engine.clone();
            return Ok(Origin { url, engine, _process: Some(process) });
        }
        let url = name.to_owned();
        let engine = RemoteEngine::with_transport(&NodeAddress::Url(url.clone()), &self.key, &self.transport)?;
        Ok(Origin { url, engine: engine.into(), _process: None })
    }

    async fn node(&self, device: &str, role: &str) -> Result<NodeProcess, CommandFailure> {
        self.node_with(device, &["--role", role, "--slots", "2"].map(OsString::from)).await
    }

    /// A node with one slot, which keeps KV in this folder.
    async fn storing_node(&self, device: &str, folder: &Path) -> Result<NodeProcess, CommandFailure> {
        let mut disk = OsString::from("disk=");
        disk.push(folder);
        self.node_with(device, &["--slots".into(), "1".into(), "--kv-store".into(), disk]).await
    }

    async fn node_with(&self, device: &str, more: &[OsString]) -> Result<NodeProcess, CommandFailure> {
        let args = ["--device".into(), device.into(), "--model".into(), self.model.clone()];
        let args = args.iter().chain(more).chain(&self.node_args).cloned();
        NodeProcess::start(&self.key, args).await
    }
}
