//! The real models. This crate cannot download anything, so the test runner pulls them and passes their files' names.

use std::path::PathBuf;
use std::sync::Arc;

#[cfg(feature = "llama")]
use baton_engines::llama::devices;
use baton_engines::registry::{self, EngineKind, EngineOptions};
use baton_link::Engine;
use baton_link::handoff::KvPuller;
use baton_model::limits::DEFAULT_UBATCH;

/// The options of an engine whose steps have whole batches, as on a GPU, so that its rounding does not depend on the machine.
pub(crate) fn of(kind: EngineKind, model: impl Into<PathBuf>) -> EngineOptions {
    EngineOptions { kind, n_ubatch: Some(DEFAULT_UBATCH), ..EngineOptions::of(model) }
}

/// The same for llama.cpp.
#[cfg(feature = "llama")]
pub(crate) fn of_llama(model: impl Into<PathBuf>) -> EngineOptions {
    of(EngineKind::Llama, model)
}

/// Starts an engine off the async threads.
pub(crate) async fn start(options: EngineOptions, puller: Option<Arc<dyn KvPuller>>) -> Arc<dyn Engine> {
    registry::start(options, puller).await.unwrap_or_else(|error| panic!("{error}"))
}

/// The first layers of SmolLM2 135M, where they were cut off for tests to be short, or all of it.
pub(crate) fn smollm2() -> Option<PathBuf> {
    std::env::var_os("BATON_TEST_CUT_MODEL").map(PathBuf::from).or_else(whole_smollm2)
}

/// SmolLM2 135M.
pub(crate) fn whole_smollm2() -> Option<PathBuf> {
    named_by("BATON_TEST_MODEL")
}

#[cfg(feature = "llama")]
/// Gemma 3 270M, which has a sliding window.
pub(crate) fn gemma3() -> Option<PathBuf> {
    named_by("BATON_TEST_SWA_MODEL")
}

/// The Python that has mlx-lm, numpy and gguf.
#[cfg(feature = "mlx")]
pub(crate) fn mlx_python() -> Option<PathBuf> {
    named_elsewhere("BATON_TEST_MLX_PYTHON", "test-long")
}

/// SmolLM2 for tests that MLX computes on a processor.
#[cfg(all(feature = "llama", feature = "mlx"))]
pub(crate) fn smollm2_for_mlx() -> Option<PathBuf> {
    named_elsewhere("BATON_TEST_MLX_MODEL", "mlx")
}

/// Gemma 3 270M for them.
#[cfg(all(feature = "llama", feature = "mlx"))]
pub(crate) fn gemma3_for_mlx() -> Option<PathBuf> {
    named_elsewhere("BATON_TEST_MLX_SWA_MODEL", "mlx")
}

/// What takes minutes, so that `make test` leaves it out.
#[cfg(feature = "mlx")]
fn named_elsewhere(variable: &str, target: &str) -> Option<PathBuf> {
    let found = std::env::var_os(variable).map(PathBuf::from);
    if found.is_none() {
        println!("SKIPPED: it takes minutes; `make {target}` runs it");
    }
    found
}

fn named_by(variable: &str) -> Option<PathBuf> {
    let model = std::env::var_os(variable).map(PathBuf::from);
    if model.is_none() {
        assert!(std::env::var_os("CI").is_none(), "CI must run this with the real model");
        println!("SKIPPED: {variable} is not set; `make test` sets it");
    }
    model
}

#[cfg(feature = "llama")]
/// Returns true if engines compute on a GPU here, whose kernels round differently from step to step.
pub(crate) fn has_gpu() -> bool {
    devices::all().unwrap().len() > 1
}
