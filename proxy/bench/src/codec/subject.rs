//! What KV goes through, and the figures of it.

use std::sync::Arc;
use std::time::Instant;

use baton_engines::llama::trial::{KvTrial, PromptKv};
use baton_proxy::serve::CommandFailure;
use baton_schemas::Token;
use baton_schemas::kv::{
    Chunk, Codec, CodecProfile, Contiguous, Fingerprint, Handoff, HandoffId, HandoffReader, HandoffRecord,
    HandoffWriter, KvLayout, Mac, ModelKnowledge, Offer, StatePart, StreamChoice, VerifiedState,
};

use super::divergence::Divergence;
use super::q4_0;
use super::tried::TriedModel;

/// The batch of the floor.
const FLOOR_BATCH: usize = 64;

/// Seals the streams.
const KEY: &[u8] = b"a benchmark's key";

/// What a prompt's KV goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Subject {
    /// Smaller batches: the noise of other kernels.
    Floor,
    /// A codec of handoffs.
    Codec(Codec),
    /// The same with the model's profile.
    Profiled(Codec),
    /// ggml's `q4_0`, for comparison.
    Q4_0,
}

impl Subject {
    /// Every subject, of a model with this layout, with a profile or without one.
    pub(super) fn all(layout: &KvLayout, has_profile: bool) -> Vec<Subject> {
        let all = [
            Subject::Floor,
            Subject::Codec(Codec::PlanesZstd),
            Subject::Codec(Codec::Q8_0),
            Subject::Codec(Codec::Kvq),
            Subject::Profiled(Codec::Kvq),
            Subject::Codec(Codec::KvqFast),
            Subject::Profiled(Codec::KvqFast),
            Subject::Q4_0,
            Subject::Codec(Codec::StateF16),
            Subject::Codec(Codec::StateInt8),
        ];
        let is_possible = |subject: &Subject| match subject {
            Subject::Floor => true,
            Subject::Q4_0 => !layout.sections.is_empty(),
            Subject::Codec(codec) => fits(*codec, layout),
            Subject::Profiled(codec) => has_profile && fits(*codec, layout),
        };
        all.into_iter().filter(is_possible).collect()
    }

    /// The name in tables.
    pub(super) fn name(self) -> String {
        match self {
            Subject::Floor => "noise floor: batches of 64".to_owned(),
            Subject::Codec(codec) => codec.as_str().to_owned(),
            Subject::Profiled(codec) => format!("{} with a profile", codec.as_str()),
            Subject::Q4_0 => "q4_0".to_owned(),
        }
    }

    /// The bits of a value before it: of states F32, of rows F16.
    pub(super) fn bits(self) -> f64 {
        match self {
            Subject::Codec(Codec::StateF16 | Codec::StateInt8) => 32.0,
            Subject::Floor | Subject::Codec(_) | Subject::Profiled(_) | Subject::Q4_0 => 16.0,
        }
    }

    /// Lets a prompt's KV pass.
    pub(super) fn pass(
        self,
        TriedModel { trial, profile, .. }: &mut TriedModel<'_>,
        prompt: &[Token],
        plain: &PromptKv,
    ) -> Result<Passed, CommandFailure> {
        let n_plain = plain.n_bytes();
        let untimed = |kv, n_wire| Passed { kv, n_plain, n_wire, encode: 0.0, decode: 0.0 };
        match self {
            Subject::Floor => Ok(untimed(trial.prefill(prompt, FLOOR_BATCH)?, n_plain as f64)),
            Subject::Codec(codec) => through(codec, trial, None, prompt, plain),
            Subject::Profiled(codec) => through(codec, trial, profile.as_ref(), prompt, plain),
            Subject::Q4_0 => {
                let dtypes = || {
                    let layers = trial.layout().sections.iter().flat_map(|section| &section.layers);
                    layers.flat_map(|layer| [layer.k.dtype, layer.v.unwrap_or(layer.k).dtype])
                };
                let chunks = plain.chunks.iter().map(|chunk| q4_0::pass(chunk, dtypes())).collect();
                Ok(untimed(PromptKv { chunks, state: plain.state.clone() }, n_plain as f64 / q4_0::RATIO))
            }
        }
    }
}

/// A prompt's KV after it has passed.
pub(super) struct Passed {
    pub(super) kv: PromptKv,
    n_plain: usize,
    /// Bytes on the wire.
    n_wire: f64,
    /// Seconds, on as many cores as a stream uses.
    encode: f64,
    decode: f64,
}

/// Returns true if the layout has something that the codec can encode.
pub(super) fn fits(codec: Codec, layout: &KvLayout) -> bool {
    (!layout.sections.is_empty() && codec.check(layout).is_ok()) || is_of_states(codec, layout)
}

/// Returns true if the codec is for states, and the layout has some.
fn is_of_states(codec: Codec, layout: &KvLayout) -> bool {
    codec != Codec::None && codec.check_states(layout).is_ok()
}

/// Writes the part of the KV that the codec is for as a handoff, and reads it. The sizes and times are those of this part.
pub(super) fn through(
    codec: Codec,
    trial: &KvTrial<'_>,
    profile: Option<&Arc<CodecProfile>>,
    prompt: &[Token],
    plain: &PromptKv,
) -> Result<Passed, CommandFailure> {
    let handoff = Handoff {
        id: HandoffId([0; 16]),
        fingerprint: Fingerprint { vocabulary: [0; 32], weights: [0; 32] },
        layout: trial.layout().clone(),
        start: 0,
        tokens: prompt.to_vec(),
    };
    let known = ModelKnowledge { rotation: trial.rotation(), tensors: profile.map_or(&[], |profile| &profile.tensors) };
    let mac = Mac::best_first().first().copied().unwrap_or_default();
    let is_of_states = is_of_states(codec, trial.layout());
    let [codec, state_codec] = if is_of_states { [Codec::None, codec] } else { [codec, Codec::None] };
    let choice = StreamChoice { codec, state_codec, mac, checkpoints: &[], known };
    let (mut writer, head) = HandoffWriter::begin_as(KEY, handoff.clone(), choice)?;
    let began = Instant::now();
    let records = match &plain.state {
        Some(part) if is_of_states => vec![writer.state(part)?],
        _ => plain.chunks.iter().map(|chunk| writer.frame(chunk)).collect::<Result<Vec<_>, _>>()?,
    };
    let encode = began.elapsed().as_secs_f64();
    let n_wire: usize = records.iter().flatten().map(|piece| piece.len()).sum();
    let offer = Offer { codecs: &[codec], state_codecs: &[state_codec], macs: Mac::best_first() };
    let mut reader = HandoffReader::with_placement(KEY, handoff, offer, Contiguous)?;
    let mut kv = PromptKv { chunks: Vec::new(), state: plain.state.clone() };
    let mut decode = 0.0;
    for piece in head.iter().chain(records.iter().flatten()) {
        let mut input = &piece[..];
        loop {
            let began = Instant::now();
            let event = reader.read(&mut input)?;
            decode += began.elapsed().as_secs_f64();
            match event {
                Some(HandoffRecord::Frame(frame)) => kv.chunks.push(frame.into_chunk()),
                Some(HandoffRecord::State(state)) => kv.state = Some(whole(&state)),
                Some(_) => {}
                None => break,
            }
        }
    }
    let rows = || plain.chunks.iter().map(Chunk::n_bytes).sum();
    let n_plain = plain.state.as_ref().filter(|_| is_of_states).map_or_else(rows, StatePart::n_bytes);
    if is_of_states {
        kv.chunks.clone_from(&plain.chunks);
    }
    Ok(Passed { kv, n_plain, n_wire: n_wire as f64, encode, decode })
}

/// All states of a position as one part.
fn whole(state: &VerifiedState) -> StatePart {
    StatePart { position: state.position(), first: 0, tensors: state.tensors().to_vec() }
}

/// The sums of all prompts.
#[derive(Debug, Clone, Default)]
pub(super) struct CodecSums {
    n_plain: f64,
    n_wire: f64,
    encode: f64,
    decode: f64,
    /// Of each prompt.
    pub(super) mean_kl: Vec<f64>,
    worst_kl: f64,
    n_tokens: usize,
    n_agreed: usize,
}

impl CodecSums {
    pub(super) fn add(&mut self, passed: &Passed, divergences: &[Divergence]) {
        self.n_plain += passed.n_plain as f64;
        self.n_wire += passed.n_wire;
        self.encode += passed.encode;
        self.decode += passed.decode;
        let kls = divergences.iter().map(|divergence| divergence.kl);
        self.mean_kl.push(kls.clone().sum::<f64>() / divergences.len().max(1) as f64);
        self.worst_kl = kls.fold(self.worst_kl, f64::max);
        self.n_tokens += divergences.len();
        self.n_agreed += divergences.iter().filter(|divergence| divergence.agrees).count();
    }

    /// Plain bytes divided by bytes on the wire.
    pub(super) fn ratio(&self) -> f64 {
        self.n_plain / self.n_wire
    }

    /// The mean of all prompts, nats.
    pub(super) fn mean_kl(&self) -> f64 {
        self.mean_kl.iter().sum::<f64>() / self.mean_kl.len().max(1) as f64
    }

    /// Of all tokens.
    pub(super) fn worst_kl(&self) -> f64 {
        self.worst_kl
    }

    /// The share of tokens whose likeliest successor is the same.
    pub(super) fn agreement(&self) -> f64 {
        self.n_agreed as f64 / self.n_tokens.max(1) as f64
    }

    /// Plain GB/s of encoding and of decoding, with MACs. `None`: not measured.
    pub(super) fn speeds(&self) -> Option<(f64, f64)> {
        (self.encode > 0.0).then(|| (self.n_plain / self.encode / 1e9, self.n_plain / self.decode / 1e9))
    }
}
