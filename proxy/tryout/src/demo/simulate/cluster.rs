//! The processes of a simulated cluster: a node for each machine, and an endpoint in front of all of them.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use baton_engines::sim::SimMachine;
use baton_link::transport::short_body;
use baton_proxy::observe::snapshot::{EndpointState, NodeReport};
use baton_proxy::serve::CommandFailure;
use baton_proxy::targets::nodes::NodeState;
use clap::ValueEnum;

use super::super::ask::DemoReply;
use super::super::serve::serve;
use crate::endpoint_process::EndpointProcess;
use crate::machines::{DGX_SPARK, KV_BYTES_PER_TOKEN, M3_ULTRA, MachineSpec, link, sharing_cost};
use crate::node_process::NodeProcess;

/// The context at which decode rates are taken, as for the published table.
const N_CONTEXT: u32 = 8_192;

/// The link between the machines, gigabits per second.
const GBPS: f64 = 10.0;

/// Sequences that each machine decodes together.
const N_SLOTS: &str = "8";

/// Tokens that a sequence may hold.
const N_CTX: &str = "32768";

/// The longest wait for the endpoint to see what was changed, far more than it needs.
const DEADLINE: Duration = Duration::from_secs(60);

/// The pause between two looks at the endpoint's state.
const POLL: Duration = Duration::from_millis(100);

/// A state has some kilobytes for each node.
const MAX_STATE_BYTES: usize = 4 << 20;

/// The machines that are simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::demo) enum SimulatedCluster {
    /// A DGX Spark that prefills and an M3 Ultra that decodes
    SparkMac,
    /// Two of each
    TwoSparksTwoMacs,
}

impl SimulatedCluster {
    /// The number of Sparks, and of Macs.
    fn n_pairs(self) -> usize {
        match self {
            SimulatedCluster::SparkMac => 1,
            SimulatedCluster::TwoSparksTwoMacs => 2,
        }
    }

    /// What it is, for people.
    pub(super) fn about(self) -> String {
        let machines = match self {
            SimulatedCluster::SparkMac => "A DGX Spark (prefill-1) and an M3 Ultra (decode-1)",
            SimulatedCluster::TwoSparksTwoMacs => "Two DGX Sparks (prefill-1, -2) and two M3 Ultras (decode-1, -2)",
        };
        format!(
            "{machines} run Llama-3.1-8B FP16, linked by {GBPS} Gb/s. The endpoint is real; the machines are \
             simulated at published rates (docs/planning.md)."
        )
    }
}

/// A machine, and its process unless it is unplugged.
pub(super) struct SimulatedMachine {
    spec: MachineSpec,
    /// `127.0.0.1:PORT`, the same each time it is plugged in.
    address: String,
    process: Option<NodeProcess>,
}

/// A running cluster. Dropping it ends every process.
pub(super) struct RunningCluster {
    pub(super) shape: SimulatedCluster,
    /// In front of all machines.
    pub(super) endpoint: EndpointProcess,
    /// In the order of the endpoint's names: `prefill-1`, …
    pub(super) sparks: Vec<SimulatedMachine>,
    /// `decode-1`, …
    pub(super) macs: Vec<SimulatedMachine>,
    key: String,
}

impl SimulatedMachine {
    async fn start(spec: MachineSpec, key: &str) -> Result<SimulatedMachine, CommandFailure> {
        let mut machine = SimulatedMachine { spec, address: "127.0.0.1:0".into(), process: None };
        machine.plug_in(key).await?;
        if let Some(node) = &machine.process {
            machine.address = node.url.trim_start_matches("http://").to_owned();
        }
        Ok(machine)
    }

    async fn plug_in(&mut self, key: &str) -> Result<(), CommandFailure> {
        let machine = simulated(&self.spec).to_value();
        let args = ["--engine", "sim", "--slots", N_SLOTS, "--ctx-size", N_CTX, "--name", "llama-3.1-8b"];
        let args = args.into_iter().chain(["--sim-machine", &machine]).map(OsString::from);
        self.process = Some(NodeProcess::start_at(&self.address, key, args).await?);
        Ok(())
    }

    /// Kills its process, as pulling its plug does.
    pub(super) async fn unplug(&mut self) -> Result<(), CommandFailure> {
        if let Some(process) = self.process.take() {
            process.unplug().await;
        }
        Ok(())
    }
}

/// An endpoint whose log has errors alone, unless the operator asks for more: the play says what happens.
async fn quiet(key: &str, args: impl IntoIterator<Item = OsString>) -> Result<EndpointProcess, CommandFailure> {
    let log = std::env::var("RUST_LOG").unwrap_or_else(|_| "error".into());
    serve(key, args, &[("RUST_LOG", &log)]).await
}

fn simulated(spec: &MachineSpec) -> SimMachine {
    let link = link(GBPS);
    SimMachine {
        name: spec.name.to_owned(),
        prefill_tps: spec.prefill_tps,
        decode_tps: spec.decode_tps(N_CONTEXT),
        decode_sharing_cost: sharing_cost(N_CONTEXT),
        kv_bytes_per_token: KV_BYTES_PER_TOKEN,
        link_bytes_per_second: link.bytes_per_second,
        link_round_trip_ms: link.round_trip.as_secs_f64() * 1e3,
    }
}

impl RunningCluster {
    pub(super) async fn start(shape: SimulatedCluster) -> Result<RunningCluster, CommandFailure> {
        let key = uuid::Uuid::new_v4().to_string();
        let mut sparks = Vec::new();
        let mut macs = Vec::new();
        for _ in 0..shape.n_pairs() {
            sparks.push(SimulatedMachine::start(DGX_SPARK, &key).await?);
            macs.push(SimulatedMachine::start(M3_ULTRA, &key).await?);
        }
        let named = |flag: &'static str, machines: &[SimulatedMachine]| {
            machines.iter().flat_map(|m| [flag.to_owned(), m.address.clone()]).map(OsString::from).collect::<Vec<_>>()
        };
        let args = [named("--decode", &macs), named("--prefill", &sparks)].concat();
        let endpoint = quiet(&key, args).await?;
        Ok(RunningCluster { shape, endpoint, sparks, macs, key })
    }

    /// An endpoint in front of one machine alone, which computes prompts and replies.
    pub(super) async fn alone(&self, machine: &SimulatedMachine) -> Result<EndpointProcess, CommandFailure> {
        quiet(&self.key, ["--no-calibration", "--decode", &machine.address].map(OsString::from)).await
    }

    /// Starts the process of an unplugged machine again.
    pub(super) async fn plug_in(&mut self, machine: MachineIndex) -> Result<(), CommandFailure> {
        let key = self.key.clone();
        self.machine(machine).plug_in(&key).await
    }

    pub(super) fn machine(&mut self, index: MachineIndex) -> &mut SimulatedMachine {
        match index {
            MachineIndex::Spark(at) => &mut self.sparks[at],
            MachineIndex::Mac(at) => &mut self.macs[at],
        }
    }

    /// Waits until every rate was measured.
    pub(super) async fn calibrated(&self) -> Result<(), CommandFailure> {
        self.until("the machines are not measured", |state| {
            state.models.iter().all(|model| {
                let has_links = !model.links.is_empty() && model.links.iter().all(|link| link.bytes_per_second > 0.0);
                let is_measured = |node: &NodeReport| is_well(node) && !node.prefill_rates.is_empty();
                has_links && model.nodes.iter().all(is_measured)
            })
        })
        .await
    }

    /// Waits until every machine is ready and trusted.
    pub(super) async fn well(&self) -> Result<(), CommandFailure> {
        let is_well = |state: &EndpointState| state.models.iter().flat_map(|model| &model.nodes).all(is_well);
        self.until("a machine does not come back", is_well).await
    }

    /// Waits until the endpoint's state is as wanted.
    pub(super) async fn until(
        &self,
        late: &str,
        is_wanted: impl Fn(&EndpointState) -> bool,
    ) -> Result<(), CommandFailure> {
        let began = Instant::now();
        while !is_wanted(&self.state().await?) {
            if began.elapsed() > DEADLINE {
                return Err(CommandFailure(late.to_owned()));
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// The endpoint's state, which marks its machines as simulated.
    pub(super) async fn state(&self) -> Result<EndpointState, CommandFailure> {
        let client = reqwest::Client::builder().no_proxy().timeout(DEADLINE).build()?;
        let reply = client.get(format!("{}/baton/state", self.endpoint.base)).send().await?.error_for_status()?;
        Ok(serde_json::from_slice(&short_body(reply, MAX_STATE_BYTES).await?)?)
    }

    pub(super) async fn stop(self) {
        self.endpoint.stop().await;
    }
}

fn is_well(node: &NodeReport) -> bool {
    node.state == NodeState::Ready && !node.breaker.is_open
}

/// A machine of the cluster.
#[derive(Debug, Clone, Copy)]
pub(super) enum MachineIndex {
    Spark(usize),
    Mac(usize),
}

/// Requests that must all succeed.
pub(super) async fn all(
    requests: impl IntoIterator<Item = impl Future<Output = Result<DemoReply, CommandFailure>>>,
) -> Result<Vec<DemoReply>, CommandFailure> {
    futures::future::try_join_all(requests).await
}

/// A text of `n_tokens` tokens of the simulator, which are bytes. Texts with other tags share no cached prefix.
pub(super) fn text(tag: &str, n_tokens: usize) -> String {
    let words = crate::prompts::TEXT.bytes().filter(|byte| byte.is_ascii_graphic() || *byte == b' ').cycle();
    format!("{tag}: ").bytes().chain(words).take(n_tokens).map(char::from).collect()
}
