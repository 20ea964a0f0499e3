//! Workers, and the shares of a model's layers that they compute.

use std::ops::RangeInclusive;

use baton_engines::registry::EngineKind;
use baton_model::options::SplitMode;
use baton_schemas::worker::{LOCAL_WORKER, MAX_WORKERS};

use super::super::node_address::{is_node_address, node_url};
use super::EngineArgs;

/// Why the shares of GPUs cannot be set.
const NO_TENSOR_SPLIT: &str = "is not supported without workers: llama-cpp-2 does not pass it on. llama.cpp divides the \
                               layers by the GPUs' free memory; --device chooses one GPU, and --gpu-layers how many layers \
                               GPUs get";

/// A share of a model's layers. They count in relation to each other.
const SHARES: RangeInclusive<f64> = 0.001..=1000.0;

impl EngineArgs {
    /// Finds a mistake in the workers or their shares: the option's key, and a message.
    pub(super) fn worker_problem(&self) -> Option<(&'static str, String)> {
        let Some(workers) = self.workers.as_deref().filter(|workers| !workers.is_empty()) else {
            return self.tensor_split.as_ref().map(|_| ("tensor_split", NO_TENSOR_SPLIT.to_owned()));
        };
        if workers.len() > MAX_WORKERS {
            return Some(("workers", format!("may have {MAX_WORKERS} workers, not {}", workers.len())));
        }
        let is_address = |worker: &&String| is_node_address(worker) || *worker == LOCAL_WORKER;
        if let Some(wrong) = workers.iter().find(|worker| !is_address(worker)) {
            return Some(("workers", format!("has {wrong:?}, which is neither HOST:PORT nor {LOCAL_WORKER}")));
        }
        if let Some((i, twice)) = workers.iter().enumerate().find(|(i, worker)| {
            let url = node_url(worker);
            workers[..*i].iter().any(|other| node_url(other).eq_ignore_ascii_case(&url))
        }) {
            return Some(("workers", format!("has {twice:?} twice, at the places {} and before", i + 1)));
        }
        let kind = self.engine.unwrap_or_default();
        if kind != EngineKind::Llama {
            return Some(("workers", format!("need the engine llama, not {}", kind.as_str())));
        }
        // They choose devices in another way, or keep llama.cpp from working on several batches at once.
        let others = [
            ("device", self.device.is_some()),
            ("gpu_layers", self.gpu_layers.is_some()),
            ("mmproj", self.mmproj.is_some()),
            ("split_mode", self.split_mode.is_some_and(|mode| mode != SplitMode::Layer)),
            ("cpu_moe", self.cpu_moe == Some(true)),
            ("n_cpu_moe", self.n_cpu_moe.is_some()),
            ("override_tensor", self.override_tensor.as_ref().is_some_and(|all| !all.is_empty())),
        ];
        if let Some((key, _)) = others.into_iter().find(|(_, is_set)| *is_set) {
            return Some((key, "must not be set with workers".to_owned()));
        }
        let shares = self.tensor_split.as_deref()?;
        match self.shares() {
            Some(shares) if (workers.len()..=workers.len() + 1).contains(&shares.len()) => None,
            _ => Some((
                "tensor_split",
                format!(
                    "must be a number from {} to {} for each of the {} workers, and a last one for this machine's GPUs if it \
                     has any, not {shares:?}",
                    SHARES.start(),
                    SHARES.end(),
                    workers.len()
                ),
            )),
        }
    }

    /// The workers that are other nodes.
    pub fn remote_workers(&self) -> impl Iterator<Item = &String> {
        self.workers.iter().flatten().filter(|worker| *worker != LOCAL_WORKER)
    }

    /// The shares of the layers, if they are numbers in their range.
    pub fn shares(&self) -> Option<Vec<f64>> {
        let parse = |text: &str| text.trim().parse().ok().filter(|share| SHARES.contains(share));
        self.tensor_split.as_deref()?.split([',', '/']).map(parse).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(workers: &[&str], split: Option<&str>) -> EngineArgs {
        let workers = Some(workers.iter().map(|worker| (*worker).to_owned()).collect());
        // The default engine of this build may be another.
        let engine = Some(EngineKind::Llama);
        EngineArgs { engine, workers, tensor_split: split.map(str::to_owned), ..EngineArgs::default() }
    }

    #[test]
    fn workers_and_their_shares_are_checked_before_anything_starts() {
        let check = |args: EngineArgs, expected: Option<&str>| {
            let problem = args.worker_problem();
            assert_eq!(problem.as_ref().map(|(key, _)| *key), expected, "{problem:?}");
        };
        let two = ["spark-2.local:9000", "local"];
        check(args(&two, None), None);
        check(args(&["https://10.0.0.2:9000"], Some("2,1")), None);
        check(args(&two, Some("3/1")), None);
        check(args(&two, Some("3,1,2")), None);
        check(args(&two, Some("3")), Some("tensor_split"));
        check(args(&two, Some("3,1,2,2")), Some("tensor_split"));
        check(args(&two, Some("3,0")), Some("tensor_split"));
        check(args(&two, Some("3,NaN")), Some("tensor_split"));
        check(args(&[], Some("3,1")), Some("tensor_split"));
        check(args(&["spark-2.local"], None), Some("workers"));
        check(args(&["spark-2.local:0"], None), Some("workers"));
        check(args(&["https://spark-2.local:0"], None), Some("workers"));
        check(args(&["local", "local"], None), Some("workers"));
        check(args(&["spark:9000", "http://Spark:9000/"], None), Some("workers"));
        let many: Vec<String> = (0..=MAX_WORKERS).map(|port| format!("spark:{}", 9000 + port)).collect();
        check(args(&many.iter().map(String::as_str).collect::<Vec<_>>(), None), Some("workers"));
        check(EngineArgs { engine: Some(EngineKind::Sim), ..args(&two, None) }, Some("workers"));
        check(EngineArgs { device: Some("cpu".into()), ..args(&two, None) }, Some("device"));
        check(EngineArgs { gpu_layers: Some(9), ..args(&two, None) }, Some("gpu_layers"));
        check(EngineArgs { split_mode: Some(SplitMode::Row), ..args(&two, None) }, Some("split_mode"));
        check(EngineArgs { n_cpu_moe: Some(2), ..args(&two, None) }, Some("n_cpu_moe"));
    }
}
