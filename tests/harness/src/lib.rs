//! What the cross-process tests share: running endpoints and nodes, links that misbehave, a scripted upstream.
//!
//! Only `tests/endpoint`, `tests/real_model`, `tests/stress`, and the tests of `baton-bench` and of the engines use it. It starts
//! the programs that Cargo builds with them.

mod config_file;
pub mod draft_relay;
mod front;
mod hub;
pub mod lab;
pub mod mock;
mod new_key;
pub mod occupy;
mod process;
mod prompts;
pub mod relay;
mod sse;
mod terminal;
mod wait;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

pub use config_file::TempConfigFile;
pub use front::{Answer, ReloadableServer, said, upstream};
pub use hub::hub;
pub use new_key::NewKey;
pub use process::{
    BatonNode, BatonServer, Process, children_of, free_address, is_alive, peak_mib, read_all, resident_kib,
};
pub use prompts::{PROMPTS, chat, long_prompt};
pub use sse::{ChatText, SseReply, chunks};
pub use terminal::Terminal;
pub use wait::{eventually, eventually_async};

/// The `baton` binary under test.
pub static BATON: LazyLock<PathBuf> = LazyLock::new(|| program("baton", "cargo build --release"));

/// The program with the benchmarks, which starts the `baton` beside it.
pub static BATON_BENCH: LazyLock<PathBuf> = LazyLock::new(|| program("baton-bench", "make bench-program"));

/// Cargo puts programs into the folder above that of the tests' binaries.
fn program(name: &str, build: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let program = tests.parent().and_then(Path::parent).unwrap().join(name);
    assert!(program.is_file(), "there is no {}: `{build}` builds it", program.display());
    program
}

/// The cluster key of all nodes and endpoints that the tests start.
pub const CLUSTER_KEY: &str = "the tests' cluster key";

/// The largest margin, in nats, between two tokens that rounding may exchange. Rounding of a 4-bit model moves a token's
/// log-probability by about a tenth: `engines/tests/engines/exact.rs` and `stress/chaos` print it. It seldom moves it by half a nat:
/// docs/results/reliability.md has a token that an hour of faults found. A wrong cache moves it by whole nats.
pub const MAX_MARGIN: f32 = 0.6;

/// By how much rounding moves a log-probability at most, in nats.
pub const MAX_NOISE: f32 = 0.3;

/// The default model, from the cache or pulled once.
pub fn model() -> PathBuf {
    static MODEL: LazyLock<PathBuf> = LazyLock::new(|| match std::env::var_os("BATON_TEST_MODEL") {
        Some(path) => PathBuf::from(path),
        None => {
            let pull = Command::new(&*BATON).args(["pull", "smollm2"]).stderr(Stdio::inherit()).output().unwrap();
            assert!(pull.status.success(), "`baton pull smollm2` failed");
            PathBuf::from(String::from_utf8(pull.stdout).unwrap().trim())
        }
    });
    MODEL.clone()
}

/// A second model, with a sliding window. On a machine without it the test is skipped; under CI it fails.
pub fn sliding_window_model() -> Option<PathBuf> {
    let path = std::env::var_os("BATON_TEST_SWA_MODEL").map(PathBuf::from);
    if path.is_none() {
        skip("BATON_TEST_SWA_MODEL is not set (`baton pull gemma3-270m` prints the model's path)");
    }
    path
}

/// What not every machine allows.
#[derive(Debug, Clone, Copy)]
pub enum Capability {
    /// To make network namespaces.
    Namespaces,
    /// To slow a network down.
    TrafficControl,
    /// To let a process see a clock that jumps.
    ClockJumps,
}

impl Capability {
    /// The word in `BATON_CI_LACKS`.
    fn word(self) -> &'static str {
        match self {
            Capability::Namespaces => "namespaces",
            Capability::TrafficControl => "traffic_control",
            Capability::ClockJumps => "clock_jumps",
        }
    }
}

/// Reports that this machine does not allow what a test needs, where the test runner does not hold it back. CI may run on such
/// a machine, too, if `.ci/run` has found so before the tests; otherwise the test fails there.
pub fn not_possible_here(lacking: Capability, reason: &str) {
    let known = std::env::var("BATON_CI_LACKS").unwrap_or_default();
    let is_known = known.split(' ').any(|word| word == lacking.word());
    assert!(std::env::var_os("CI").is_none() || is_known, "CI has found {} on this machine: {reason}", lacking.word());
    let _ = writeln!(std::io::stderr(), "SKIPPED: {reason}");
}

/// Reports why a test does not run here. Under CI nothing may be missing, so the test fails.
pub fn skip(reason: &str) {
    assert!(std::env::var_os("CI").is_none(), "under CI nothing is skipped: {reason}");
    eprintln!("SKIPPED: {reason}");
}
