//! Images in prompts, as far as the scheduler and the prompt know them.

use std::ops::Range;

use baton_schemas::image::{Image, ImageShape};
use baton_schemas::{EngineError, SequenceRequest};
use futures::future::BoxFuture;
use tokio::sync::OwnedSemaphorePermit;

/// An image in a sequence.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ImageRun {
    /// Its tokens in the prompt.
    pub(crate) at: Range<usize>,
    pub(crate) shape: ImageShape,
    pub(crate) image: Image,
}

/// An image of a sequence, prepared or about to be. After it is dropped, it takes no place in the queue.
pub(crate) trait Preparation {
    /// The first position of the image.
    fn start(&self) -> usize;

    /// The outcome, once there is one.
    fn outcome(&self) -> Option<Result<(), EngineError>>;
}

/// Why an image was not decoded.
pub(crate) enum ImageFailure {
    /// The projector is at work on another image.
    Busy,
    /// No cells are free, or the projector failed.
    NoCells,
    /// The image is invalid, or the projector failed.
    Failed(EngineError),
}

/// A projector, as a prompt needs it.
pub(crate) trait ImageEncoder: Send + Sync {
    /// The value of [`NodeInfo::projector`](baton_schemas::node::NodeInfo::projector): the hash of its weights, in hex.
    fn id(&self) -> &str;

    /// Waits for the permit to prepare images. The thread that prepares them holds it, even after its caller has gone.
    fn turn(&self) -> BoxFuture<'_, Option<OwnedSemaphorePermit>>;

    /// The shape of an image in a prompt. Blocking: prepares the image and keeps it for its sequence. The
    /// caller holds [`ImageEncoder::turn`]. Errors: the image cannot be read or is too large.
    fn shape(&self, image: &Image) -> Result<ImageShape, EngineError>;

    /// Reserves memory for the files of these images until the permit is dropped. `None`: too little is free.
    fn room(&self, images: &[ImageRun]) -> Option<OwnedSemaphorePermit>;

    /// Finds the images of a request's prompt. Errors: the prompt was rendered with another projector, or placeholders
    /// do not match its images.
    fn find(&self, request: &SequenceRequest) -> Result<Vec<ImageRun>, EngineError>;
}

/// What an engine without images has in place of a preparation.
pub(crate) enum NoImages {}

impl Preparation for NoImages {
    fn start(&self) -> usize {
        match *self {}
    }

    fn outcome(&self) -> Option<Result<(), EngineError>> {
        match *self {}
    }
}

/// The error for images without a projector. The proxy refuses such requests before, with a better message.
pub(crate) fn no_projector() -> EngineError {
    EngineError::Unsupported { feature: "images: its model has no projector".into() }
}
