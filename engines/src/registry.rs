//! The one place that starts an engine from its options. The [list](crate::engine_options::EngineKind) of engines is below it.

use std::sync::Arc;

use baton_link::engine::Engine;
use baton_link::handoff::KvPuller;

use crate::engine_options::engines;
pub use crate::engine_options::{EngineKind, EngineOptions};
#[cfg(feature = "models")]
use crate::serving::{self, LoadError};
use crate::sim::{PacedPuller, SimConfig, SimEngine};

/// Where candle reads the number of its threads, once.
pub const THREADS_VARIABLE: &str = "RAYON_NUM_THREADS";

/// Why an engine did not start. For the operator: the message may name files.
#[derive(Debug, thiserror::Error)]
pub enum EngineStartError {
    /// This build lacks the engine.
    #[error(
        "this build of baton has no {} engine. Build it with --features baton-engines/{}, or use another --engine",
        .0.as_str(), .0.feature().unwrap_or_default()
    )]
    NotBuilt(EngineKind),
    /// The thread that starts the engine panicked.
    #[error("{0}")]
    Panicked(tokio::task::JoinError),
    /// The model cannot be loaded.
    #[cfg(feature = "models")]
    #[error(transparent)]
    Load(#[from] LoadError),
}

impl EngineStartError {
    /// The message for clients, without paths.
    pub fn summary(&self) -> &'static str {
        match self {
            EngineStartError::NotBuilt(_) | EngineStartError::Panicked(_) => "the engine is not set up correctly",
            #[cfg(feature = "models")]
            EngineStartError::Load(error) => error.summary(),
        }
    }
}

/// Starts an engine. `puller` fetches KV for requests that name a prefill node.
pub async fn start(
    options: EngineOptions,
    puller: Option<Arc<dyn KvPuller>>,
) -> Result<Arc<dyn Engine>, EngineStartError> {
    let opened = tokio::task::spawn_blocking(move || open(options, puller)).await;
    opened.map_err(EngineStartError::Panicked)?
}

macro_rules! open {
    ($($(#[$about:meta])* $kind:ident: $feature:literal => $module:ident::$library:ident, $form:ident, $kv:ident;)*) => {
        /// The same. Blocking: up to minutes.
        pub fn open(
            options: EngineOptions,
            puller: Option<Arc<dyn KvPuller>>,
        ) -> Result<Arc<dyn Engine>, EngineStartError> {
            match options.kind {
                $(
                    #[cfg(feature = $feature)]
                    EngineKind::$kind => {
                        let library = crate::$module::$library::default();
                        Ok(Arc::new(serving::open::open(&library, &options, puller)?))
                    }
                    #[cfg(not(feature = $feature))]
                    EngineKind::$kind => Err(EngineStartError::NotBuilt(options.kind)),
                )*
                EngineKind::Sim => Ok(Arc::new(simulator(options, puller))),
            }
        }
    };
}
engines!(open);

fn simulator(options: EngineOptions, puller: Option<Arc<dyn KvPuller>>) -> SimEngine {
    let puller = match (puller, &options.sim_machine) {
        (Some(puller), Some(machine)) => Some(Arc::new(PacedPuller::new(puller, machine)) as Arc<dyn KvPuller>),
        (puller, _) => puller,
    };
    let defaults = SimConfig::default();
    let config = SimConfig {
        model: options.name.unwrap_or(defaults.model),
        n_slots: options.n_slots.unwrap_or(defaults.n_slots),
        n_ctx: options.n_ctx.unwrap_or(defaults.n_ctx),
        prefill_tps: options.sim_prefill_tps.unwrap_or(defaults.prefill_tps),
        decode_tps: options.sim_decode_tps.unwrap_or(defaults.decode_tps),
        decode_sharing_cost: options.sim_decode_sharing.unwrap_or(defaults.decode_sharing_cost),
        max_queued: options.max_queued.unwrap_or(defaults.max_queued),
        abort: options.sim_abort,
        ..SimConfig::default()
    };
    let config = match options.sim_machine {
        Some(machine) => machine.configure(config),
        None => config,
    };
    SimEngine::with_puller(config, puller)
}
