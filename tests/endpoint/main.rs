//! An endpoint's promises to clients and operators, tested with real processes over real sockets. The simulated engine
//! replaces models, so no model file and no C++ are needed. The tests mostly wait: run many at once.

mod admission;
mod adoption;
mod bench_command;
mod bodies;
mod chat;
mod config_changes;
mod counts;
mod decode_nodes;
mod discovery;
mod dry_run;
mod fallback_reasons;
mod hedging;
mod load_spread;
mod log_file;
#[cfg(target_os = "linux")]
mod machine;
mod machine_models;
mod network_exposure;
mod node_states;
mod node_streams;
mod node_watch;
mod operator_view;
mod pairing;
mod places;
mod poison;
mod reload;
mod removed_keys;
mod replaced_program;
mod request_memory;
mod returning;
mod service;
mod setup;
mod shutdown;
mod simulated_demo;
mod sleep;
mod stalled_log;
mod suspend;
mod traces;
mod unused_nodes;
mod upstreams;
mod usage;
mod usage_ends;
