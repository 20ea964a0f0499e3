//! The shapes of rows and states that llama.cpp wrote.

use baton_schemas::kv::{Dtype, LayerShape, Rows, Section};

use super::blob::BlobError;
use super::blob::parse::{ParsedRows, ParsedTensor};
use super::no_kv::NoHandoff;

/// The section of these rows.
pub(super) fn rows_form(parsed: ParsedRows, window: Option<u32>) -> Result<Section, NoHandoff> {
    let n_rot = parsed.n_rot;
    let layers = parsed.layers.into_iter().map(|layer| {
        let v = layer.v.as_ref().map(shape).transpose()?;
        Ok(LayerShape { k: shape(&layer.k)?, v })
    });
    Ok(Section { window, n_rot, tokens_per_row: 1, layers: layers.collect::<Result<_, NoHandoff>>()? })
}

/// The shape of a tensor's rows.
pub(super) fn shape(tensor: &ParsedTensor) -> Result<Rows, NoHandoff> {
    let dtype = u32::try_from(tensor.ggml_type).ok().and_then(Dtype::from_number);
    let dtype = dtype.ok_or(NoHandoff::ValueType(tensor.ggml_type))?;
    // The parser has limited the row's bytes.
    let rows = Rows { dtype, n_values: (tensor.row_bytes / dtype.block_bytes() * dtype.block_values()) as u32 };
    match rows.bytes() == tensor.row_bytes {
        true => Ok(rows),
        false => {
            Err(NoHandoff::UnknownState(BlobError::Shape(format!("rows of {} bytes of {dtype:?}", tensor.row_bytes))))
        }
    }
}
