//! Calls the worker, a Python process that computes the model with mlx-lm (`worker.py`).
//!
//! A worker that ends, breaks the protocol, or gives no sign of life while it should compute is *lost*. It is killed, and
//! the next call starts another one, without KV. If none can load the model any more, this process
//! ends. [`PythonWorker::n_lost`] tells that apart from a call that the model refused.

mod frame;
mod process;

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use baton_model::gguf::window::{SectionLayers, Window};
use baton_model::hf::{LinearLayers, Rope};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use self::frame::Deadline;
use self::process::Process;
use crate::serving::start::abort;

/// Importing Python's packages and reading some hundred gigabytes of weights.
const MAX_LOAD: Duration = Duration::from_secs(600);

/// The most freed memory that MLX keeps to use it again, bytes. Each cut and each copy of a slot frees the KV of the slot.
pub(super) const MAX_CACHE_BYTES: u64 = 512 << 20;

/// How often a model that was loaded before is loaded again without success.
const MAX_LOADS: u32 = 3;

/// While Python imports its packages from a cold disk, its other threads may not run for long.
const MAX_SILENCE_OF_LOAD: Duration = Duration::from_secs(60);

/// A step of 512 tokens of a large model on a slow processor. That the worker lives is seen sooner.
const MAX_COMPUTE: Duration = Duration::from_secs(300);

/// Moving KV.
const MAX_MOVE: Duration = Duration::from_secs(60);

/// The worker that a context and the vectors share. Both belong to the scheduler's thread.
pub(super) type SharedWorker = Rc<RefCell<PythonWorker>>;

/// How a worker is started.
#[derive(Debug, Clone)]
pub(super) struct WorkerConfig {
    pub(super) python: PathBuf,
    pub(super) model: PathBuf,
    /// `cpu`, or MLX's own choice.
    pub(super) device: Option<String>,
    pub(super) n_threads: Option<u32>,
    pub(super) n_slots: usize,
    pub(super) sections: Vec<SectionLayers>,
    /// The layers that keep a state instead of KV.
    pub(super) states: Option<LinearLayers>,
    pub(super) rope: Rope,
    pub(super) window: Option<Window>,
    /// K's elements are handed over in interleaved order.
    pub(super) interleaved: bool,
    pub(super) max_silence: Duration,
}

/// A call of the worker. Token ids and KV are in the payload.
#[derive(Debug, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum Request<'a> {
    Compute {
        parts: &'a [SlotTokens],
    },
    Embed {
        from: usize,
    },
    Cut {
        slot: usize,
        n: usize,
    },
    Fork {
        source: usize,
        slot: usize,
        n: usize,
    },
    Overwrite,
    /// The rows of each section from its start to `p1`.
    Export {
        slot: usize,
        p1: u32,
        starts: &'a [u32],
    },
    Import {
        slot: usize,
        p0: u32,
        p1: u32,
        starts: &'a [u32],
    },
    /// The states of a slot's end.
    ExportState {
        slot: usize,
    },
    ImportState {
        slot: usize,
    },
}

/// A slot's part of a batch.
#[derive(Debug, Serialize)]
pub(super) struct SlotTokens {
    pub(super) slot: usize,
    /// The position of the first token.
    pub(super) from: usize,
    pub(super) n: usize,
    /// The tokens whose logits are wanted, counted from the part's first one.
    pub(super) wanted: Vec<usize>,
}

/// The first call.
#[derive(Serialize)]
struct Load<'a> {
    op: &'static str,
    model: &'a str,
    device: Option<&'a str>,
    n_slots: usize,
    sections: &'a [SectionLayers],
    states: Option<&'a LinearLayers>,
    interleaved: bool,
    cache_bytes: u64,
    model_config: ModelConfig<'a>,
}

/// Keys that replace those of the model's `config.json`.
#[derive(Serialize)]
struct ModelConfig<'a> {
    rope_theta: f64,
    rope_scaling: Option<&'a RawValue>,
    #[serde(flatten)]
    window: Option<WindowConfig>,
}

/// The same of a model with a window.
#[derive(Serialize)]
struct WindowConfig {
    rope_local_base_freq: f64,
    sliding_window: usize,
    sliding_window_pattern: usize,
}

/// The head of a reply.
#[derive(Deserialize)]
struct PythonReply {
    #[serde(default)]
    busy: bool,
    error: Option<String>,
    n_vocab: Option<usize>,
    device: Option<ComputeDevice>,
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ComputeDevice {
    Cpu,
    Gpu,
}

/// What a worker says when it has loaded its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PythonModel {
    pub(super) n_vocab: usize,
    pub(super) device: ComputeDevice,
}

/// Why a call gave nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum PythonFailure {
    /// The worker lives and still has its KV.
    #[error("{0}")]
    Refused(String),
    /// The worker is gone, and all KV with it.
    #[error("the mlx worker is lost: {0}")]
    Lost(String),
}

/// See the module's documentation.
pub(super) struct PythonWorker {
    config: WorkerConfig,
    /// `None` after it was lost.
    process: Option<Process>,
    /// How many workers were lost with their KV.
    pub(super) n_lost: u64,
}

impl PythonWorker {
    /// Starts a worker and loads the model. It ends with the calling thread.
    pub(super) fn start(config: WorkerConfig) -> Result<(PythonWorker, PythonModel), PythonFailure> {
        let mut worker = PythonWorker { config, process: None, n_lost: 0 };
        let loaded = worker.load()?;
        Ok((worker, loaded))
    }

    /// The number of the worker's process, if one runs.
    pub(super) fn process_id(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.child.id())
    }

    /// Starts another worker after one was lost. If that fails several times, later requests would fail, too, each after
    /// a long wait: then the process ends.
    fn load_again(&mut self) {
        let n_lost = self.n_lost;
        for _ in 0..MAX_LOADS {
            let loaded = self.load();
            // A worker that is lost before it has KV takes none with it.
            self.n_lost = n_lost;
            match loaded {
                Ok(_) => return,
                Err(error) => tracing::error!(%error, "another mlx worker cannot load the model"),
            }
        }
        abort(&format!("{MAX_LOADS} mlx workers could not load the model"));
    }

    fn load(&mut self) -> Result<PythonModel, PythonFailure> {
        let lost = |error: std::io::Error| PythonFailure::Lost(format!("it cannot be started: {error}"));
        let WorkerConfig {
            python, model, device, n_threads, n_slots, sections, states, rope, window, interleaved, ..
        } = &self.config;
        let model =
            model.to_str().ok_or_else(|| PythonFailure::Refused("the path of the model is not UTF-8".into()))?;
        let load = Load {
            op: "load",
            model,
            device: device.as_deref(),
            n_slots: *n_slots,
            sections,
            states: states.as_ref(),
            interleaved: *interleaved,
            cache_bytes: MAX_CACHE_BYTES,
            model_config: ModelConfig {
                rope_theta: rope.base,
                rope_scaling: rope.scaling.as_ref().map(|scaling| &*scaling.text),
                window: window.map(|Window { n_positions, period }| WindowConfig {
                    rope_local_base_freq: rope.windowed_base,
                    sliding_window: n_positions,
                    sliding_window_pattern: period,
                }),
            },
        };
        let head = serde_json::to_vec(&load).map_err(|error| PythonFailure::Refused(error.to_string()))?;
        self.process = Some(Process::start(python, *n_threads).map_err(lost)?);
        let max_silence = self.config.max_silence.max(MAX_SILENCE_OF_LOAD);
        let deadline = Deadline { end: Instant::now() + MAX_LOAD, max_silence };
        let reply = self.exchange(&head, &[], 0, deadline);
        if matches!(reply, Err(PythonFailure::Refused(_))) {
            // A worker without a model is of no use; dropping it ends it.
            self.process = None;
        }
        let (reply, _) = reply?;
        match reply {
            PythonReply { n_vocab: Some(n_vocab), device: Some(device), .. } => Ok(PythonModel { n_vocab, device }),
            _ => Err(self.lose("it does not say what it has loaded".into())),
        }
    }

    /// Makes a call, whose reply has a payload of `n_reply` bytes. If no worker runs, one is started first.
    pub(super) fn call(
        &mut self,
        request: &Request,
        payload: &[&[u8]],
        n_reply: usize,
    ) -> Result<Vec<u8>, PythonFailure> {
        if self.process.is_none() {
            let began = Instant::now();
            self.load_again();
            tracing::warn!(seconds = began.elapsed().as_secs_f64(), "another mlx worker has loaded the model");
        }
        let limit = match request {
            Request::Compute { .. } | Request::Embed { .. } => MAX_COMPUTE,
            Request::Cut { .. }
            | Request::Fork { .. }
            | Request::Overwrite
            | Request::Export { .. }
            | Request::Import { .. }
            | Request::ExportState { .. }
            | Request::ImportState { .. } => MAX_MOVE,
        };
        let head = serde_json::to_vec(request).map_err(|error| PythonFailure::Refused(error.to_string()))?;
        let deadline = Deadline { end: Instant::now() + limit, max_silence: self.config.max_silence };
        self.exchange(&head, payload, n_reply, deadline).map(|(_, payload)| payload)
    }

    fn exchange(
        &mut self,
        head: &[u8],
        payload: &[&[u8]],
        n_reply: usize,
        deadline: Deadline,
    ) -> Result<(PythonReply, Vec<u8>), PythonFailure> {
        let Some(process) = &self.process else { return Err(PythonFailure::Lost("it does not run".into())) };
        match answer(process, head, payload, n_reply, deadline) {
            Ok((PythonReply { error: Some(error), .. }, _)) => Err(PythonFailure::Refused(error)),
            Ok(reply) => Ok(reply),
            Err(why) => Err(self.lose(why)),
        }
    }

    /// Ends the worker.
    fn lose(&mut self, why: String) -> PythonFailure {
        self.n_lost += 1;
        let ended = self.process.take().map_or_else(String::new, |process| process.child.end());
        tracing::error!(why, ended, "the mlx worker is lost; another one will be started");
        PythonFailure::Lost(format!("{why}; {ended}"))
    }
}

/// Sends a request and waits for its reply. Errors, in words: the worker is not to be trusted any more.
fn answer(
    process: &Process,
    head: &[u8],
    payload: &[&[u8]],
    n_reply: usize,
    deadline: Deadline,
) -> Result<(PythonReply, Vec<u8>), String> {
    let in_words = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset => {
            "it has closed its connection".to_owned()
        }
        std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => {
            "it gives no sign of life, or takes too long".to_owned()
        }
        _ => error.to_string(),
    };
    frame::send(&process.socket, head, payload, deadline).map_err(in_words)?;
    loop {
        let (head, n_payload) = frame::receive_head(&process.socket, deadline).map_err(in_words)?;
        let reply: PythonReply =
            serde_json::from_slice(&head).map_err(|error| format!("its reply is not valid: {error}"))?;
        let expected = if reply.busy || reply.error.is_some() { 0 } else { n_reply };
        if n_payload != expected as u64 {
            return Err(format!("its reply has {n_payload} bytes instead of {expected}"));
        }
        if reply.busy {
            continue;
        }
        let mut payload = vec![0; expected];
        frame::fill(&process.socket, &mut payload, deadline).map_err(in_words)?;
        return Ok((reply, payload));
    }
}
