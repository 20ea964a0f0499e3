//! One long prompt, on the Mac alone, on the Spark alone, and handed over.

use baton_proxy::serve::CommandFailure;

use super::super::ask::ask;
use super::cluster::{RunningCluster, text};
use super::said::{NAMES, routed, say, waterfall};
use crate::endpoint_process::EndpointProcess;

/// The published prompt and reply, tokens. The chat template adds some tokens.
const N_PROMPT: usize = 8_170;
const N_REPLY: u32 = 32;

/// Returns the endpoints of the two machines alone, whose pages show their requests.
pub(super) async fn play(cluster: &RunningCluster) -> Result<[EndpointProcess; 2], CommandFailure> {
    let (mac, spark) = tokio::try_join!(cluster.alone(&cluster.macs[0]), cluster.alone(&cluster.sparks[0]))?;
    say(&format!(
        "\n1. One long prompt, three ways\nThe page of the Mac alone: {}/\nThe page of the Spark alone: {}/",
        mac.base, spark.base
    ))?;
    let (on_mac, on_spark) = (text("On the Mac", N_PROMPT), text("On the Spark", N_PROMPT));
    // Two machines: the two direct requests do not wait for each other.
    let (on_mac, on_spark) = tokio::try_join!(ask(&mac.base, &on_mac, N_REPLY), ask(&spark.base, &on_spark, N_REPLY))?;
    let handed = ask(&cluster.endpoint.base, &text("On both", N_PROMPT), N_REPLY).await?;
    let scale = on_mac.total_ms.max(on_spark.total_ms).max(handed.total_ms);
    say(&waterfall("The Mac alone", &on_mac, scale, NAMES.decode))?;
    say(&waterfall("The Spark alone", &on_spark, scale, NAMES.prefill))?;
    let heading = routed("Handed over: the Spark prefills, the Mac decodes", &handed);
    say(&waterfall(&heading, &handed, scale, NAMES.decode))?;
    Ok([mac, spark])
}
