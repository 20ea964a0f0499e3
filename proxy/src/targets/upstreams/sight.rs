//! Upstreams are sent no images.

use baton_schemas::image::Image;

use crate::error::RequestError;

/// Refuses images. Instead of each an upstream would be sent the mark in its place, and take it for text.
pub(super) fn check_sight(images: &[Image]) -> Result<(), RequestError> {
    let why = "the upstream that serves this model is sent none";
    images.first().map_or(Ok(()), |image| Err(RequestError::ImagesUnsupported { field: image.field().to_owned(), why }))
}
