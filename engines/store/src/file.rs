//! A block as a file.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | `BATONKV1` |
//! | 8 | 4 | length of the sealed label, little-endian |
//! | 12 | | the label, in JSON, [sealed](super::seal) |
//! | | | the body, sealed under the scope's key and bound to everything before it |
//!
//! The body is the rows of every tensor in the order of [`Chunk::tensors`], then the states. Their lengths follow from the
//! label and the model's layout.

use baton_schemas::kv::{Chunk, KvLayout, LayerRows, SectionRows, Span, StatePart};
use baton_schemas::{CacheScope, Token};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::block::KvBlock;
use super::seal::{SEAL_BYTES, StoreKey, open, seal, to_seal};

const MAGIC: &[u8; 8] = b"BATONKV1";

/// The bytes before the label.
pub(crate) const HEAD_BYTES: usize = MAGIC.len() + 4;

/// The most bytes of a sealed label.
const MAX_LABEL_BYTES: usize = 1 << 20;

/// Whose KV a file holds, and of which tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BlockLabel {
    /// The model's weights, vocabulary and layout.
    #[serde(with = "hex")]
    pub(crate) model: [u8; 32],
    pub(crate) scope: CacheScope,
    /// The hash of the tokens before the block.
    #[serde(with = "hex")]
    pub(crate) before: [u8; 32],
    /// The block's first position.
    pub(crate) p0: u32,
    /// The block's tokens.
    pub(crate) tokens: Vec<Token>,
    /// The first position of each section's rows.
    pub(crate) starts: Vec<u32>,
    /// It has the states of its end.
    pub(crate) has_state: bool,
}

/// Why a file is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FileFault {
    #[error("it is no block of a KV store")]
    Foreign,
    #[error("it is cut short")]
    Torn,
    #[error(transparent)]
    Sealed(#[from] super::seal::Unsealed),
    #[error("its label is that of another block")]
    OtherBlock,
    #[error("its {found} bytes are not those of its label's rows")]
    Size { found: usize },
    #[error("{0}")]
    Read(String),
}

impl BlockLabel {
    /// The label of a block of the prompt `tokens`, which has everything up to the block's end.
    pub(crate) fn of(model: [u8; 32], scope: CacheScope, before: [u8; 32], tokens: &[Token], block: &KvBlock) -> Self {
        let Chunk { p0, p1, sections } = &block.chunk;
        BlockLabel {
            model,
            scope,
            before,
            p0: *p0,
            tokens: tokens[*p0 as usize..*p1 as usize].to_vec(),
            starts: sections.iter().map(|rows| rows.start).collect(),
            has_state: block.state.is_some(),
        }
    }

    /// The rows that the body has. `None`: such a block is not possible in `layout`.
    pub(crate) fn span(&self, layout: &KvLayout) -> Option<Span> {
        let p1 = self.p0.checked_add(u32::try_from(self.tokens.len()).ok()?)?;
        let windows = layout.sections.iter().map(|section| section.window);
        let fits = |(start, window): (&u32, Option<u32>)| {
            (self.p0..=p1).contains(start) && (window.is_some() || *start == self.p0)
        };
        let is_possible = p1 > self.p0
            && self.starts.len() == layout.sections.len()
            && (!self.has_state || !layout.states.is_empty())
            && self.starts.iter().zip(windows).all(fits);
        is_possible.then(|| Span { p0: self.p0, p1, starts: self.starts.clone() })
    }
}

/// The file of a block, which fits its label.
pub(crate) fn encode(key: &StoreKey, label: &BlockLabel, block: &KvBlock) -> Result<Vec<u8>, serde_json::Error> {
    let mut sealed_label = to_seal(0);
    serde_json::to_writer(&mut sealed_label, label)?;
    seal(&key.of_labels(), &mut sealed_label, MAGIC);
    let mut body = to_seal(block.n_bytes());
    block.chunk.tensors().for_each(|rows| body.extend_from_slice(rows));
    block.state.iter().flat_map(|state| &state.tensors).for_each(|values| body.extend_from_slice(values));
    seal(&key.of_scope(label.scope), &mut body, &sealed_label);
    let mut file = Vec::with_capacity(HEAD_BYTES + sealed_label.len() + body.len());
    file.extend_from_slice(MAGIC);
    file.extend((sealed_label.len() as u32).to_le_bytes());
    file.extend(sealed_label);
    file.extend(body);
    Ok(file)
}

/// The length of the sealed label, from a file's first bytes.
pub(crate) fn label_bytes(head: &[u8; HEAD_BYTES]) -> Result<usize, FileFault> {
    let [magic @ .., a, b, c, d] = head;
    let n_bytes = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
    if magic != MAGIC || !(SEAL_BYTES..=MAX_LABEL_BYTES).contains(&n_bytes) {
        return Err(FileFault::Foreign);
    }
    Ok(n_bytes)
}

/// Opens a sealed label.
pub(crate) fn label(key: &StoreKey, mut sealed: Vec<u8>) -> Result<BlockLabel, FileFault> {
    let json = open(&key.of_labels(), &mut sealed, MAGIC)?;
    serde_json::from_slice(json).map_err(|_| FileFault::Foreign)
}

/// The block of a whole file, whose label must be `expected`. The values are not copied.
pub(crate) fn decode(
    key: &StoreKey,
    layout: &KvLayout,
    expected: &BlockLabel,
    mut file: Vec<u8>,
) -> Result<KvBlock, FileFault> {
    let (head, rest) = file.split_first_chunk_mut::<HEAD_BYTES>().ok_or(FileFault::Torn)?;
    let n_label = label_bytes(head)?;
    let (sealed_label, body) = rest.split_at_mut_checked(n_label).ok_or(FileFault::Torn)?;
    if label(key, sealed_label.to_vec())? != *expected {
        return Err(FileFault::OtherBlock);
    }
    let n_body = open(&key.of_scope(expected.scope), body, sealed_label)?.len();
    let span = expected.span(layout).ok_or(FileFault::OtherBlock)?;
    let states = if expected.has_state { &layout.states[..] } else { &[] };
    let n_states: usize = states.iter().map(|state| state.values.bytes()).sum();
    if n_body as u64 != span.n_bytes(layout) + n_states as u64 {
        return Err(FileFault::Size { found: n_body });
    }
    // The content stands after its nonce, before its tag.
    let first = file.len() - n_body - SEAL_BYTES / 2;
    let mut values = Bytes::from(file).slice(first..first + n_body);
    let sections = layout.sections.iter().zip(&span.starts).map(|(section, &start)| {
        let n_rows = section.rows_of(start, span.p1).len();
        let layers = section.layers.iter().map(|layer| LayerRows {
            k: values.split_to(n_rows * layer.k.bytes()),
            v: values.split_to(layer.v.map_or(0, |v| n_rows * v.bytes())),
        });
        SectionRows { start, layers: layers.collect() }
    });
    let chunk = Chunk { p0: span.p0, p1: span.p1, sections: sections.collect() };
    let tensors: Vec<Bytes> = states.iter().map(|state| values.split_to(state.values.bytes())).collect();
    let state = expected.has_state.then_some(StatePart { position: span.p1, first: 0, tensors });
    Ok(KvBlock { chunk, state })
}
