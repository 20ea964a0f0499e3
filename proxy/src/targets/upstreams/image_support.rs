//! Images are not sent to upstreams.

use baton_schemas::image::Image;

use crate::error::RequestError;

/// Refuses images: an upstream would get a placeholder for each image and read it as text.
pub(super) fn refuse_images(images: &[Image]) -> Result<(), RequestError> {
    let why = "the upstream that serves this model is sent none";
    images.first().map_or(Ok(()), |image| Err(RequestError::ImagesUnsupported { field: image.field().to_owned(), why }))
}
