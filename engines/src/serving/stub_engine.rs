//! A new engine, as small as can be: it opens through the same trait as the others, and keeps the contract of engines. It reads
//! a GGUF file's header and vocabulary, and its logits are a hash of the tokens before them.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use baton_link::engine::Engine;
use baton_model::gguf::{CompanionMemory, Gguf, ModelSizes, SizeOptions};
use baton_model::options::{CacheTypes, RopeOptions};
use baton_model::vocabulary::FileVocabulary;
use baton_schemas::kv::{Chunk, VerifiedKv};
use baton_schemas::no_handoff::NoHandoffReason;
use baton_schemas::{EngineError, Token};

use super::context::{BatchToken, CannotCut, ComputeError, ExportTo, ModelContext, PredictionHead};
use super::described::{DescribedModel, Generator, IdleKv, LoadedModel, ModelLibrary, NoKv, Tokenization};
use super::images::NoImages;
use super::jobs::EngineLoad;
use super::load_error::LoadError;
use super::memory::available_memory;
use super::open::open;
use super::scheduler::SchedulerLimits;
use super::text_vectors::{self, TextModel, TextVectors};
use crate::engine_options::EngineOptions;

#[path = "../../tests/engines/contract/checks.rs"]
mod checks;

const N_EMBD: usize = 8;
const NO_KV: &str = "its tokens are all of its state";

struct Stub {
    /// Why the model cannot be loaded.
    fails: Option<&'static str>,
}

struct StubModel {
    options: EngineOptions,
    sizes: ModelSizes,
    n_vocab: usize,
    fails: Option<&'static str>,
}

impl ModelLibrary for Stub {
    const ENGINE: &'static str = "stub";
    const VERSION: &'static str = "1";
    const NAME: &'static str = "the stub";

    type Model = StubModel;
    type Context<'m> = StubContext;
    type Vectors<'m> = TextVectors<StubTexts>;

    fn describe(&self, options: &EngineOptions) -> Result<DescribedModel<StubModel>, LoadError> {
        let path = options.path()?;
        let header = Arc::new(Gguf::open(path)?);
        let tokens = Tokenization::of_file(FileVocabulary::read(&header, path)?)?;
        let wanted = SizeOptions {
            n_ctx: options.n_ctx,
            n_cells: options.n_cells,
            n_slots: options.slots(),
            sequences: options.sequences(&header),
            cache_types: CacheTypes::default(),
            companions: CompanionMemory::NONE,
        };
        let sizes = ModelSizes::choose(&header, wanted, available_memory())?;
        let n_vocab = tokens.vocabulary.n_tokens();
        Ok(DescribedModel {
            tokens,
            sizes,
            fingerprint: header.fingerprint(&[])?,
            quantization: "hash".into(),
            model_bytes: 0,
            embedding: Some(text_vectors::facts(&header, N_EMBD, sizes.n_ctx)),
            reranker: None,
            images: None,
            workers: Vec::new(),
            header,
            model: StubModel { options: options.clone(), sizes, n_vocab, fails: self.fails },
        })
    }

    fn load(
        model: &StubModel,
        shared: &Arc<EngineLoad>,
    ) -> Result<LoadedModel<StubContext, TextVectors<StubTexts>>, LoadError> {
        if let Some(why) = model.fails {
            return Err(LoadError::Refused { library: Stub::NAME, why: why.into() });
        }
        let limits = SchedulerLimits::new(&model.options, model.sizes, true);
        let context = StubContext::new(limits.n_slots, model.n_vocab);
        let vectors = TextVectors::new(StubTexts::default(), limits.budget.alone, Arc::clone(shared));
        let generator = Generator {
            context,
            limits,
            kv: Err(NoKv { reason: NoHandoffReason::UnknownCache, detail: NO_KV.into() }),
            idle: IdleKv::Stays,
            guesser: None,
        };
        Ok(LoadedModel { generator: Some(generator), vectors, devices: vec!["none".into()] })
    }
}

fn mix(hash: u64, x: u64) -> u64 {
    (hash ^ x).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
}

/// The stub's state after these tokens: a hash.
fn state(weights: u64, tokens: &[Token]) -> u64 {
    tokens.iter().fold(weights, |hash, token| mix(hash, u64::from(*token)))
}

/// `n` values that are a function of the tokens and the weights.
fn hashed(weights: u64, tokens: &[Token], n: usize) -> Vec<f32> {
    values(state(weights, tokens), n)
}

fn values(state: u64, n: usize) -> Vec<f32> {
    (0..n as u64).map(|i| (mix(mix(state, i), i) % 4096) as f32 / 512.0).collect()
}

/// A hidden row: how many tokens it has seen, and their state in pieces that an f32 holds exactly.
fn hidden_row(n_tokens: usize, state: u64) -> Vec<f32> {
    [n_tokens as f32].into_iter().chain((0..4).map(|i| ((state >> (16 * i)) & 0xFFFF) as f32)).collect()
}

/// A head that predicts what the model itself would, if that has the same weights. It panics where a row is not that of the token
/// before.
pub(super) struct StubHead {
    /// The positions of each slot.
    slots: Vec<Range<usize>>,
    states: Vec<u64>,
    positions: Vec<usize>,
    logits: Vec<Vec<f32>>,
    hidden: Vec<f32>,
    n_vocab: usize,
    /// Changes what it predicts.
    pub(super) error: u64,
    /// A batch with more rows is refused.
    pub(super) refuses_beyond: usize,
}

impl StubHead {
    pub(super) fn new(n_slots: usize, n_vocab: usize) -> Self {
        StubHead {
            slots: vec![0..0; n_slots],
            states: Vec::new(),
            positions: Vec::new(),
            logits: Vec::new(),
            hidden: Vec::new(),
            n_vocab,
            error: 0,
            refuses_beyond: usize::MAX,
        }
    }

    /// The tokens that it holds.
    pub(super) fn n_tokens(&self) -> usize {
        self.slots.iter().map(Range::len).sum()
    }
}

impl PredictionHead for StubHead {
    fn n_values(&self) -> usize {
        hidden_row(0, 0).len()
    }

    fn compute(&mut self, batch: &[BatchToken], hidden: &[f32]) -> Result<(), ComputeError> {
        self.states.clear();
        self.positions.clear();
        self.logits.clear();
        assert_eq!(hidden.len(), batch.len() * self.n_values());
        for (row, hidden) in batch.iter().zip(hidden.chunks_exact(self.n_values())) {
            let position = row.position as usize;
            let slot = &mut self.slots[row.slot as usize];
            *slot = if slot.start == slot.end { position..position } else { slot.clone() };
            assert_eq!((slot.end, hidden[0] as usize), (position, position), "the row of the token before");
            slot.end += 1;
            let before: u64 = hidden[1..].iter().enumerate().map(|(i, piece)| (*piece as u64) << (16 * i)).sum();
            let state = mix(before, u64::from(row.token));
            self.states.push(state);
            self.positions.push(position);
            self.logits
                .push(values(mix(state, self.error).wrapping_sub(mix(state, 0)).wrapping_add(state), self.n_vocab));
        }
        if batch.len() > self.refuses_beyond { Err(ComputeError::Refused("too many rows".into())) } else { Ok(()) }
    }

    fn logits(&mut self, index: usize) -> &[f32] {
        &self.logits[index]
    }

    fn hidden(&mut self, index: usize) -> &[f32] {
        self.hidden = hidden_row(self.positions[index] + 1, self.states[index]);
        &self.hidden
    }

    fn cut(&mut self, slot: usize, from: usize) {
        let Range { start, end } = self.slots[slot].clone();
        self.slots[slot] = start..end.min(from).max(start);
    }
}

pub(super) struct StubContext {
    /// The tokens of each slot.
    slots: Vec<Vec<Token>>,
    /// Logits after each token of the last batch that wanted them.
    rows: Vec<Vec<f32>>,
    /// The hidden row of each token of the last batch.
    hidden: Vec<Vec<f32>>,
    n_vocab: usize,
    /// A batch with more rows that want logits is refused, after it was computed.
    pub(super) refuses_beyond: Option<usize>,
    /// The batches that were refused.
    pub(super) n_refused: usize,
    /// No position of the last batch can be taken back.
    pub(super) keeps_drafts: bool,
    /// Other ones give other logits.
    pub(super) weights: u64,
    /// Its logits are not numbers.
    pub(super) is_broken: bool,
    /// The largest number of tokens that it held.
    pub(super) most_tokens: usize,
}

/// The weights of the model.
const WEIGHTS: u64 = 1;

impl StubContext {
    pub(super) fn new(n_slots: usize, n_vocab: usize) -> Self {
        StubContext {
            slots: vec![Vec::new(); n_slots],
            rows: Vec::new(),
            hidden: Vec::new(),
            n_vocab,
            refuses_beyond: None,
            n_refused: 0,
            keeps_drafts: false,
            weights: WEIGHTS,
            is_broken: false,
            most_tokens: 0,
        }
    }

    pub(super) fn tokens(&self, slot: usize) -> &[Token] {
        &self.slots[slot]
    }
}

impl ModelContext for StubContext {
    type Preparation = NoImages;
    type Head = StubHead;

    fn compute(&mut self, batch: &[BatchToken]) -> Result<(), ComputeError> {
        self.rows.clear();
        self.hidden.clear();
        for token in batch {
            let slot = &mut self.slots[token.slot as usize];
            assert_eq!(slot.len(), token.position as usize);
            slot.push(token.token);
            let mut row = if token.wants_logits { hashed(self.weights, slot, self.n_vocab) } else { Vec::new() };
            row.iter_mut().filter(|_| self.is_broken).for_each(|logit| *logit = f32::NAN);
            self.rows.push(row);
            self.hidden.push(hidden_row(slot.len(), state(self.weights, slot)));
        }
        self.most_tokens = self.most_tokens.max(self.slots.iter().map(Vec::len).sum());
        let n_rows = batch.iter().filter(|token| token.wants_logits).count();
        let is_refused = self.refuses_beyond.is_some_and(|n| n_rows > n);
        self.n_refused += usize::from(is_refused);
        if is_refused { Err(ComputeError::Refused("too many rows".into())) } else { Ok(()) }
    }

    fn logits(&mut self, index: usize) -> &[f32] {
        &self.rows[index]
    }

    fn hidden(&mut self, index: usize) -> &[f32] {
        &self.hidden[index]
    }

    fn synchronize(&mut self) {}

    fn cut(&mut self, slot: usize, n_keep: usize) -> Result<(), CannotCut> {
        self.slots[slot].truncate(n_keep);
        Ok(())
    }

    fn max_rollback(&self) -> usize {
        usize::MAX
    }

    fn take_back(&mut self, slot: usize, n_keep: usize) -> Result<(), CannotCut> {
        if self.keeps_drafts { Err(CannotCut) } else { self.cut(slot, n_keep) }
    }

    fn fork(&mut self, source: usize, slot: usize, n: usize) -> bool {
        self.slots[slot] = self.slots[source][..n].to_vec();
        true
    }

    fn forks_share_cells(&self) -> bool {
        false
    }

    fn oldest(&self, _: usize) -> usize {
        0
    }

    fn overwrite(&mut self) {
        self.slots.iter_mut().for_each(Vec::clear);
    }

    fn export(&mut self, _: usize, _: Range<u32>, _: u32, _: ExportTo) -> Result<Chunk, String> {
        Err(NO_KV.into())
    }

    fn import(&mut self, _: usize, _: u32, _: VerifiedKv) -> Result<Vec<u8>, String> {
        Err(NO_KV.into())
    }

    fn restore(&mut self, _: usize, _: &Chunk) -> Result<(), String> {
        Err(NO_KV.into())
    }

    fn can_continue(&self, slot: usize, n_present: usize) -> bool {
        self.slots[slot].len() >= n_present
    }
}

#[derive(Default)]
struct StubTexts {
    state: Vec<f32>,
}

impl TextModel for StubTexts {
    fn add(&mut self, text: &[Token], _: usize) -> Result<(), EngineError> {
        self.state = hashed(WEIGHTS, text, N_EMBD);
        Ok(())
    }

    fn pooled(&self) -> &[f32] {
        &self.state
    }

    fn forget(&mut self) {
        self.state.clear();
    }
}

fn options(folder: &Path) -> EngineOptions {
    let path = folder.join("tiny.gguf");
    tiny_gguf::write_with_template(&path, tiny_gguf::Architecture::Llama, 1);
    EngineOptions { n_ctx: Some(2_048), max_queued: Some(8), ..EngineOptions::of(path) }
}

#[tokio::test]
async fn a_new_engine_opens_as_the_others_do_and_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    let engine = Arc::new(open(&Stub { fails: None }, &options(folder.path()), None).unwrap());
    let info = engine.info().await.unwrap();
    assert_eq!((info.engine.as_str(), info.n_slots, info.has_chat_template, info.kv), ("stub", 4, true, None));
    checks::check(engine).await;
}

#[test]
fn a_model_that_is_not_loaded_is_named_to_the_operator_and_not_to_clients() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path());
    let error = |stub: Stub, options: &EngineOptions| open(&stub, options, None).err().unwrap();
    let refused = error(Stub { fails: Some("it is a stub") }, &options);
    let path = options.path().unwrap().display();
    assert_eq!(refused.to_string(), format!("{path}: the stub cannot load the model: it is a stub"));
    assert_eq!(refused.summary(), "the model is of a kind that cannot be loaded");
    let stub = || Stub { fails: None };
    let too_large = EngineOptions { n_ctx: Some(2_000_000_000), ..options.clone() };
    let too_large = error(stub(), &too_large);
    assert!(too_large.to_string().starts_with(&format!("{path}: too little memory: ")), "{too_large}");
    let template = EngineOptions { chat_template: Some("{% if %}".into()), ..options };
    assert_eq!(error(stub(), &template).summary(), "the model's chat template cannot be used");
    assert!(matches!(error(stub(), &EngineOptions::default()), LoadError::NoModel));
}

#[test]
fn an_engine_is_not_opened_with_options_that_it_lacks_or_that_are_out_of_range() {
    let refused = |changed: EngineOptions| open(&Stub { fails: None }, &changed, None).err().unwrap().to_string();
    let options = || EngineOptions::of("missing.gguf");
    let rope = RopeOptions { freq_base: Some(1e4), ..RopeOptions::default() };
    assert_eq!(
        refused(EngineOptions { rope, ..options() }),
        "the stub engine has no options of RoPE; --engine llama has"
    );
    let slots = refused(EngineOptions { n_slots: Some(256), ..options() });
    assert_eq!(slots, "--slots must be between 1 and 128, not 256");
}
