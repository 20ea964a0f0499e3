//! A token in a step: `u32 stream, u32 token, u8 flags, 1 zero byte, u16 length, bytes`, then what became of guesses if a flag says
//! so: `u8 drafter, u8 verified, u8 accepted, u8 loss`, then the log-probabilities if a flag says so:
//! `f32 chosen, u16 count, 2 zero bytes`, `u32 rank` if another flag says so, and for each alternative
//! `u32 token, f32, u16 length, bytes`.

use bytes::{Buf, BufMut, BytesMut};

use super::error::{StreamFrameError, UnwritableFrame};
use super::frame::FrameKind;
use super::{MAX_ALTERNATIVES, MAX_TOKEN_BYTES, MAX_TOKEN_TEXT};
use crate::draft::{DraftCounts, DraftReport, DrafterKind, DrafterLoss};
use crate::sequence::{Alternative, GeneratedToken, Logprobs};

/// The token is a control token.
const SPECIAL: u8 = 1;

/// Log-probabilities follow the bytes.
const LOGPROBS: u8 = 2;

/// The log-probabilities have the token's rank.
const RANK: u8 = 4;

/// The fate of guesses follows the bytes.
const DRAFTS: u8 = 8;

/// The part of a token before its bytes.
const TOKEN_BYTES: usize = 12;

/// The part of the log-probabilities before the alternatives.
const LOGPROBS_BYTES: usize = 8;

const RANK_BYTES: usize = 4;

const DRAFTS_BYTES: usize = 4;

/// The part of an alternative before its bytes.
const ALTERNATIVE_BYTES: usize = 10;

/// The length of a token on the wire. Errors: it breaks a limit, or a value is not finite.
pub(super) fn length(token: &GeneratedToken) -> Result<usize, UnwritableFrame> {
    let text = |bytes: &[u8]| match bytes.len() {
        length if length > MAX_TOKEN_TEXT => Err(UnwritableFrame::TooLong { bytes: length }),
        length => Ok(length),
    };
    let mut sum = TOKEN_BYTES + text(&token.bytes)? + token.drafts.map_or(0, |_| DRAFTS_BYTES);
    if let Some(Logprobs { chosen, rank, top }) = &token.logprobs {
        if top.len() > MAX_ALTERNATIVES {
            return Err(UnwritableFrame::TooLong { bytes: top.len() * ALTERNATIVE_BYTES });
        }
        if !chosen.is_finite() || top.iter().any(|alternative| !alternative.logprob.is_finite()) {
            return Err(UnwritableFrame::NotFinite);
        }
        sum += LOGPROBS_BYTES + rank.map_or(0, |_| RANK_BYTES);
        for alternative in top {
            sum += ALTERNATIVE_BYTES + text(&alternative.bytes)?;
        }
    }
    if sum > MAX_TOKEN_BYTES { Err(UnwritableFrame::TooLong { bytes: sum }) } else { Ok(sum) }
}

/// Appends a token. The caller has checked its [`length`].
pub(super) fn put(out: &mut BytesMut, stream: u32, token: &GeneratedToken) {
    let special = if token.special { SPECIAL } else { 0 };
    let logprobs = if token.logprobs.is_some() { LOGPROBS } else { 0 };
    let mut head = [0; TOKEN_BYTES];
    head[..4].copy_from_slice(&stream.to_le_bytes());
    head[4..8].copy_from_slice(&token.id.to_le_bytes());
    let rank = if token.logprobs.as_ref().is_some_and(|logprobs| logprobs.rank.is_some()) { RANK } else { 0 };
    let drafts = if token.drafts.is_some() { DRAFTS } else { 0 };
    head[8] = special | logprobs | rank | drafts;
    head[10..].copy_from_slice(&(token.bytes.len() as u16).to_le_bytes());
    out.put_slice(&head);
    out.put_slice(&token.bytes);
    if let Some(DraftReport { verified, loss }) = token.drafts {
        let (drafter, DraftCounts { n, n_accepted }) =
            verified.map_or((0, DraftCounts::default()), |(d, n)| (d as u8, n));
        let byte = |n: u32| u8::try_from(n).unwrap_or(u8::MAX);
        out.put_slice(&[drafter, byte(n), byte(n_accepted), loss.map_or(0, |loss| loss as u8)]);
    }
    if let Some(Logprobs { chosen, rank, top }) = &token.logprobs {
        out.put_f32_le(*chosen);
        out.put_u16_le(top.len() as u16);
        out.put_u16_le(0);
        if let Some(rank) = rank {
            out.put_u32_le(*rank);
        }
        for Alternative { id, bytes, logprob } in top {
            out.put_u32_le(*id);
            out.put_f32_le(*logprob);
            out.put_u16_le(bytes.len() as u16);
            out.put_slice(bytes);
        }
    }
}

/// The next token of a step and its stream.
pub(super) fn take(payload: &mut &[u8]) -> Result<(u32, GeneratedToken), StreamFrameError> {
    let n_before = payload.len();
    let (mut head, rest) = payload.split_at_checked(TOKEN_BYTES).ok_or_else(cut)?;
    *payload = rest;
    let stream = head.get_u32_le();
    let id = head.get_u32_le();
    let flags = head.get_u8();
    let has_rank = flags & RANK != 0;
    if flags & !(SPECIAL | LOGPROBS | RANK | DRAFTS) != 0 || (has_rank && flags & LOGPROBS == 0) || head.get_u8() != 0 {
        return Err(StreamFrameError::Reserved);
    }
    let bytes = text(payload, head.get_u16_le())?;
    let drafts = if flags & DRAFTS != 0 { Some(drafts(payload)?) } else { None };
    let logprobs = if flags & LOGPROBS != 0 { Some(logprobs(payload, has_rank)?) } else { None };
    if n_before - payload.len() > MAX_TOKEN_BYTES {
        return Err(FrameKind::Step.malformed("a token and its alternatives are too long"));
    }
    Ok((stream, GeneratedToken { id, bytes, special: flags & SPECIAL != 0, logprobs, drafts }))
}

fn drafts(payload: &mut &[u8]) -> Result<DraftReport, StreamFrameError> {
    let (&[drafter, n, n_accepted, loss], rest) = payload.split_first_chunk::<DRAFTS_BYTES>().ok_or_else(cut)?;
    *payload = rest;
    let verified =
        DrafterKind::from_repr(drafter).map(|of| (of, DraftCounts { n: n.into(), n_accepted: n_accepted.into() }));
    let loss_of = DrafterLoss::from_repr(loss);
    // Unknown numbers, none of both, and more right tokens than there were.
    let is_known = (verified.is_some() || (drafter, n) == (0, 0)) && (loss_of.is_some() || loss == 0);
    if !is_known || n_accepted > n || (verified.is_none() && loss_of.is_none()) {
        return Err(FrameKind::Step.malformed("what became of a token's guesses is invalid"));
    }
    Ok(DraftReport { verified, loss: loss_of })
}

fn logprobs(payload: &mut &[u8], has_rank: bool) -> Result<Logprobs, StreamFrameError> {
    let (mut head, rest) = payload.split_at_checked(LOGPROBS_BYTES).ok_or_else(cut)?;
    *payload = rest;
    let chosen = finite(head.get_f32_le())?;
    let count = usize::from(head.get_u16_le());
    if head.get_u16_le() != 0 {
        return Err(StreamFrameError::Reserved);
    }
    let rank = if has_rank {
        let (mut rank, rest) = payload.split_at_checked(RANK_BYTES).ok_or_else(cut)?;
        *payload = rest;
        Some(rank.get_u32_le())
    } else {
        None
    };
    if count > MAX_ALTERNATIVES {
        return Err(FrameKind::Step.malformed("a token has too many alternatives"));
    }
    let mut top = Vec::with_capacity(count);
    for _ in 0..count {
        let (mut head, rest) = payload.split_at_checked(ALTERNATIVE_BYTES).ok_or_else(cut)?;
        *payload = rest;
        let id = head.get_u32_le();
        let logprob = finite(head.get_f32_le())?;
        top.push(Alternative { id, logprob, bytes: text(payload, head.get_u16_le())? });
    }
    Ok(Logprobs { chosen, rank, top })
}

fn text(payload: &mut &[u8], length: u16) -> Result<Vec<u8>, StreamFrameError> {
    if usize::from(length) > MAX_TOKEN_TEXT {
        return Err(FrameKind::Step.malformed("a token is too long"));
    }
    let (text, rest) = payload.split_at_checked(usize::from(length)).ok_or_else(cut)?;
    *payload = rest;
    Ok(text.to_vec())
}

fn finite(value: f32) -> Result<f32, StreamFrameError> {
    if value.is_finite() { Ok(value) } else { Err(FrameKind::Step.malformed("a value is NaN or infinite")) }
}

fn cut() -> StreamFrameError {
    FrameKind::Step.malformed("it is cut off")
}
