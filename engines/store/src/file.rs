//! A block as a file.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | `BATONKV1` |
//! | 8 | 4 | length of the sealed label, little-endian |
//! | 12 | 1 | the [`Codec`] of the rows |
//! | 13 | 3 | zero |
//! | 16 | | the label, in JSON, [sealed](super::seal) |
//! | | | the body, sealed under the scope's key and bound to everything before it |
//!
//! The body is the rows as [`encode_rows`] writes them, then the states. Their lengths follow from the label and the model's
//! layout.

use std::io::ErrorKind;

use baton_schemas::kv::{
    Chunk, Codec, KvLayout, LayerRows, SectionRows, Span, StatePart, WriteError, decode_rows, encode_rows,
};
use baton_schemas::{CacheScope, Token};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::block::KvBlock;
use super::seal::{SEAL_BYTES, StoreKey, open, seal, to_seal};

const MAGIC: &[u8; 8] = b"BATONKV1";

/// The bytes before the label.
pub(crate) const HEAD_BYTES: usize = MAGIC.len() + 8;

/// The most bytes of a sealed label.
const MAX_LABEL_BYTES: usize = 1 << 20;

/// Why a block has no file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EncodeFault {
    #[error(transparent)]
    Label(#[from] serde_json::Error),
    #[error(transparent)]
    Rows(#[from] WriteError),
}

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
    #[error("its rows cannot be decoded: {0}")]
    Rows(String),
    /// Another process has removed it, to make room.
    #[error("it was removed")]
    Gone,
    /// Nothing is known of the file: the disk, or this process, may be at fault. It is never removed for that.
    #[error("{0}")]
    Read(String),
}

impl FileFault {
    pub(crate) fn of(error: std::io::Error) -> FileFault {
        match error.kind() {
            ErrorKind::UnexpectedEof => FileFault::Torn,
            ErrorKind::NotFound => FileFault::Gone,
            _ => FileFault::Read(error.to_string()),
        }
    }
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

/// The file of a block, which fits its label. Errors: the codec cannot encode the rows.
pub(crate) fn encode(
    key: &StoreKey,
    layout: &KvLayout,
    codec: Codec,
    label: &BlockLabel,
    block: &KvBlock,
) -> Result<Vec<u8>, EncodeFault> {
    let mut sealed_label = to_seal(0);
    serde_json::to_writer(&mut sealed_label, label)?;
    seal(&key.of_labels(), &mut sealed_label, MAGIC);
    let rows = encode_rows(codec, layout, &block.chunk)?;
    let states = block.state.iter().flat_map(|state| &state.tensors);
    let mut body = to_seal(block.n_bytes());
    rows.iter().chain(states).for_each(|bytes| body.extend_from_slice(bytes));
    let mut file = Vec::with_capacity(HEAD_BYTES + sealed_label.len() + body.len() + SEAL_BYTES);
    file.extend_from_slice(MAGIC);
    file.extend((sealed_label.len() as u32).to_le_bytes());
    file.extend([codec as u8, 0, 0, 0]);
    file.extend(sealed_label);
    seal(&key.of_scope(label.scope), &mut body, &file);
    file.extend(body);
    Ok(file)
}

/// The length of the sealed label and the codec, from a file's first bytes.
pub(crate) fn head(head: &[u8; HEAD_BYTES]) -> Result<(usize, Codec), FileFault> {
    let [magic @ .., a, b, c, d, codec, 0, 0, 0] = head else { return Err(FileFault::Foreign) };
    let n_bytes = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
    if magic != MAGIC || !(SEAL_BYTES..=MAX_LABEL_BYTES).contains(&n_bytes) {
        return Err(FileFault::Foreign);
    }
    Ok((n_bytes, Codec::from_number(*codec).ok_or(FileFault::Foreign)?))
}

/// Opens a sealed label.
pub(crate) fn label(key: &StoreKey, mut sealed: Vec<u8>) -> Result<BlockLabel, FileFault> {
    let json = open(&key.of_labels(), &mut sealed, MAGIC)?;
    serde_json::from_slice(json).map_err(|_| FileFault::Foreign)
}

/// A file whose body is open, where it stood.
pub(crate) struct OpenFile {
    label: BlockLabel,
    codec: Codec,
    /// The bytes of the body, which stand at the file's end before the tag.
    n_body: usize,
}

/// Opens a whole file in place.
pub(crate) fn open_file(key: &StoreKey, file: &mut [u8]) -> Result<OpenFile, FileFault> {
    let (n_label, codec) = head(file.first_chunk().ok_or(FileFault::Torn)?)?;
    let (before, body) = file.split_at_mut_checked(HEAD_BYTES + n_label).ok_or(FileFault::Torn)?;
    let label = label(key, before[HEAD_BYTES..].to_vec())?;
    let n_body = open(&key.of_scope(label.scope), body, before)?.len();
    Ok(OpenFile { label, codec, n_body })
}

/// The block of a whole file, whose label must be `expected`. The values are not copied.
pub(crate) fn decode(
    key: &StoreKey,
    layout: &KvLayout,
    expected: &BlockLabel,
    mut file: Vec<u8>,
) -> Result<KvBlock, FileFault> {
    let OpenFile { label, codec, n_body } = open_file(key, &mut file)?;
    if label != *expected {
        return Err(FileFault::OtherBlock);
    }
    let span = expected.span(layout).ok_or(FileFault::OtherBlock)?;
    let states = if expected.has_state { &layout.states[..] } else { &[] };
    let n_states: usize = states.iter().map(|state| state.values.bytes()).sum();
    let n_rows = n_body.checked_sub(n_states).ok_or(FileFault::Size { found: n_body })?;
    // The content stands after its nonce, before its tag.
    let first = file.len() - n_body - SEAL_BYTES / 2;
    let mut state_values = Bytes::from(file).slice(first..first + n_body);
    let rows = state_values.split_to(n_rows);
    let mut values = decode_rows(codec, layout, &span, rows).map_err(|error| FileFault::Rows(error.to_string()))?;
    if values.len() as u64 != span.n_bytes(layout) {
        return Err(FileFault::Size { found: n_body });
    }
    let sections = layout.sections.iter().zip(&span.starts).map(|(section, &start)| {
        let n_rows = section.rows_of(start, span.p1).len();
        let layers = section.layers.iter().map(|layer| LayerRows {
            k: values.split_to(n_rows * layer.k.bytes()),
            v: values.split_to(layer.v.map_or(0, |v| n_rows * v.bytes())),
        });
        SectionRows { start, layers: layers.collect() }
    });
    let chunk = Chunk { p0: span.p0, p1: span.p1, sections: sections.collect() };
    let tensors: Vec<Bytes> = states.iter().map(|state| state_values.split_to(state.values.bytes())).collect();
    let state = expected.has_state.then_some(StatePart { position: span.p1, first: 0, tensors });
    Ok(KvBlock { chunk, state, is_lossy: codec.is_lossy() })
}
