//! The frames of a stream of drafts: a sequence's tokens in one direction, candidates in the other.

use bytes::{BufMut, BytesMut};

use super::error::StreamFrameError;
use super::frame::{FrameKind, put_head};
use crate::draft::{DraftedTokens, MAX_AHEAD, MAX_TOLD};
use crate::token::Token;

/// Tokens that a sequence has got. Payload: `u32` position of the first, then 1 to [`MAX_TOLD`] tokens as `u32`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToldTokens {
    /// The position of the first one: the number of tokens that were told before.
    pub at: u32,
    /// The tokens.
    pub tokens: Vec<Token>,
}

impl ToldTokens {
    pub(super) fn parse(payload: &[u8]) -> Result<ToldTokens, StreamFrameError> {
        let malformed = |problem| FrameKind::Told.malformed(problem);
        let (at, tokens) = payload.split_first_chunk::<4>().ok_or_else(|| malformed("it is too short"))?;
        let tokens = numbers(tokens, MAX_TOLD).ok_or_else(|| malformed("it has not 1 to 64 whole tokens"))?;
        Ok(ToldTokens { at: u32::from_le_bytes(*at), tokens })
    }
}

/// Appends the first tokens, at most as many as a frame has. Returns the others. `tokens` is not empty.
pub fn put_told<'t>(out: &mut BytesMut, stream: u32, at: u32, tokens: &'t [Token]) -> &'t [Token] {
    let (told, rest) = tokens.split_at(tokens.len().min(MAX_TOLD));
    put_head(out, FrameKind::Told, stream, 4 + 4 * told.len());
    out.put_u32_le(at);
    told.iter().for_each(|token| out.put_u32_le(*token));
    rest
}

/// Reads candidates. Payload: `u32` from, `u32` at, then 1 to [`MAX_AHEAD`] tokens as `u32`.
pub(super) fn parse_drafted(payload: &[u8]) -> Result<DraftedTokens, StreamFrameError> {
    let malformed = |problem| FrameKind::Drafted.malformed(problem);
    let (from, rest) = payload.split_first_chunk::<4>().ok_or_else(|| malformed("it is too short"))?;
    let (at, tokens) = rest.split_first_chunk::<4>().ok_or_else(|| malformed("it is too short"))?;
    let tokens = numbers(tokens, MAX_AHEAD).ok_or_else(|| malformed("it has not 1 to 32 whole tokens"))?;
    Ok(DraftedTokens { from: u32::from_le_bytes(*from), at: u32::from_le_bytes(*at), tokens })
}

/// Appends candidates, which are not more than a frame has.
pub(super) fn put_drafted(out: &mut BytesMut, stream: u32, drafted: &DraftedTokens) {
    put_head(out, FrameKind::Drafted, stream, 8 + 4 * drafted.tokens.len());
    out.put_u32_le(drafted.from);
    out.put_u32_le(drafted.at);
    drafted.tokens.iter().for_each(|token| out.put_u32_le(*token));
}

/// 1 to `most` numbers.
fn numbers(bytes: &[u8], most: usize) -> Option<Vec<u32>> {
    let (numbers, rest) = bytes.as_chunks::<4>();
    let fits = rest.is_empty() && (1..=most).contains(&numbers.len());
    fits.then(|| numbers.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
}
