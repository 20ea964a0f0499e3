//! Workers, and the shares of a model's layers that they compute.

use std::ops::RangeInclusive;

use baton_engines::engine_options::WrittenOptions;
use baton_model::options::{LentLayers, SplitMode};
use baton_schemas::worker::{LOCAL_WORKER, MAX_WORKERS};

use super::super::node_address::{is_node_address, node_url};

/// Why the shares of GPUs cannot be set.
const NO_TENSOR_SPLIT: &str = "is not supported without workers: llama-cpp-2 does not pass it on. llama.cpp divides the \
                               layers by the GPUs' free memory; --device chooses one GPU, and --gpu-layers how many layers \
                               GPUs get";

/// A share of a model's layers. They count in relation to each other.
const SHARES: RangeInclusive<f64> = 0.001..=1000.0;

/// Finds a mistake in the workers or their shares: the option's key, and a message.
pub(super) fn problem(options: &WrittenOptions) -> Option<(&'static str, String)> {
    let Some(workers) = options.workers.as_deref().filter(|workers| !workers.is_empty()) else {
        let no_shares = options.tensor_split.as_ref().map(|_| ("tensor_split", NO_TENSOR_SPLIT.to_owned()));
        let nobody = || ("lend_layers", "needs a worker that computes them (workers)".to_owned());
        return options.lend_layers.map(|_| nobody()).or(no_shares);
    };
    if options.lend_layers.is_some() && (workers.len() > 1 || workers[0] == LOCAL_WORKER) {
        return Some(("lend_layers", "needs exactly one worker, on another machine".to_owned()));
    }
    if options.lend_layers.is_some() && options.tensor_split.is_some() {
        return Some(("tensor_split", "must not be set with lend_layers, which divides the layers".to_owned()));
    }
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
        return Some(("workers", format!("has {twice:?} twice, at the positions {} and before", i + 1)));
    }
    // They choose devices in another way, or keep llama.cpp from working on several batches at once.
    let others = [
        ("device", options.device.is_some()),
        ("gpu_layers", options.gpu_layers.is_some()),
        ("mmproj", options.mmproj.is_some()),
        ("split_mode", options.split_mode.is_some_and(|mode| mode != SplitMode::Layer)),
        ("cpu_moe", options.cpu_moe == Some(true)),
        ("n_cpu_moe", options.n_cpu_moe.is_some()),
        ("override_tensor", options.override_tensor.as_ref().is_some_and(|all| !all.is_empty())),
    ];
    if let Some((key, _)) = others.into_iter().find(|(_, is_set)| *is_set) {
        return Some((key, "must not be set with workers".to_owned()));
    }
    let written = options.tensor_split.as_deref()?;
    match shares(options) {
        Some(shares) if (workers.len()..=workers.len() + 1).contains(&shares.len()) => None,
        _ => Some((
            "tensor_split",
            format!(
                "must be a number from {} to {} for each of the {} workers, and a last one for this machine's GPUs if it \
                 has any, not {written:?}",
                SHARES.start(),
                SHARES.end(),
                workers.len()
            ),
        )),
    }
}

/// The workers that are other nodes.
pub fn remote(options: &WrittenOptions) -> impl Iterator<Item = &String> {
    options.workers.iter().flatten().filter(|worker| *worker != LOCAL_WORKER)
}

/// The options of the two engines of an endpoint that lends layers.
#[derive(Debug, Clone, PartialEq)]
pub struct DividedEngines {
    /// Of the engine that generates, without workers.
    pub own: WrittenOptions,
    /// Of the engine that only computes prompts, with the worker. `None`: no layers are lent.
    pub lending: Option<WrittenOptions>,
}

impl DividedEngines {
    /// Divides an endpoint's options for `[model]`. Without `lend_layers` one engine has them all.
    pub fn of(options: &WrittenOptions) -> DividedEngines {
        let Some(lent) = options.lend_layers else { return DividedEngines { own: options.clone(), lending: None } };
        let own = WrittenOptions { workers: None, lend_layers: None, ..options.clone() };
        // It keeps nothing that only replies need, nor a store: the engine that generates has one.
        let lending = WrittenOptions { draft: None, speculation: None, kv_store: None, ..options.clone() };
        DividedEngines { own, lending: (lent != LentLayers::First(0)).then_some(lending) }
    }
}

/// The shares of the layers, if they are numbers in their range.
pub fn shares(options: &WrittenOptions) -> Option<Vec<f64>> {
    let parse = |text: &str| text.trim().parse().ok().filter(|share| SHARES.contains(share));
    options.tensor_split.as_deref()?.split([',', '/']).map(parse).collect()
}

#[cfg(test)]
mod tests {
    use baton_engines::engine_options::EngineKind;

    use super::*;

    fn written(workers: &[&str], split: Option<&str>) -> WrittenOptions {
        let workers = Some(workers.iter().map(|worker| (*worker).to_owned()).collect());
        // The default engine of this build may be another.
        let engine = Some(EngineKind::Llama);
        WrittenOptions { engine, workers, tensor_split: split.map(str::to_owned), ..WrittenOptions::default() }
    }

    #[test]
    fn workers_and_their_shares_are_checked_before_anything_starts() {
        let check = |options: WrittenOptions, expected: Option<&str>| {
            let problem = problem(&options);
            assert_eq!(problem.as_ref().map(|(key, _)| *key), expected, "{problem:?}");
        };
        let two = ["spark-2.local:9000", "local"];
        check(written(&two, None), None);
        check(written(&["https://10.0.0.2:9000"], Some("2,1")), None);
        check(written(&two, Some("3/1")), None);
        check(written(&two, Some("3,1,2")), None);
        check(written(&two, Some("3")), Some("tensor_split"));
        check(written(&two, Some("3,1,2,2")), Some("tensor_split"));
        check(written(&two, Some("3,0")), Some("tensor_split"));
        check(written(&two, Some("3,NaN")), Some("tensor_split"));
        check(written(&[], Some("3,1")), Some("tensor_split"));
        check(written(&["spark-2.local"], None), Some("workers"));
        check(written(&["spark-2.local:0"], None), Some("workers"));
        check(written(&["https://spark-2.local:0"], None), Some("workers"));
        check(written(&["local", "local"], None), Some("workers"));
        check(written(&["spark:9000", "http://Spark:9000/"], None), Some("workers"));
        let many: Vec<String> = (0..=MAX_WORKERS).map(|port| format!("spark:{}", 9000 + port)).collect();
        check(written(&many.iter().map(String::as_str).collect::<Vec<_>>(), None), Some("workers"));
        check(WrittenOptions { device: Some("cpu".into()), ..written(&two, None) }, Some("device"));
        check(WrittenOptions { gpu_layers: Some(9), ..written(&two, None) }, Some("gpu_layers"));
        check(WrittenOptions { split_mode: Some(SplitMode::Row), ..written(&two, None) }, Some("split_mode"));
        check(WrittenOptions { n_cpu_moe: Some(2), ..written(&two, None) }, Some("n_cpu_moe"));
        let lend = |options| WrittenOptions { lend_layers: Some(LentLayers::First(3)), ..options };
        check(lend(written(&["spark:9000"], None)), None);
        check(lend(written(&[], None)), Some("lend_layers"));
        check(lend(written(&["local"], None)), Some("lend_layers"));
        check(lend(written(&two, None)), Some("lend_layers"));
        check(lend(written(&["spark:9000"], Some("1,2"))), Some("tensor_split"));
    }

    #[test]
    fn the_engine_that_generates_has_no_workers_and_the_other_one_no_store() {
        let written = written(&["spark:9000"], None);
        let DividedEngines { own, lending } = DividedEngines::of(&written);
        assert_eq!((own, lending), (written.clone(), None), "as without the option");
        let lent = Some(LentLayers::First(12));
        let DividedEngines { own, lending } =
            DividedEngines::of(&WrittenOptions { lend_layers: lent, ..written.clone() });
        assert_eq!(own, WrittenOptions { workers: None, ..written.clone() });
        assert_eq!(lending, Some(WrittenOptions { lend_layers: lent, ..written.clone() }));
        let none = WrittenOptions { lend_layers: Some(LentLayers::First(0)), ..written.clone() };
        assert_eq!(
            DividedEngines::of(&none),
            DividedEngines { own: WrittenOptions { workers: None, ..written }, lending: None }
        );
    }
}
