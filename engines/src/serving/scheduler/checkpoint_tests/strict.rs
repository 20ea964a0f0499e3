//! A context of a model with one attention layer and one recurrent layer, which panics where llama.cpp would compute on with
//! wrong numbers.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use baton_schemas::Token;
use baton_schemas::kv::{
    Chunk, Dtype, KvLayout, LayerRows, LayerShape, RopePairing, Rows, Section, SectionRows, StateKind, StatePart,
    StateShape, VerifiedKv, VerifiedState,
};
use bytes::Bytes;

use super::super::super::context::{BatchToken, CannotCut, ComputeError, ExportTo, ModelContext, NoHead};
use super::super::super::images::NoImages;

pub(super) const N_VOCAB: Token = 200;

/// From here on, tokens are control tokens.
pub(super) const CONTROL: Token = 190;

/// A state that has seen some tokens: 48 bits, in pieces that an f32 holds exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SeenState(u64);

const N_VALUES: u32 = 3;

impl SeenState {
    fn of(tokens: &[Token]) -> SeenState {
        tokens.iter().fold(SeenState(1), |state, token| state.after(*token))
    }

    fn after(self, token: Token) -> SeenState {
        let mixed = (self.0 ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        SeenState(mixed & 0xFFFF_FFFF_FFFF)
    }

    fn to_bytes(self) -> Vec<u8> {
        (0..N_VALUES).flat_map(|i| (((self.0 >> (16 * i)) & 0xFFFF) as f32).to_le_bytes()).collect()
    }

    fn from_bytes(bytes: &[u8]) -> SeenState {
        let values = bytes.chunks_exact(4).take(N_VALUES as usize).map(|v| f32::from_le_bytes(v.try_into().unwrap()));
        SeenState(values.enumerate().map(|(i, value)| (value as u64) << (16 * i)).sum())
    }

    fn logit(self, token: Token) -> f32 {
        (self.after(token).0 % 4_093) as f32
    }

    /// The token that greedy sampling draws.
    fn likeliest(self) -> Token {
        let better = |a: Token, b: Token| if self.logit(b) > self.logit(a) { b } else { a };
        (1..N_VOCAB).fold(0, better)
    }
}

/// The reply of `n` tokens to a prompt that one engine computes alone.
pub(super) fn reply(prompt: &[Token], n: usize) -> Vec<Token> {
    let mut state = SeenState::of(prompt);
    (0..n)
        .map(|_| {
            let token = state.likeliest();
            state = state.after(token);
            token
        })
        .collect()
}

pub(super) fn layout() -> KvLayout {
    let rows = |n_values| Rows { dtype: Dtype::F32, n_values };
    KvLayout {
        rope: RopePairing::None,
        sections: vec![Section {
            window: None,
            n_rot: [0; 2],
            tokens_per_row: 1,
            layers: vec![LayerShape { k: rows(1), v: None }],
        }],
        states: vec![StateShape { kind: StateKind::Recurrence, values: rows(N_VALUES) }],
    }
}

/// The rows of some tokens.
pub(super) fn chunk(tokens: &[Token], positions: Range<u32>) -> Chunk {
    let rows = &tokens[positions.start as usize..positions.end as usize];
    let k = rows.iter().flat_map(|token| (*token as f32).to_le_bytes()).collect::<Vec<u8>>().into();
    let layers = vec![LayerRows { k, v: Bytes::new() }];
    Chunk { p0: positions.start, p1: positions.end, sections: vec![SectionRows { start: positions.start, layers }] }
}

/// The state after some tokens.
pub(super) fn part(tokens: &[Token]) -> StatePart {
    StatePart { position: tokens.len() as u32, first: 0, tensors: vec![SeenState::of(tokens).to_bytes().into()] }
}

fn tokens_of(chunk: &Chunk) -> Vec<Token> {
    let rows = chunk.sections[0].layers[0].k.chunks_exact(4);
    rows.map(|row| f32::from_le_bytes(row.try_into().unwrap()) as Token).collect()
}

#[derive(Clone, Default)]
struct StrictSlot {
    rows: Vec<Token>,
    /// The state that each row's prefix has.
    truth: Vec<SeenState>,
    state: Option<SeenState>,
    /// Tokens of the last batch.
    n_newest: usize,
}

impl StrictSlot {
    fn push(&mut self, token: Token) {
        self.truth.push(self.truth.last().copied().unwrap_or(SeenState::of(&[])).after(token));
        self.rows.push(token);
    }

    fn truncate(&mut self, n: usize) {
        self.rows.truncate(n);
        self.truth.truncate(n);
    }

    /// The state is that of the last row.
    fn is_whole(&self) -> bool {
        self.rows.is_empty() || self.state.as_ref() == self.truth.last()
    }
}

pub(super) struct StrictSlots {
    slots: Vec<StrictSlot>,
    logits: BTreeMap<usize, Vec<f32>>,
    checkpoint_bytes: usize,
    /// Tokens that can be taken back.
    pub(super) n_rollback: usize,
    /// All slots had as many tokens in the last batch.
    is_even: bool,
    /// Tokens that were taken back.
    pub(super) n_taken_back: usize,
    /// Nothing can be copied in, out or back, as without memory.
    pub(super) refuses_copies: bool,
    /// The time that a chunk takes to come back.
    pub(super) restore_takes: Duration,
    /// Rows that came back.
    pub(super) n_restored: usize,
    /// Tokens that were computed.
    pub(super) n_computed: usize,
    /// Checkpoints that were taken, and returned to.
    pub(super) n_taken: usize,
    pub(super) n_returned: usize,
}

impl StrictSlots {
    pub(super) fn new(n_slots: usize, checkpoint_bytes: usize) -> Self {
        let slots = vec![StrictSlot::default(); n_slots];
        StrictSlots {
            slots,
            logits: BTreeMap::new(),
            checkpoint_bytes,
            n_rollback: 0,
            is_even: false,
            n_taken_back: 0,
            refuses_copies: false,
            restore_takes: Duration::ZERO,
            n_restored: 0,
            n_computed: 0,
            n_taken: 0,
            n_returned: 0,
        }
    }

    fn can_copy(&self) -> Result<(), String> {
        if self.refuses_copies { Err("no memory for a copy".into()) } else { Ok(()) }
    }

    pub(super) fn rows(&self, slot: usize) -> &[Token] {
        &self.slots[slot].rows
    }
}

impl ModelContext for StrictSlots {
    type Preparation = NoImages;
    type Head = NoHead;

    fn compute(&mut self, batch: &[BatchToken]) -> Result<(), ComputeError> {
        self.logits.clear();
        self.slots.iter_mut().for_each(|slot| slot.n_newest = 0);
        let mut parts = batch.chunk_by(|a, b| a.slot == b.slot).map(<[BatchToken]>::len);
        let n_first = parts.next();
        self.is_even = parts.all(|n| Some(n) == n_first);
        for (idx, token) in batch.iter().enumerate() {
            let slot = &mut self.slots[token.slot as usize];
            assert_eq!(slot.rows.len(), token.position as usize, "the next position");
            assert!(slot.is_whole(), "slot {} is continued at {} without its state", token.slot, token.position);
            slot.push(token.token);
            slot.state = slot.truth.last().copied();
            slot.n_newest += 1;
            self.n_computed += 1;
            if let Some(state) = slot.state.filter(|_| token.wants_logits) {
                self.logits.insert(idx, (0..N_VOCAB).map(|token| state.logit(token)).collect());
            }
        }
        Ok(())
    }

    fn logits(&mut self, index: usize) -> &[f32] {
        &self.logits[&index]
    }

    fn synchronize(&mut self) {}

    fn cut(&mut self, slot: usize, n_keep: usize) -> Result<(), CannotCut> {
        assert_eq!(n_keep, 0, "states cannot be cut");
        self.slots[slot] = StrictSlot::default();
        Ok(())
    }

    fn max_rollback(&self) -> usize {
        self.n_rollback
    }

    fn take_back(&mut self, slot: usize, n_keep: usize) -> Result<(), CannotCut> {
        if n_keep == 0 {
            return self.cut(slot, 0);
        }
        assert!(self.is_even, "states of sequences with different numbers of rows");
        let slot = &mut self.slots[slot];
        let n_back = slot.rows.len() - n_keep;
        assert!((1..slot.n_newest).contains(&n_back) && n_back <= self.n_rollback, "{n_back} of {}", slot.n_newest);
        slot.truncate(n_keep);
        slot.state = slot.truth.last().copied();
        slot.n_newest = 0;
        self.n_taken_back += n_back;
        Ok(())
    }

    fn fork(&mut self, source: usize, slot: usize, n: usize) -> bool {
        assert!(self.slots[slot].rows.is_empty(), "a fork goes into an empty slot");
        if self.refuses_copies {
            return false;
        }
        // The newest state comes along, whatever the range.
        self.slots[slot] = self.slots[source].clone();
        self.slots[slot].truncate(n);
        true
    }

    fn forks_share_cells(&self) -> bool {
        true
    }

    fn oldest(&self, slot: usize) -> usize {
        self.slots[slot].rows.len().saturating_sub(1)
    }

    fn overwrite(&mut self) {
        self.slots.iter_mut().for_each(|slot| *slot = StrictSlot::default());
    }

    fn export(&mut self, slot: usize, positions: Range<u32>, end: u32, _: ExportTo) -> Result<Chunk, String> {
        assert!(positions.end <= end && positions.end as usize <= self.slots[slot].rows.len());
        self.can_copy()?;
        Ok(chunk(&self.slots[slot].rows, positions))
    }

    fn import(&mut self, slot: usize, n_present: u32, kv: VerifiedKv) -> Result<Vec<u8>, String> {
        let chunk = kv.into_chunk();
        assert_eq!((n_present as usize, n_present), (self.slots[slot].rows.len(), chunk.p0));
        self.restore(slot, &chunk)?;
        Ok(Vec::new())
    }

    fn restore(&mut self, slot: usize, chunk: &Chunk) -> Result<(), String> {
        self.can_copy()?;
        std::thread::sleep(self.restore_takes);
        self.n_restored += chunk.n_positions() as usize;
        let slot = &mut self.slots[slot];
        assert_eq!(slot.rows.len(), chunk.p0 as usize, "a chunk continues its slot");
        tokens_of(chunk).into_iter().for_each(|token| slot.push(token));
        slot.state = None;
        Ok(())
    }

    fn can_continue(&self, slot: usize, n_present: usize) -> bool {
        self.slots[slot].rows.len() == n_present && self.slots[slot].is_whole()
    }

    fn export_state(&mut self, slot: usize, position: u32) -> Result<StatePart, String> {
        assert!(self.can_continue(slot, position as usize), "the state of the end is exported");
        self.can_copy()?;
        Ok(part(&self.slots[slot].rows))
    }

    fn import_state(&mut self, slot: usize, state: VerifiedState) -> Result<(), String> {
        assert_eq!(self.slots[slot].rows.len(), state.position() as usize, "states come after their rows");
        self.can_copy()?;
        self.slots[slot].state = Some(SeenState::from_bytes(&state.tensors()[0]));
        assert!(self.slots[slot].is_whole(), "a state belongs to the slot's rows");
        Ok(())
    }

    fn restore_state(&mut self, slot: usize, state: &StatePart) -> Result<(), String> {
        assert_eq!(self.slots[slot].rows.len(), state.position as usize, "states come after their rows");
        self.can_copy()?;
        self.slots[slot].state = Some(SeenState::from_bytes(&state.tensors[0]));
        assert!(self.slots[slot].is_whole(), "a state belongs to the slot's rows");
        Ok(())
    }

    fn checkpoint(&mut self, slot: usize) -> Result<Bytes, String> {
        self.can_copy()?;
        let StrictSlot { rows, state, .. } = &self.slots[slot];
        assert!(!rows.is_empty() && self.slots[slot].is_whole(), "a checkpoint is that of the slot's end");
        self.n_taken += 1;
        let mut bytes = [state.unwrap().to_bytes(), (rows.len() as u32).to_le_bytes().to_vec()].concat();
        bytes.resize(self.checkpoint_bytes, 0);
        Ok(bytes.into())
    }

    fn states_of(&self, _: u32, checkpoint: &Bytes) -> Result<StatePart, String> {
        let (state, rest) = checkpoint.split_at(4 * N_VALUES as usize);
        let position = u32::from_le_bytes(*rest.first_chunk().unwrap());
        Ok(StatePart { position, first: 0, tensors: vec![checkpoint.slice(..state.len())] })
    }

    fn return_to(&mut self, slot: usize, n_keep: usize, checkpoint: &Bytes) -> Result<(), CannotCut> {
        let refuses = self.refuses_copies;
        let slot = &mut self.slots[slot];
        if refuses {
            *slot = StrictSlot::default();
            return Err(CannotCut);
        }
        assert!(slot.rows.len() >= n_keep, "a checkpoint brings no rows");
        slot.truncate(n_keep);
        slot.state = Some(SeenState::from_bytes(checkpoint));
        assert!(slot.is_whole(), "a checkpoint belongs to the slot's rows");
        self.n_returned += 1;
        Ok(())
    }
}
