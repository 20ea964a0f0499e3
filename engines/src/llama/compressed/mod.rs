//! Caches of compressed rows, in which every sequence has streams of its own (DeepSeek V4, `llama-kv-cache-dsv4.cpp`).
//!
//! Layers keep the rows of a window. Some also keep rows that each stand for several tokens: of 4 with an indexer's, or of 128.
//! What is not a whole row yet is in the states of the compressors. llama.cpp writes, after the header of every blob
//! ([`super::blob`]), little-endian:
//!
//! ```text
//! u32 magic "DSV4", u32 version (1), u32 mode: 0 everything, 1 what a sequence has beside finished rows
//! everything: the cells of all positions, a section of rows with no layers
//! the window: a section of rows, K alone
//! everything: the rows of 4 tokens, those of 128, and the indexer's of 4; each
//!   u32 version (2), u32 n_rows, u32 n_stream (1), u32 n_layers
//!   n_layers × { u32 layer, i32 ggml type, u64 n_values, u64 n_rows, u64 row bytes, rows from the first token on }
//! their compressors; each
//!   u32 version (1), u32 tokens of a row, u32 n_tokens that it holds, u32 n_values of one, u32 n_stream (1), u32 n_layers
//!   n_layers × { u32 layer, 2 × { i32 ggml type, u64 n_values, u64 n_tokens, u64 row bytes, K or its scores } }
//! ```
//!
//! A section of rows names all streams of the context, and cells in one of them. Where llama.cpp rotates quantized rows, it says
//! so of the window alone.
//!
//! llama.cpp copies and reads no part of such a sequence: it ends the process where it should copy a range, and reading empties
//! all rows first. But finished rows never change, so a range is cut out of everything, and chunks that arrive wait beside the
//! cache until their states come. Its own copies of whole sequences are made before the next batch and not at once: a checkpoint
//! that was set in between is lost, and what the source becomes in between is what is copied. So sequences are copied through
//! the host's memory.

pub mod form;
mod parse;
mod pieces;
pub mod transfer;
mod whole_blob;
mod write;

pub(super) use self::parse::is_compressed;
pub(super) use self::whole_blob::WholeBlob;

/// "DSV4".
const MAGIC: u32 = 0x3456_5344;
const VERSION: u32 = 1;
const EVERYTHING: u32 = 0;
const BESIDE: u32 = 1;
const CACHE_VERSION: u32 = 2;
const COMPRESSOR_VERSION: u32 = 1;

/// The rows of 4 tokens, those of 128, and the indexer's.
const N_COMPRESSORS: usize = 3;

/// The most streams: sequences of a context (llama.cpp's `LLAMA_MAX_SEQ`).
const MAX_STREAMS: u32 = 256;
