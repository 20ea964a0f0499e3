//! Faults of the machine: clocks that jump, full disks, no more descriptors, no more memory. Nothing that was running is lost
//! but what needed them, and everything works again once they are there.

mod clocks;
mod descriptors;
mod disks;
mod memory;

use std::time::Duration;

use harness::{BatonServer, chat};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use serde_json::{Value, json};

/// A simulated engine, fast enough for a test and slow enough to change things while it streams.
const ENGINE: [&str; 6] = ["--engine", "sim", "--sim-decode-tps", "100", "--slots", "8"];

/// An endpoint with that engine.
const SIM: [&str; 7] = ["--engine", "sim", "--sim-decode-tps", "100", "--slots", "8", "--no-calibration"];

fn request(text: &str, n_tokens: u32) -> Value {
    chat(text, json!({ "model": "sim", "max_tokens": n_tokens, "ignore_eos": true }))
}

/// The status of a chat over one of the client's connections; 0 without a reply.
async fn status(client: &reqwest::Client, server: &BatonServer, model: &str) -> u16 {
    let body = chat("hello", json!({ "model": model, "max_tokens": 2 }));
    let sent = client.post(format!("{}/v1/chat/completions", server.base)).json(&body);
    let Ok(reply) = sent.timeout(Duration::from_secs(60)).send().await else { return 0 };
    let status = reply.status().as_u16();
    // Its connection can be used again only after the whole reply.
    reply.bytes().await.map_or(0, |_| status)
}

/// Limits a running process from outside, as an operator or a container does.
fn limit(pid: Pid, resource: Resource, most: u64) {
    // Processes may lower this one, too, but never raise it again.
    let maximum = getrlimit(resource).maximum;
    let limited = prlimit(Some(pid), resource, Rlimit { current: Some(most), maximum });
    assert!(limited.is_ok(), "{resource:?} of {pid:?}: {limited:?}");
}

fn pid(server: &BatonServer) -> Pid {
    Pid::from_raw(server.pid() as i32).unwrap()
}
