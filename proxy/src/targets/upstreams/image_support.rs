//! Chooses the upstreams that get a request with images: those whose model sees them. An upstream that cannot see would read a
//! placeholder as text, or fail, so what it says of the model is asked before anything is sent.
//!
//! The configuration wins (`images`), then the upstream's list of models, then its description of the model.

use std::borrow::Cow;
use std::time::Duration;

use baton_schemas::generate::Conversation;
use baton_schemas::image::Image;
use baton_schemas::{EngineError, GenerateRequest};
use futures::future::join_all;
use tokio::time::timeout;

use super::described_sight::ImageSupport;
use super::{ServedByUpstreams, ServingUpstream, UpstreamHealth};
use crate::error::RequestError;

/// The most time for asking, the wait for others who ask included.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

/// When a client should retry after an upstream did not describe its model.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The upstreams that may get a request's images. Asks those whose word is not known, all at once.
///
/// Errors: there is none, or a linked image may go to none.
pub async fn seeing<'a>(
    serving: &'a ServedByUpstreams,
    request: &GenerateRequest,
    request_id: &str,
) -> Result<Cow<'a, ServedByUpstreams>, RequestError> {
    let (images, linked) = (request.images(), request.linked_images());
    let Some(field) = images.first().map(Image::field).or_else(|| Some(linked.first()?.field())) else {
        return Ok(Cow::Borrowed(serving));
    };
    let mut upstreams = serving.upstreams.clone();
    if let Some(link) = linked.first() {
        upstreams.retain(|upstream| upstream.server.client.settings().image_urls);
        if upstreams.is_empty() {
            return Err(EngineError::not_fetched(link).into());
        }
    }
    let supports = join_all(upstreams.iter().map(|upstream| support(upstream, request_id))).await;
    let seeing: Vec<ServingUpstream> = upstreams
        .into_iter()
        .zip(&supports)
        .filter(|(_, support)| **support == ImageSupport::Sees)
        .map(|(u, _)| u)
        .collect();
    if !seeing.is_empty() {
        return Ok(Cow::Owned(ServedByUpstreams { upstreams: seeing, ..serving.clone() }));
    }
    Err(refusal(&supports, field))
}

/// The error if no upstream sees. One that has not answered may see.
fn refusal(supports: &[ImageSupport], field: &str) -> RequestError {
    let has = |wanted: ImageSupport| supports.contains(&wanted);
    let why = if has(ImageSupport::Unknown) {
        let reason = "the upstream that serves it did not say whether it sees images".to_owned();
        return RequestError::Unavailable { reason, retry_after: RETRY_AFTER };
    } else if has(ImageSupport::Unsaid) {
        "the upstream that serves this model does not say whether it sees any, and its operator has not said so either \
         (images = true)"
    } else if has(ImageSupport::SeesNone) {
        "the upstream that serves this model says that it sees none"
    } else {
        "the operator sends none to the upstream that serves this model"
    };
    RequestError::ImagesUnsupported { field: field.to_owned(), why }
}

/// The image support of this upstream's model.
pub(super) async fn support(upstream: &ServingUpstream, request_id: &str) -> ImageSupport {
    let ServingUpstream { server, model } = upstream;
    match server.client.settings().images {
        Some(true) => return ImageSupport::Sees,
        Some(false) => return ImageSupport::SwitchedOff,
        None => {}
    }
    if let Some(sees_images) = server.listed_sight(model) {
        return ImageSupport::of_word(Some(sees_images));
    }
    let asked = async {
        if let Some(said) = server.sight.said_of(model) {
            return said;
        }
        let _asking = server.sight.turn().await;
        if let Some(said) = server.sight.said_of(model) {
            return said;
        }
        match server.client.model_info(model, request_id).await {
            // Its list may say it, once it has come.
            Ok(described) if described.sees_images.is_none() && server.health() == UpstreamHealth::Unknown => {
                ImageSupport::Unknown
            }
            Ok(described) => {
                server.sight.keep(model, described.sees_images);
                ImageSupport::of_word(described.sees_images)
            }
            Err(error) => {
                tracing::debug!(request_id, upstream = server.name(), %error, "an upstream does not describe its model");
                ImageSupport::Unknown
            }
        }
    };
    timeout(ASK_TIMEOUT, asked).await.unwrap_or(ImageSupport::Unknown)
}

/// Refuses images in questions about tokens: what an upstream counts for one, its routes for tokens do not say.
pub(super) fn refuse_images(conversation: &Conversation) -> Result<(), RequestError> {
    let field = conversation.images.first().map(Image::field);
    let field = field.or_else(|| Some(conversation.linked_images.first()?.field()));
    let why = "the upstream that serves this model does not count an image's tokens";
    field.map_or(Ok(()), |field| Err(RequestError::ImagesUnsupported { field: field.to_owned(), why }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::RequestErrorKind;

    #[test]
    fn the_reason_that_an_operator_or_a_client_can_act_on_comes_first() {
        let message = |supports: &[ImageSupport]| refusal(supports, "f").to_string();
        assert!(message(&[ImageSupport::SeesNone, ImageSupport::Unsaid]).contains("images = true"));
        assert!(message(&[ImageSupport::SwitchedOff, ImageSupport::SeesNone]).contains("says that it sees none"));
        assert!(message(&[ImageSupport::SwitchedOff]).contains("the operator sends none"));
        let silent = refusal(&[ImageSupport::SeesNone, ImageSupport::Unknown], "f");
        assert_eq!(silent.kind(), RequestErrorKind::Unavailable);
    }
}
