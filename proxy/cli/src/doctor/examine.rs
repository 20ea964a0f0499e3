//! The checks: each device alone, then every handoff between two of them, then from other machines.

use std::ffi::OsString;

use baton_bench::capture::{CaptureSource, capture};
use baton_bench::node_process::NodeProcess;
use baton_bench::prompts::Prompts;
use baton_engines::Engine;
use baton_engines::handoff::canary;
use baton_engines::llama::devices::{self, Device};
use baton_engines::remote::{NodeAddress, RemoteEngine};
use baton_engines::transport::Transport;
use baton_fetch as models;
use baton_proxy::serve::{CommandFailure, model_files};
use baton_schemas::Token;
use baton_schemas::kv::KvLayout;
use baton_schemas::node::KEY_VARIABLE;

use super::args::DoctorArgs;
use super::compare::{ComparedReply, Difference, reply};
use super::report::{DeviceSpeed, DoctorReport, HandoffCheck, Verdict};

/// Mean KL in nats up to which kernels of different devices are as close as they can be; across software Vulkan and CPU
/// 2e-3 to 8e-3 was measured, and where the cells of a sliding window lie alone moves it by 5e-3.
const MAX_KL: f64 = 1e-2;

/// Tokens of a reply that only warms a node up.
const WARM_UP: u32 = 2;

/// Where KV comes from.
struct Origin {
    /// A device's name, or an address.
    name: String,
    url: String,
    engine: std::sync::Arc<RemoteEngine>,
    /// The process, if it was started here.
    _process: Option<NodeProcess>,
}

/// An examination under way.
pub(super) struct Examination {
    model: OsString,
    args: DoctorArgs,
    transport: Transport,
    /// The cluster's, or one for this run.
    key: String,
    devices: Vec<Device>,
    report: DoctorReport,
}

impl Examination {
    /// Finds the devices and the model.
    pub(super) async fn begin(args: DoctorArgs) -> Result<Examination, CommandFailure> {
        let cluster_key = std::env::var(KEY_VARIABLE).ok().filter(|key| !key.is_empty());
        if cluster_key.is_none() && !args.prefill.is_empty() {
            return Err(CommandFailure(format!("--prefill needs the cluster's key: set {KEY_VARIABLE}")));
        }
        let known = devices::all()?;
        let unknown = |name: &&String| !known.iter().any(|device| device.name.eq_ignore_ascii_case(name));
        if let Some(name) = args.devices.iter().find(unknown) {
            let names: Vec<&str> = known.iter().map(|device| device.name.as_str()).collect();
            return Err(CommandFailure(format!("there is no device {name:?} here; there is {}", names.join(", "))));
        }
        let wanted = |device: &Device| {
            args.devices.is_empty() || args.devices.iter().any(|n| device.name.eq_ignore_ascii_case(n))
        };
        let report = DoctorReport::new(&known);
        let devices = known.into_iter().filter(wanted).collect();
        let model = models::pull(&args.model, &model_files::pull_options()?).await?.into();
        let transport = args.transport.transport()?;
        let key = cluster_key.unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
        Ok(Examination { model, args, transport, key, devices, report })
    }

    /// Runs every check. What fails is in the report; an error is what no check could go on after.
    pub(super) async fn complete(mut self) -> Result<DoctorReport, CommandFailure> {
        let names: Vec<String> = self.devices.iter().map(|device| device.name.clone()).collect();
        for to in &names {
            eprintln!("{to}: starting a decode node");
            let decode = match self.node(to, "both").await {
                Ok(node) => node,
                Err(CommandFailure(why)) => {
                    self.report.speeds.push(DeviceSpeed::failed(to, why));
                    continue;
                }
            };
            let mut prompts = Prompts::of(&decode.engine).await?;
            let prompt = prompts.next(self.args.tokens as usize);
            let alone = self.alone(to, &decode, prompts.next(self.args.tokens as usize), &prompt).await?;
            for from in names.iter().chain(&self.args.prefill.clone()) {
                eprintln!("{from} → {to}");
                let outcome = self.handoff(from, &decode, &prompt, &alone).await;
                let outcome = outcome.unwrap_or_else(|CommandFailure(why)| HandoffCheck::failed(why));
                self.report.handoffs.push(HandoffCheck { from: from.clone(), to: to.clone(), ..outcome });
            }
        }
        Ok(self.report)
    }

    /// Measures a device's speed, and returns its own reply to a prompt for comparison with replies after a handoff.
    async fn alone(
        &mut self,
        name: &str,
        node: &NodeProcess,
        warm_up: Vec<Token>,
        prompt: &[Token],
    ) -> Result<ComparedReply, CommandFailure> {
        reply(&node.engine, &warm_up, WARM_UP, None).await?;
        let alone = reply(&node.engine, prompt, self.args.new_tokens, None).await?;
        self.report.speeds.push(DeviceSpeed {
            device: name.to_owned(),
            prefill_tps: prompt.len() as f64 / alone.ttft,
            decode_tps: alone.decode_tps,
            failure: None,
        });
        Ok(alone)
    }

    async fn handoff(
        &self,
        from: &str,
        to: &NodeProcess,
        prompt: &[Token],
        alone: &ComparedReply,
    ) -> Result<HandoffCheck, CommandFailure> {
        let origin = self.origin(from).await?;
        let theirs = origin.engine.info().await?;
        let ours = to.engine.info().await?;
        let (Some(their_kv), Some(our_kv)) = (theirs.kv, ours.kv) else {
            return Err(CommandFailure("this model's KV cannot be handed over".into()));
        };
        let same_device = theirs.devices == ours.devices && !theirs.devices.is_empty();
        let handed = reply(&to.engine, prompt, self.args.new_tokens, Some(&origin.url)).await?;
        let timings = handed.handoff.ok_or_else(|| CommandFailure("the node did not take the KV".into()))?;
        if let Some(failure) = timings.failure {
            return Err(CommandFailure(failure.as_str().to_owned()));
        }
        let difference = Difference::between(alone, &handed);
        // The decode node computes the last token of the prompt itself.
        let kv = self.distance(&origin, to, prompt[..prompt.len() - 1].to_vec(), &our_kv.layout).await?;
        let has_window = our_kv.layout.sections.iter().any(|section| section.window.is_some());
        let must_be_exact = same_device && their_kv.fingerprint == our_kv.fingerprint && !has_window;
        Ok(HandoffCheck {
            from: origin.name,
            n_bytes: timings.n_bytes,
            kv_distance: kv,
            mean_kl: difference.mean_kl,
            n_agreed: difference.n_agreed,
            n_compared: difference.n_compared,
            prefill_ms: timings.prefill_ms,
            unhidden_ms: timings.unhidden_ms,
            verdict: verdict(difference, must_be_exact),
            ..HandoffCheck::default()
        })
    }

    /// Distance between the KV of two nodes: relative L2 of the worst layer.
    async fn distance(
        &self,
        origin: &Origin,
        to: &NodeProcess,
        tokens: Vec<Token>,
        layout: &KvLayout,
    ) -> Result<Option<f64>, CommandFailure> {
        let source =
            |url, engine| CaptureSource { url, engine, key: &self.key, transport: &self.transport, ephemeral: true };
        let theirs = capture(source(&origin.url, &origin.engine), tokens.clone()).await?;
        let ours = capture(source(&to.url, &to.engine), tokens).await?;
        // Frames leave out unneeded parts of a sliding window. Then the caches cannot be compared as a whole.
        let distance = canary::distance_of_chunks(layout, &ours.chunks, &theirs.chunks);
        Ok(Some(distance).filter(|distance| distance.is_finite()))
    }

    /// A node that computes prompts, on a device here or on another machine.
    async fn origin(&self, name: &str) -> Result<Origin, CommandFailure> {
        if self.devices.iter().any(|device| device.name == name) {
            let process = self.node(name, "prefill").await?;
            let url = process.url.clone();
            let engine = process.engine.clone();
            return Ok(Origin { name: name.to_owned(), url, engine, _process: Some(process) });
        }
        let url = if name.contains("://") { name.to_owned() } else { format!("http://{name}") };
        let engine = RemoteEngine::with_transport(&NodeAddress::Url(url.clone()), &self.key, &self.transport)?;
        Ok(Origin { name: name.to_owned(), url, engine: engine.into(), _process: None })
    }

    async fn node(&self, device: &str, role: &str) -> Result<NodeProcess, CommandFailure> {
        let mut args: Vec<OsString> = ["--role", role, "--device", device, "--slots", "2"].map(OsString::from).into();
        args.extend(["--model".into(), self.model.clone()]);
        args.extend(self.args.threads.iter().flat_map(|n| ["--threads".into(), n.to_string().into()]));
        args.extend(self.args.transport.to_args());
        NodeProcess::start(&self.key, args).await
    }
}

fn verdict(difference: Difference, must_be_exact: bool) -> Verdict {
    match difference {
        Difference { is_exact: true, .. } => Verdict::Exact,
        _ if must_be_exact => {
            Verdict::Failed("the reply differs from the one without a handoff, although the device is the same".into())
        }
        Difference { mean_kl, .. } if mean_kl <= MAX_KL => Verdict::Close,
        Difference { mean_kl, .. } => {
            Verdict::Failed(format!("the mean KL is {mean_kl:.1e}; different kernels explain at most {MAX_KL:.0e}"))
        }
    }
}
