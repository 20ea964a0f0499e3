//! The devices that a model is placed on: those of workers, and this machine's.

use baton_model::gguf::COMPUTE_RESERVE;
use baton_model::options::WorkerEndpoint;
use baton_schemas::worker::WorkerShare;

use super::shares::layers_of;
use super::{devices, rpc};
use crate::serving::LoadError;
use crate::serving::memory::available_memory;

/// Where a model is computed. Without workers, llama.cpp chooses by the options.
pub(crate) struct Placed {
    /// Bytes of memory for weights and KV.
    pub(super) memory: u64,
    /// llama.cpp's indexes of the devices, in the order of their layers. Empty without workers.
    pub(super) indices: Vec<usize>,
    /// The devices for people, with the numbers of their workers.
    pub(super) names: Vec<String>,
    /// Free memory of each device, by which llama.cpp divides the layers.
    free: Vec<u64>,
    workers: Vec<(WorkerEndpoint, Vec<usize>)>,
}

impl Placed {
    /// A model on this machine's devices alone.
    pub(crate) fn alone() -> Placed {
        let (indices, names, free, workers) = Default::default();
        Placed { memory: available_memory(), indices, names, free, workers }
    }

    /// Connects to workers. Blocking.
    pub(super) fn new(workers: &[WorkerEndpoint]) -> Result<Placed, LoadError> {
        let found = workers.iter().map(|worker| Ok((worker.clone(), rpc::add_server(worker.endpoint)?)));
        let workers = found.collect::<Result<Vec<(WorkerEndpoint, Vec<usize>)>, LoadError>>()?;
        if workers.is_empty() {
            return Ok(Placed::alone());
        }
        let of_workers: Vec<Vec<usize>> = workers.iter().map(|(_, indices)| indices.clone()).collect();
        let all = devices::with_workers(&of_workers)?;
        if all.len() > devices::most_for_model()? {
            return Err(LoadError::Config(format!(
                "the workers and this machine have {} devices, and a model can be divided among {}",
                all.len(),
                devices::most_for_model()?
            )));
        }
        let own: Vec<_> = all.iter().skip(of_workers.iter().map(Vec::len).sum()).collect();
        let memory = memory_of(workers.iter().map(|(worker, _)| worker), !own.is_empty(), available_memory());
        // Without addresses: clients may see this.
        let with_worker = |(i, (worker, _)): (usize, &(WorkerEndpoint, Vec<usize>))| {
            worker.devices.iter().map(|device| format!("worker-{}: {device}", i + 1)).collect::<Vec<_>>()
        };
        let of_own = own.iter().map(|device| format!("{} ({})", device.name, device.description));
        let names = workers.iter().enumerate().flat_map(with_worker).chain(of_own).collect();
        let free = all.iter().map(|device| device.memory_free as u64).collect();
        let indices = all.iter().map(|device| device.index).collect();
        Ok(Placed { memory, indices, names, free, workers })
    }

    pub(super) fn has_workers(&self) -> bool {
        !self.workers.is_empty()
    }

    /// Returns true if several devices compute different layers at the same time.
    pub(super) fn is_pipeline(&self) -> bool {
        self.indices.len() > 1
    }

    /// The workers and how many of a model's layers each computes.
    pub(super) fn shares(&self, n_layers: u32) -> Vec<WorkerShare> {
        // llama.cpp counts the output as one more layer.
        let layers = layers_of(&self.free, n_layers.saturating_add(1));
        let mut layers = layers.into_iter();
        let of_worker = |(worker, indices): &(WorkerEndpoint, Vec<usize>)| WorkerShare {
            name: worker.name.clone(),
            devices: worker.devices.clone(),
            layers: layers.by_ref().take(indices.len()).sum(),
        };
        self.workers.iter().map(of_worker).collect()
    }
}

/// Bytes for weights and KV: those that other machines lend, and this machine's `available` ones. These are the same bytes whether its
/// GPUs compute, a worker here, or both.
fn memory_of<'a>(workers: impl Iterator<Item = &'a WorkerEndpoint> + Clone, has_own_gpu: bool, available: u64) -> u64 {
    let computes_here = has_own_gpu || workers.clone().any(|worker| worker.is_local);
    // What other machines lend is for weights and KV: buffers come on top there.
    let own = if computes_here { available } else { COMPUTE_RESERVE };
    workers.filter(|worker| !worker.is_local).map(|worker| worker.memory).fold(own, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(memory: u64, is_local: bool) -> WorkerEndpoint {
        WorkerEndpoint {
            name: String::new(),
            endpoint: ([127, 0, 0, 1], 1).into(),
            devices: Vec::new(),
            memory,
            is_local,
            has_processor: is_local,
        }
    }

    #[test]
    fn local_beside_an_own_gpu_counts_this_machines_memory_once() {
        let (local, remote) = (worker(64 << 30, true), worker(128 << 30, false));
        let memory =
            |workers: &[&WorkerEndpoint], has_own_gpu| memory_of(workers.iter().copied(), has_own_gpu, 60 << 30);
        assert_eq!(memory(&[&local], true), 60 << 30);
        assert_eq!(memory(&[&local], false), 60 << 30);
        assert_eq!(memory(&[&local, &remote], true), (60 << 30) + (128 << 30));
        assert_eq!(memory(&[&remote], true), (60 << 30) + (128 << 30));
        assert_eq!(memory(&[&remote, &remote], false), (256 << 30) + COMPUTE_RESERVE, "nothing is computed here");
        assert_eq!(memory(&[&worker(u64::MAX, false)], true), u64::MAX);
    }
}
