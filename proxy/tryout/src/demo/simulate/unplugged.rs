//! A machine is unplugged while it works, and plugged in again. Requests go on.

use std::time::Duration;

use baton_proxy::observe::snapshot::EndpointState;
use baton_proxy::serve::CommandFailure;

use super::super::ask::{DemoReply, ask};
use super::cluster::{MachineIndex, RunningCluster, SimulatedCluster, text};
use super::said::{NAMES, routed, say, waterfall};

/// A prompt that the Spark computes for 1.5 s.
const N_PROMPT: usize = 8_170;
const N_REPLY: u32 = 32;

/// A reply that is decoded for more than a second.
const N_LONG_REPLY: u32 = 64;

/// How long the Spark works on the prompt before it is unplugged.
const WORK: Duration = Duration::from_millis(600);

/// Tokens of the reply before the Mac is unplugged.
const N_BEFORE: u32 = 8;

pub(super) async fn play(cluster: &mut RunningCluster) -> Result<(), CommandFailure> {
    let (heading, during, machine) = match cluster.shape {
        SimulatedCluster::SparkMac => spark_leaves(cluster).await?,
        SimulatedCluster::TwoSparksTwoMacs => mac_leaves(cluster).await?,
    };
    say("It is away.")?;
    let away = ask(&cluster.endpoint.base, &text("While it is away", N_PROMPT), N_REPLY).await?;
    cluster.plug_in(machine).await?;
    cluster.well().await?;
    say("It is plugged in again, and ready.")?;
    let back = ask(&cluster.endpoint.base, &text("When it is back", N_PROMPT), N_REPLY).await?;
    let replies = [(heading, during), ("Without it", away), ("With it", back)];
    let scale = replies.iter().map(|(_, reply)| reply.total_ms).fold(1.0, f64::max);
    for (heading, reply) in replies {
        say(&waterfall(&routed(heading, &reply), &reply, scale, NAMES.decode))?;
    }
    Ok(())
}

/// The heading of the request during which a machine left, its reply, and the machine.
type Left = (&'static str, DemoReply, MachineIndex);

/// The Spark leaves in the middle of a prefill: the Mac keeps what has come and computes the rest.
async fn spark_leaves(cluster: &mut RunningCluster) -> Result<Left, CommandFailure> {
    say("\n3. The Spark is unplugged while it computes a prompt")?;
    let base = cluster.endpoint.base.clone();
    let prompt = text("Unplugged", N_PROMPT);
    let spark = MachineIndex::Spark(0);
    let unplug = async {
        tokio::time::sleep(WORK).await;
        cluster.machine(spark).unplug().await
    };
    let (reply, ()) = tokio::try_join!(ask(&base, &prompt, N_REPLY), unplug)?;
    Ok(("The request during which it left", reply, spark))
}

/// The Mac leaves in the middle of a reply: the other one continues it.
async fn mac_leaves(cluster: &mut RunningCluster) -> Result<Left, CommandFailure> {
    say("\n3. A Mac is unplugged while it generates a reply")?;
    let base = cluster.endpoint.base.clone();
    let prompt = text("Unplugged", N_PROMPT);
    let unplug = async {
        let is_generating = |state: &EndpointState| generating(state).is_some();
        cluster.until("the reply does not begin", is_generating).await?;
        let decode = generating(&cluster.state().await?).unwrap_or_default();
        let at = (0..cluster.macs.len()).find(|at| decode == format!("decode-{}", at + 1)).unwrap_or_default();
        let mac = MachineIndex::Mac(at);
        cluster.machine(mac).unplug().await?;
        Ok::<_, CommandFailure>(mac)
    };
    let (reply, mac) = tokio::try_join!(ask(&base, &prompt, N_LONG_REPLY), unplug)?;
    Ok(("The request during which it left, continued on the other Mac", reply, mac))
}

/// The node whose reply has begun.
fn generating(state: &EndpointState) -> Option<String> {
    let begun = state.open.iter().find(|request| request.n_completion >= N_BEFORE)?;
    Some(begun.decode.clone())
}
