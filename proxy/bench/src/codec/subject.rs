//! What KV goes through, and the figures of it.

use std::sync::Arc;
use std::time::Instant;

use baton_engines::llama::trial::KvTrial;
use baton_proxy::serve::CommandFailure;
use baton_schemas::Token;
use baton_schemas::kv::{
    Chunk, Codec, CodecProfile, Contiguous, Fingerprint, Handoff, HandoffId, HandoffReader, HandoffRecord,
    HandoffWriter, Mac, ModelKnowledge, Offer, StreamChoice,
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
    /// Every subject, of a model with a profile or without one.
    pub(super) fn all(has_profile: bool) -> impl Iterator<Item = Subject> {
        let all = [
            Subject::Floor,
            Subject::Codec(Codec::PlanesZstd),
            Subject::Codec(Codec::Q8_0),
            Subject::Codec(Codec::Kvq),
            Subject::Profiled(Codec::Kvq),
            Subject::Codec(Codec::KvqFast),
            Subject::Profiled(Codec::KvqFast),
            Subject::Q4_0,
        ];
        all.into_iter().filter(move |subject| has_profile || !matches!(subject, Subject::Profiled(_)))
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

    /// Lets a prompt's KV pass.
    pub(super) fn pass(
        self,
        TriedModel { trial, profile, .. }: &mut TriedModel<'_>,
        prompt: &[Token],
        plain: &[Chunk],
    ) -> Result<Passed, CommandFailure> {
        let n_plain: usize = plain.iter().map(Chunk::n_bytes).sum();
        let untimed = |chunks, n_wire| Passed { chunks, n_plain, n_wire, encode: 0.0, decode: 0.0 };
        match self {
            Subject::Floor => Ok(untimed(trial.prefill(prompt, FLOOR_BATCH)?, n_plain as f64)),
            Subject::Codec(codec) => through(codec, trial, None, prompt, plain),
            Subject::Profiled(codec) => through(codec, trial, profile.as_ref(), prompt, plain),
            Subject::Q4_0 => {
                let dtypes = || {
                    let layers = trial.layout().sections.iter().flat_map(|section| &section.layers);
                    layers.flat_map(|layer| [layer.k.dtype, layer.v.unwrap_or(layer.k).dtype])
                };
                let chunks = plain.iter().map(|chunk| q4_0::pass(chunk, dtypes())).collect();
                Ok(untimed(chunks, n_plain as f64 / q4_0::RATIO))
            }
        }
    }
}

/// A prompt's KV after it has passed.
pub(super) struct Passed {
    pub(super) chunks: Vec<Chunk>,
    n_plain: usize,
    /// Bytes on the wire.
    n_wire: f64,
    /// Seconds, on as many cores as a stream uses.
    encode: f64,
    decode: f64,
}

/// Writes all chunks as a handoff, and reads them.
pub(super) fn through(
    codec: Codec,
    trial: &KvTrial<'_>,
    profile: Option<&Arc<CodecProfile>>,
    prompt: &[Token],
    plain: &[Chunk],
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
    let choice = StreamChoice { codec, mac, checkpoints: &[], known };
    let (mut writer, head) = HandoffWriter::begin_as(KEY, handoff.clone(), choice)?;
    let began = Instant::now();
    let frames = plain.iter().map(|chunk| writer.frame(chunk)).collect::<Result<Vec<_>, _>>()?;
    let encode = began.elapsed().as_secs_f64();
    let n_wire: usize = frames.iter().flatten().map(|piece| piece.len()).sum();
    let offer = Offer { codecs: &[codec], macs: Mac::best_first() };
    let mut reader = HandoffReader::with_placement(KEY, handoff, offer, Contiguous)?;
    let mut chunks = Vec::new();
    let mut decode = 0.0;
    for piece in head.iter().chain(frames.iter().flatten()) {
        let mut input = &piece[..];
        loop {
            let began = Instant::now();
            let event = reader.read(&mut input)?;
            decode += began.elapsed().as_secs_f64();
            match event {
                Some(HandoffRecord::Frame(kv)) => chunks.push(kv.into_chunk()),
                Some(_) => {}
                None => break,
            }
        }
    }
    let n_plain = plain.iter().map(Chunk::n_bytes).sum();
    Ok(Passed { chunks, n_plain, n_wire: n_wire as f64, encode, decode })
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
