//! Gauges and counters from a snapshot. They are built for each scrape, so a node that is gone leaves no series.
//!
//! To add one: its value in the [`snapshot`](crate::observe::snapshot), if it is not there yet, and its line here.

use std::sync::atomic::AtomicU64;

use baton_schemas::store_report::StoreReport;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::log_queue::LOG;
use crate::observe::snapshot::{
    EndpointState, KvReturnsState, LinkState, LoadState, LoadStateReport, MeasuredModelReport, ModelState, NodeReport,
    PrefillServerReport, UpstreamReport,
};
use crate::targets::nodes::NodeState;

/// Labels of one series, each with a constant name.
type Labels = Vec<(&'static str, String)>;

type Gauges = Family<Labels, Gauge<f64, AtomicU64>>;

/// The gauges and counters of a snapshot.
pub(super) fn registry(state: &EndpointState) -> Registry {
    let mut series = Series { registry: Registry::with_prefix("baton") };
    let requests = &state.requests;
    series.one("requests_running", "Requests that engines work for", requests.running as f64);
    series.one("requests_slots", "Slots taken, one for each reply that is being generated", requests.slots as f64);
    series.one("requests_slots_limit", "Slots of the nodes and upstreams that are used", requests.limit as f64);
    series.one(
        "requests_waiting",
        "Requests that wait for their model, their prompt or a slot",
        requests.waiting as f64,
    );
    series.count("log_lines_dropped", "Lines of the log that were dropped: nobody read it", LOG.n_dropped());
    series.one("request_memory_bytes", "Memory that requests hold", requests.memory_bytes as f64);
    series.one("request_memory_limit_bytes", "Memory that requests may hold", requests.memory_limit_bytes as f64);
    let refusals = "How often there was no memory for a request";
    series.count("request_memory_refusals", refusals, requests.memory_refusals);

    let models = || state.models.iter();
    series.gauges(
        "ttft_prediction_error",
        "Median absolute error of predicted first tokens, as a share of the prediction, of the last requests",
        models().map(|model| (of_model(model), model.prediction_error)),
    );
    let nodes = || models().flat_map(|model| model.nodes.iter().map(move |node| (of_node(model, node), node)));
    for (name, help, value) in NODE_GAUGES {
        series.gauges(name, help, nodes().map(|(labels, node)| (labels, value(node))));
    }
    series.gauges(
        "node_state",
        "1 for the state that the node is in, 0 for the others",
        nodes().flat_map(|(labels, node)| {
            NodeState::ALL.map(|state| {
                let label = ("state", state.as_str().to_owned());
                ([&labels[..], &[label]].concat(), f64::from(u8::from(node.state == state)))
            })
        }),
    );
    series.counters(
        "node_state_transitions",
        "Changes of a node's state, by reason",
        nodes().flat_map(|(labels, node)| {
            node.transitions.iter().map(move |transition| {
                let from = ("from", transition.from.as_str().to_owned());
                let to = ("to", transition.to.as_str().to_owned());
                let change = [from, to, ("reason", transition.reason.clone())];
                ([&labels[..], &change].concat(), transition.count)
            })
        }),
    );
    add_stores(&mut series, state);
    let links = || models().flat_map(|model| model.links.iter().map(move |link| (of_link(model, link), link)));
    series.gauges(
        "link_bytes_per_second",
        "Measured rate of the link from a prefill node to a decode node",
        links().map(|(labels, link)| (labels, link.bytes_per_second)),
    );
    series.gauges(
        "link_round_trip_seconds",
        "Measured round trip from a decode node to a prefill node",
        links().map(|(labels, link)| (labels, link.rtt_ms / 1e3)),
    );
    series.gauges(
        "link_breaker_open",
        "1 if no handoff is tried between two nodes, though each of them may be fine",
        links().map(|(labels, link)| (labels, f64::from(u8::from(link.breaker.is_open)))),
    );
    series.counters(
        "link_failures",
        "Failures of handoffs that are neither node's alone, by reason",
        links().flat_map(|(labels, link)| {
            let failures = link.breaker.failures.iter();
            failures.map(move |(reason, n)| ([&labels[..], &[("reason", reason.clone())]].concat(), *n))
        }),
    );
    series.counters(
        "fallbacks",
        "Events that were not planned: another route or engine, or a token that is late, by reason",
        models().flat_map(|model| {
            let labels = |reason: &String| [of_model(model), vec![("reason", reason.clone())]].concat();
            model.fallbacks.iter().map(move |(reason, fallback)| (labels(reason), fallback.count))
        }),
    );
    let with_prefill = || models().filter(|model| !model.links.is_empty());
    series.counters(
        "kv_returns",
        "Replies whose KV was to return to the node that computed the prompt, by outcome",
        with_prefill().flat_map(|model| {
            let KvReturnsState { returned, gave_way, failed, .. } = model.kv_returns;
            let outcomes = [("returned", returned), ("gave_way", gave_way), ("failed", failed)];
            outcomes.map(|(outcome, n)| ([of_model(model), vec![("outcome", outcome.to_owned())]].concat(), n))
        }),
    );
    series.counters(
        "kv_returned_tokens",
        "Tokens whose KV returned",
        with_prefill().map(|model| (of_model(model), model.kv_returns.tokens)),
    );
    series.counters(
        "node_failures",
        "Failures that a node's breaker counted, by reason",
        nodes().flat_map(|(labels, node)| {
            let failures = node.breaker.failures.iter();
            failures.map(move |(reason, n)| ([&labels[..], &[("reason", reason.clone())]].concat(), *n))
        }),
    );
    series.one(
        "memory_budget_bytes",
        "Bytes that the models loaded on demand may take; 0: no limit",
        state.memory_budget_bytes as f64,
    );
    let loadable = || models().filter_map(|model| Some((of_model(model), model.load_state.as_ref()?)));
    for (name, help, value) in LOADABLE_GAUGES {
        series.gauges(name, help, loadable().map(|(labels, loading)| (labels, value(loading))));
    }
    series.counters(
        "model_loads",
        "How often a model was loaded on demand",
        loadable().map(|(labels, loading)| (labels, loading.loads)),
    );
    series.seconds(
        "model_load",
        "Time that loading the model took in all",
        loadable().map(|(labels, loading)| (labels, loading.load_seconds)),
    );
    series.counters(
        "model_unloads",
        "How often a model was unloaded, by reason",
        loadable().flat_map(|(labels, loading)| {
            let unloads = loading.unloads.iter();
            unloads.map(move |(reason, n)| ([&labels[..], &[("reason", reason.clone())]].concat(), *n))
        }),
    );
    add_upstreams(&mut series, state);
    series.registry
}

/// Adds the series of the stores of nodes.
fn add_stores(series: &mut Series, state: &EndpointState) {
    let nodes = || state.models.iter().flat_map(|model| model.nodes.iter().map(move |node| (model, node)));
    let stores = || nodes().filter_map(|(model, node)| Some((of_node(model, node), node.kv_store?)));
    for (name, help, value) in STORE_GAUGES {
        series.gauges(name, help, stores().map(|(labels, store)| (labels, value(&store) as f64)));
    }
    for (name, help, value) in STORE_COUNTERS {
        series.counters(name, help, stores().map(|(labels, store)| (labels, value(&store))));
    }
    let by_tier = |value: fn(&StoreReport) -> [u64; 2]| {
        stores().flat_map(move |(labels, store)| {
            let tiers = ["memory", "disk"].into_iter().zip(value(&store));
            tiers.map(move |(tier, n)| ([&labels[..], &[("tier", tier.to_owned())]].concat(), n)).collect::<Vec<_>>()
        })
    };
    let bytes = by_tier(|store| [store.memory_bytes, store.disk_bytes]);
    let help = "Bytes of KV outside slots, by tier; on disk those of all models and processes that use the folder";
    series.gauges("node_kv_store_bytes", help, bytes.map(|(labels, n)| (labels, n as f64)));
    let tokens = by_tier(|store| [store.memory_tokens, store.disk_tokens]);
    series.counters("node_kv_store_restored_tokens", "Prompt tokens whose KV came back, by tier", tokens);
    let evictions = by_tier(|store| [store.memory_evictions, store.disk_evictions]);
    series.counters("node_kv_store_evictions", "Blocks that left a tier, by tier", evictions);
}

/// A figure of a node's store, in the same form.
type StoreFigure = (&'static str, &'static str, fn(&StoreReport) -> u64);

const STORE_GAUGES: [StoreFigure; 3] = [
    ("node_kv_store_blocks", "Blocks of KV in memory or on disk", |store| store.blocks),
    ("node_kv_store_written_today_bytes", "Bytes written to the folder today (UTC), by all processes", |store| {
        store.written_today_bytes
    }),
    ("node_kv_store_most_step_tokens", "The most prompt tokens that came back between two steps of streams", |store| {
        store.most_step_tokens
    }),
];

const STORE_COUNTERS: [StoreFigure; 4] = [
    ("node_kv_store_written_bytes", "Bytes that the node has written to disk", |store| store.written_bytes),
    ("node_kv_store_failed_writes", "Blocks that could not be written to disk", |store| store.failed_writes),
    ("node_kv_store_shared_steps", "Steps of streams between which KV of other prompts came back", |store| {
        store.shared_steps
    }),
    ("node_kv_store_refused_files", "Files that were refused and removed", |store| store.refused_files),
];

/// Adds the series of upstreams.
fn add_upstreams(series: &mut Series, state: &EndpointState) {
    let upstreams = || state.upstreams.iter().map(|upstream| (vec![("upstream", upstream.name.clone())], upstream));
    for (name, help, value) in UPSTREAM_GAUGES {
        series.gauges(name, help, upstreams().map(|(labels, upstream)| (labels, value(upstream))));
    }
    let measured = || {
        upstreams().flat_map(|(labels, upstream)| {
            let of_model = |it: &MeasuredModelReport| [&labels[..], &[("model", it.model.clone())]].concat();
            upstream.measured.iter().map(|it| (of_model(it), it)).collect::<Vec<_>>()
        })
    };
    for (name, help, value) in MEASURED_GAUGES {
        let known = measured().filter_map(|(labels, it)| Some((labels, value(it)?)));
        series.gauges(name, help, known);
    }
    series.counters(
        "upstream_failures",
        "Failures that an upstream's breaker counted, by reason",
        upstreams().flat_map(|(labels, upstream)| {
            let failures = upstream.breaker.failures.iter();
            failures.map(move |(reason, n)| ([&labels[..], &[("reason", reason.clone())]].concat(), *n))
        }),
    );
    series.counters(
        "upstream_unknown_ends",
        "Replies that an upstream ended for a reason that is not known",
        upstreams().map(|(labels, upstream)| (labels, upstream.unknown_ends)),
    );
    series.counters(
        "upstream_prefill_fallbacks",
        "Requests whose prompt no prefill server of an upstream computed, by reason",
        upstreams().flat_map(|(labels, upstream)| {
            let fallbacks = upstream.fallbacks.iter();
            fallbacks.map(move |(reason, n)| ([&labels[..], &[("reason", reason.clone())]].concat(), n.count))
        }),
    );
    let prefill_servers = || {
        upstreams().flat_map(|(labels, upstream)| {
            let name = |server: &PrefillServerReport| [&labels[..], &[("prefill", server.name.clone())]].concat();
            upstream.prefill.iter().map(|server| (name(server), server)).collect::<Vec<_>>()
        })
    };
    series.gauges(
        "upstream_prefill_breaker_open",
        "1 if prompts are kept away from a prefill server of an upstream",
        prefill_servers().map(|(labels, server)| (labels, f64::from(u8::from(server.breaker.is_open)))),
    );
    series.counters(
        "upstream_prefill_prompts",
        "Prompts that a prefill server of an upstream computed",
        prefill_servers().map(|(labels, server)| (labels, server.prompts)),
    );
    series.seconds(
        "upstream_prefill",
        "Time that a prefill server of an upstream took for its prompts",
        prefill_servers().map(|(labels, server)| (labels, server.prompt_seconds)),
    );
    series.counters(
        "upstream_transferred_tokens",
        "Prompt tokens that an upstream got from a prefill server, at most, of complete replies",
        prefill_servers().map(|(labels, server)| (labels, server.transferred_tokens)),
    );
}

/// A gauge of every model that is loaded on demand: its name, its help and its value.
type LoadableGauge = (&'static str, &'static str, fn(&LoadStateReport) -> f64);

const LOADABLE_GAUGES: [LoadableGauge; 4] = [
    ("model_loaded", "1 if the model is in memory", |loading| f64::from(u8::from(loading.state == LoadState::Loaded))),
    ("model_memory_bytes", "Bytes that the model's process holds", |loading| loading.measured_bytes as f64),
    ("model_requests_active", "Requests that use the model", |loading| f64::from(loading.active)),
    ("model_requests_waiting", "Requests that wait for the model to be loaded", |loading| f64::from(loading.waiting)),
];

/// A gauge of every upstream, in the same form.
type UpstreamGauge = (&'static str, &'static str, fn(&UpstreamReport) -> f64);

const UPSTREAM_GAUGES: [UpstreamGauge; 6] = [
    ("upstream_up", "1 if the upstream answers", |upstream| f64::from(u8::from(upstream.state == NodeState::Ready))),
    (
        "upstream_busy_seconds",
        "Longest time for which a model of the upstream still gets no requests because it was busy",
        |upstream| upstream.busy_ms as f64 / 1e3,
    ),
    ("upstream_running", "Replies that an upstream generates", |upstream| f64::from(upstream.running)),
    ("upstream_running_limit", "Replies that an upstream may generate at once", |upstream| f64::from(upstream.limit)),
    ("upstream_waiting", "Replies that wait for a slot of an upstream", |upstream| f64::from(upstream.waiting)),
    ("upstream_breaker_open", "1 if requests are kept away from the upstream", |upstream| {
        f64::from(u8::from(upstream.breaker.is_open))
    }),
];

/// A gauge of every measured model of an upstream, in the same form. `None` until it is measured.
type MeasuredGauge = (&'static str, &'static str, fn(&MeasuredModelReport) -> Option<f64>);

const MEASURED_GAUGES: [MeasuredGauge; 3] = [
    ("upstream_constant_seconds", "Measured time to the first token of a prompt with nothing to compute", |it| {
        (it.constant_ms > 0.0).then_some(it.constant_ms / 1e3)
    }),
    ("upstream_prefill_tokens_per_second", "Measured prefill rate at the longest prompts seen", |it| {
        it.prefill_rates.last().map(|point| point.tokens_per_second)
    }),
    ("upstream_decode_tokens_per_second", "Measured rate of one reply, with the fewest replies seen", |it| {
        it.decode_rates.first().map(|point| point.tokens_per_second)
    }),
];

/// A gauge of every node, in the same form.
type NodeGauge = (&'static str, &'static str, fn(&NodeReport) -> f64);

const NODE_GAUGES: [NodeGauge; 10] = [
    ("node_up", "1 if the node can be sent requests", |node| {
        let answers = matches!(node.state, NodeState::Ready | NodeState::Suspect);
        f64::from(u8::from(answers && node.unused_reason.is_none()))
    }),
    ("node_slots", "Sequences a node decodes together", |node| f64::from(node.slots)),
    ("node_slots_active", "Slots with a running sequence", |node| f64::from(node.active_slots)),
    ("node_queued", "Sequences that wait for a slot", |node| f64::from(node.queued)),
    ("node_prefill_backlog_tokens", "Prompt tokens accepted and not computed yet", |node| {
        f64::from(node.prefill_backlog_tokens)
    }),
    ("node_kv_cells_free", "KV cells that no running sequence holds", |node| f64::from(node.free_kv_cells)),
    ("node_memory_bytes", "Bytes of weights and KV cache", |node| node.memory_bytes as f64),
    ("node_breaker_open", "1 if requests for this task are kept away from the node", |node| {
        f64::from(u8::from(node.breaker.is_open))
    }),
    ("node_prefill_tokens_per_second", "Measured prefill rate at the longest prompts seen", |node| {
        node.prefill_rates.last().map_or(0.0, |point| point.tokens_per_second)
    }),
    ("node_decode_tokens_per_second", "Measured decode rate of one stream, with the fewest streams seen", |node| {
        node.decode_rates.first().map_or(0.0, |point| point.tokens_per_second)
    }),
];

struct Series {
    registry: Registry,
}

impl Series {
    fn one(&mut self, name: &str, help: &str, value: f64) {
        let gauge = Gauge::<f64, AtomicU64>::default();
        gauge.set(value);
        self.registry.register(name, help, gauge);
    }

    fn count(&mut self, name: &str, help: &str, value: u64) {
        let counter = Counter::<u64>::default();
        counter.inc_by(value);
        self.registry.register(name, help, counter);
    }

    fn gauges(&mut self, name: &str, help: &str, series: impl Iterator<Item = (Labels, f64)>) {
        let family = Gauges::default();
        for (labels, value) in series {
            family.get_or_create(&labels).set(value);
        }
        self.registry.register(name, help, family);
    }

    /// Counters of seconds; the unit becomes part of the name.
    fn seconds(&mut self, name: &str, help: &str, series: impl Iterator<Item = (Labels, f64)>) {
        let family = Family::<Labels, Counter<f64, AtomicU64>>::default();
        for (labels, value) in series {
            family.get_or_create(&labels).inc_by(value);
        }
        self.registry.register_with_unit(name, help, Unit::Seconds, family);
    }

    fn counters(&mut self, name: &str, help: &str, series: impl Iterator<Item = (Labels, u64)>) {
        let family = Family::<Labels, Counter>::default();
        for (labels, value) in series {
            family.get_or_create(&labels).inc_by(value);
        }
        self.registry.register(name, help, family);
    }
}

fn of_model(model: &ModelState) -> Labels {
    vec![("model", model.name.clone())]
}

fn of_link(model: &ModelState, link: &LinkState) -> Labels {
    [of_model(model), vec![("prefill", link.prefill.clone()), ("decode", link.decode.clone())]].concat()
}

fn of_node(model: &ModelState, node: &NodeReport) -> Labels {
    [of_model(model), vec![("node", node.name.clone()), ("task", node.task.as_str().to_owned())]].concat()
}
