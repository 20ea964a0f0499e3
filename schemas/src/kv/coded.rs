//! Rows in a codec outside of a stream, for a store. Encoded rows have the form of a [frame](super::frame)'s body.

use bytes::Bytes;

use super::chunk::Chunk;
use super::codec::{Codec, Coders, Decoder, Encoder, ModelKnowledge, TensorRows};
use super::error::{FrameError, WriteError};
use super::frame::Span;
use super::layout::KvLayout;
use super::reader::split_body;
use super::writer::encode;

/// Encodes a chunk, whose rows are those of `layout`. Errors: the codec cannot encode them.
pub fn encode_rows(codec: Codec, layout: &KvLayout, chunk: &Chunk) -> Result<Vec<Bytes>, WriteError> {
    let known = ModelKnowledge::default();
    match Coders::new(layout.n_tensors(), || Encoder::new(codec, layout, known))? {
        None => Ok(chunk.tensors().cloned().collect()),
        Some(mut encoders) => encode(&mut encoders, chunk, layout),
    }
}

/// Decodes the rows of `span`, in the order of [`Chunk::tensors`]. Without a codec they are returned as they are, whatever
/// their length. Errors: they are not of this codec and span.
pub fn decode_rows(codec: Codec, layout: &KvLayout, span: &Span, encoded: Bytes) -> Result<Bytes, FrameError> {
    let Span { p0, p1, .. } = *span;
    let decoders = Coders::new(layout.n_tensors(), || Decoder::new(codec, layout, None));
    let decoders = decoders.map_err(|reason| FrameError::Codec { codec, reason })?;
    let Some(mut decoders) = decoders else { return Ok(encoded) };
    let tensors = split_body(&encoded, span, layout.n_tensors())?;
    let mut plain = vec![0; span.n_bytes(layout) as usize];
    let n_bytes = plain.len();
    let mut rest = &mut plain[..];
    let shapes = span.tensors(layout).zip(span.tensor_starts(layout)).enumerate();
    let rows = shapes.map(|(index, ((rows, n_bytes), start))| {
        let (decoded, later) = std::mem::take(&mut rest).split_at_mut(n_bytes);
        rest = later;
        (TensorRows { index, start, rows }, decoded)
    });
    decoders.for_all(rows.zip(tensors), n_bytes, |decoder, ((tensor, decoded), encoded)| {
        let wrong = |reason| FrameError::Decode { p0, p1, tensor: tensor.index, reason };
        decoder.decode(tensor, encoded, decoded).map_err(wrong)
    })?;
    Ok(plain.into())
}
