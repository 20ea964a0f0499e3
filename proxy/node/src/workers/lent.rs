//! How many of a model's first layers a worker computes.

use baton_engines::workers::tunnel::{TunnelSetup, WorkerSource};
use baton_model::gguf::Gguf;
use baton_model::options::LentLayers;

use super::waiting::until_usable;
use crate::event::Tell;
use crate::failure::NodeFailure;
use crate::options::WantedEngine;

/// The lent layers of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LentOf {
    /// The first ones, which are lent.
    pub(super) n: u32,
    /// All of them, without the output.
    pub(super) n_layers: u32,
}

/// The wanted number, or with `auto` as many layers as the worker's memory holds. `None`: the layers are divided otherwise. Errors:
/// the model has not so many layers, or the worker has no room for them.
pub(super) async fn layers(
    WantedEngine { options, model }: WantedEngine<'_>,
    setup: &TunnelSetup,
    worker: &WorkerSource,
    tell: Tell,
) -> Result<Option<LentOf>, NodeFailure> {
    let Some((wanted, model)) = options.lend_layers.zip(model) else { return Ok(None) };
    let header = Gguf::open(model).map_err(NodeFailure::setup)?;
    let n_layers = header.n_layer().and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
    let n_wanted = match wanted {
        LentLayers::First(0) => return Ok(Some(LentOf { n: 0, n_layers })),
        LentLayers::First(n) if wanted.exceed(n_layers) => {
            return Err(NodeFailure::setup(format!("--lend-layers {n} is more than the model's {n_layers} layers")));
        }
        LentLayers::First(n) => Some(n),
        LentLayers::Planned(_) => None,
    };
    let memory = until_usable(worker, tell, async || setup.memory(worker).await).await?;
    let cells = options.kv_cells.or(options.ctx_size).unwrap_or(DEFAULT_CELLS);
    let kv_of_all = header.kv_bytes_per_token(options.cache_types()).unwrap_or(0).saturating_mul(cells.into());
    let kv = kv_of_all.checked_div(n_layers.into()).unwrap_or(0);
    let room = needed(&header.layer_bytes(n_layers), kv);
    let n_fitting = room.iter().take_while(|bytes| **bytes <= memory).count() as u32;
    let n = n_wanted.unwrap_or(n_fitting.max(1));
    if n > n_fitting {
        let (name, mib) = (worker.name(), memory >> 20);
        let layers = if n == 1 { "the first layer".to_owned() } else { format!("the first {n} layers") };
        let more = room.get(n as usize - 1).copied().unwrap_or(u64::MAX).div_ceil(1 << 20);
        return Err(NodeFailure::Elsewhere {
            message: format!(
                "the worker {name} lends {mib} MiB, too few for {layers}, which need {more} MiB with their KV of {cells} \
                 tokens and an eighth to spare: a larger --lend-memory of the worker, a smaller --ctx-size or a smaller \
                 --lend-layers mends it"
            ),
            summary: "the worker lends too little memory for the layers",
        });
    }
    Ok(Some(LentOf { n, n_layers }))
}

/// Cells of the cache that are assumed if the operator names neither them nor a context.
const DEFAULT_CELLS: u32 = 32_768;

/// The memory that the first layer needs, the first two and so on, with their `kv` bytes each. An eighth stays free for buffers.
fn needed(layers: &[u64], kv: u64) -> Vec<u64> {
    let ends = layers.iter().scan(0u64, |sum, bytes| {
        *sum = sum.saturating_add(*bytes).saturating_add(kv);
        Some(sum.saturating_add(sum.div_ceil(7)))
    });
    ends.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_layers_need_their_kv_and_an_eighth_to_spare() {
        assert_eq!(needed(&[700; 3], 0), [800, 1600, 2400]);
        assert_eq!(needed(&[700, 100], 7), [808, 931]);
        assert_eq!(needed(&[u64::MAX; 2], u64::MAX), [u64::MAX; 2]);
        assert_eq!(needed(&[], 5), [0; 0]);
    }
}
