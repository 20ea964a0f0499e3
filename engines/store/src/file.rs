//! A block as a file.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | `BATONKV2` |
//! | 8 | 4 | length of the sealed label, little-endian |
//! | 12 | 1 | the [`Codec`] of the rows |
//! | 13 | 3 | zero |
//! | 16 | 8 | length of the sealed rows, little-endian |
//! | 24 | | the label, in JSON, [sealed](super::seal) |
//! | | | the rows, as [`encode_rows`] writes them, sealed under the scope's key and bound to everything before them |
//! | | | the states, if the label says that there are any, sealed under the same key and bound to everything before the rows, and to the word `states` |
//!
//! The lengths of tensors follow from the label and the model's layout. Where more of a prompt follows, its states are not needed, and
//! the file is read up to them: a conversation of many turns has some at the end of each.

use std::io::ErrorKind;
use std::ops::Range;

use baton_schemas::kv::{
    Chunk, Codec, KvLayout, LayerRows, SectionRows, Span, StatePart, WriteError, decode_rows, encode_rows,
};
use baton_schemas::{CacheScope, Token};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::block::KvBlock;
use super::seal::{NONCE_BYTES, SEAL_BYTES, StoreKey, TAG_BYTES, open, seal, to_seal};

const MAGIC: &[u8; 8] = b"BATONKV2";

/// The bytes before the label.
pub(crate) const HEAD_BYTES: usize = MAGIC.len() + 16;

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
    let encoded = encode_rows(codec, layout, &block.chunk)?;
    let mut rows = to_seal(encoded.iter().map(Bytes::len).sum());
    encoded.iter().for_each(|bytes| rows.extend_from_slice(bytes));
    let n_states = block.state.as_ref().map_or(0, |state| state.n_bytes() + SEAL_BYTES);
    let n_file = HEAD_BYTES + sealed_label.len() + rows.len() + SEAL_BYTES + n_states;
    let mut file = Vec::with_capacity(n_file);
    file.extend_from_slice(MAGIC);
    file.extend((sealed_label.len() as u32).to_le_bytes());
    file.extend([codec as u8, 0, 0, 0]);
    // They have their nonce already; the tag follows.
    file.extend(((rows.len() + TAG_BYTES) as u64).to_le_bytes());
    file.extend(sealed_label);
    let (scope_key, n_before) = (key.of_scope(label.scope), file.len());
    seal(&scope_key, &mut rows, &file);
    file.extend(rows);
    if let Some(state) = &block.state {
        let mut states = to_seal(state.n_bytes());
        state.tensors.iter().for_each(|bytes| states.extend_from_slice(bytes));
        seal(&scope_key, &mut states, &with_states(&file[..n_before]));
        file.extend(states);
    }
    Ok(file)
}

/// The bytes that states are bound to: rows in their place do not open.
fn with_states(before: &[u8]) -> Vec<u8> {
    [before, b"states"].concat()
}

/// A file's first bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileHead {
    /// Bytes of the sealed label.
    pub(crate) n_label: usize,
    pub(crate) codec: Codec,
    /// Bytes of the sealed rows, as the file says: nothing vouches for them before the rows are open.
    n_rows: u64,
}

impl FileHead {
    /// The offset at which the rows end.
    pub(crate) fn end_of_rows(&self) -> u64 {
        ((HEAD_BYTES + self.n_label) as u64).saturating_add(self.n_rows)
    }
}

/// Reads a file's first bytes.
pub(crate) fn head(head: &[u8; HEAD_BYTES]) -> Result<FileHead, FileFault> {
    let (first, n_rows) = head.split_last_chunk::<8>().ok_or(FileFault::Foreign)?;
    let [magic @ .., a, b, c, d, codec, 0, 0, 0] = first else { return Err(FileFault::Foreign) };
    let n_label = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
    if magic != MAGIC || !(SEAL_BYTES..=MAX_LABEL_BYTES).contains(&n_label) {
        return Err(FileFault::Foreign);
    }
    let codec = Codec::from_number(*codec).ok_or(FileFault::Foreign)?;
    Ok(FileHead { n_label, codec, n_rows: u64::from_le_bytes(*n_rows) })
}

/// Opens a sealed label.
pub(crate) fn label(key: &StoreKey, mut sealed: Vec<u8>) -> Result<BlockLabel, FileFault> {
    let json = open(&key.of_labels(), &mut sealed, MAGIC)?;
    serde_json::from_slice(json).map_err(|_| FileFault::Foreign)
}

/// A file, or the part of it, that was decrypted in place.
pub(crate) struct OpenFile {
    label: BlockLabel,
    codec: Codec,
    rows: Range<usize>,
    /// `None`: the label says that there are none, or they are not in this part.
    states: Option<Range<usize>>,
}

/// How much of a file is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FilePart {
    /// The block without its states.
    Rows,
    All,
}

/// Opens that part of a file in place.
pub(crate) fn open_file(key: &StoreKey, file: &mut [u8], part: FilePart) -> Result<OpenFile, FileFault> {
    let FileHead { n_label, codec, n_rows } = head(file.first_chunk().ok_or(FileFault::Torn)?)?;
    let (before, body) = file.split_at_mut_checked(HEAD_BYTES + n_label).ok_or(FileFault::Torn)?;
    let label = label(key, before[HEAD_BYTES..].to_vec())?;
    let n_rows = usize::try_from(n_rows).map_err(|_| FileFault::Torn)?;
    let (rows, states) = body.split_at_mut_checked(n_rows).ok_or(FileFault::Torn)?;
    let scope_key = key.of_scope(label.scope);
    let at = |first: usize, content: &[u8]| first + NONCE_BYTES..first + NONCE_BYTES + content.len();
    let first = before.len();
    let rows = at(first, open(&scope_key, rows, before)?);
    let states = match (label.has_state && part == FilePart::All, states.is_empty()) {
        (true, _) => Some(at(first + n_rows, open(&scope_key, states, &with_states(before))?)),
        (false, true) => None,
        (false, false) => return Err(FileFault::Size { found: states.len() }),
    };
    Ok(OpenFile { label, codec, rows, states })
}

/// The block of a file, whose label must be `expected`; `file` is that part of it. The values are not copied.
pub(crate) fn decode(
    key: &StoreKey,
    layout: &KvLayout,
    expected: &BlockLabel,
    (mut file, part): (Vec<u8>, FilePart),
) -> Result<KvBlock, FileFault> {
    let OpenFile { label, codec, rows, states } = open_file(key, &mut file, part)?;
    if label != *expected {
        return Err(FileFault::OtherBlock);
    }
    let span = expected.span(layout).ok_or(FileFault::OtherBlock)?;
    let n_found = rows.len();
    let file = Bytes::from(file);
    let mut values =
        decode_rows(codec, layout, &span, file.slice(rows)).map_err(|error| FileFault::Rows(error.to_string()))?;
    if values.len() as u64 != span.n_bytes(layout) {
        return Err(FileFault::Size { found: n_found });
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
    let state = match states.map(|range| file.slice(range)) {
        None => None,
        Some(values) if values.len() != layout.state_bytes() => {
            return Err(FileFault::Size { found: values.len() });
        }
        Some(mut values) => {
            let tensors = layout.states.iter().map(|state| values.split_to(state.values.bytes())).collect();
            Some(StatePart { position: span.p1, first: 0, tensors })
        }
    };
    Ok(KvBlock { chunk, state, is_lossy: codec.is_lossy() })
}
