//! One long prompt, on the Mac alone, on the Spark alone, and handed over.

use baton_proxy::serve::CommandFailure;

use super::super::ask::ask;
use super::cluster::{RunningCluster, text};
use super::said::{NAMES, say, waterfall};

/// The published prompt and reply, tokens. The chat template adds some tokens.
const N_PROMPT: usize = 8_170;
const N_REPLY: u32 = 32;

pub(super) async fn play(cluster: &RunningCluster) -> Result<(), CommandFailure> {
    say("\n1. One long prompt, three ways")?;
    // Two machines: the two direct requests do not wait for each other.
    let (on_mac, on_spark) = tokio::try_join!(
        async {
            let mac = cluster.alone(&cluster.macs[0]).await?;
            ask(&mac.base, &text("On the Mac", N_PROMPT), N_REPLY).await
        },
        async {
            let spark = cluster.alone(&cluster.sparks[0]).await?;
            ask(&spark.base, &text("On the Spark", N_PROMPT), N_REPLY).await
        },
    )?;
    let handed = ask(&cluster.endpoint.base, &text("On both", N_PROMPT), N_REPLY).await?;
    let scale = on_mac.total_ms.max(on_spark.total_ms).max(handed.total_ms);
    say(&waterfall("The Mac alone", &on_mac, scale, NAMES.decode))?;
    say(&waterfall("The Spark alone", &on_spark, scale, NAMES.prefill))?;
    say(&waterfall("Handed over: the Spark prefills, the Mac decodes", &handed, scale, NAMES.decode))?;
    Ok(())
}
