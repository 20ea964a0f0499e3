//! The projector that a request's images need on a decode node.
//!
//! A node without the projector cannot serve a request with images. While another node has the projector, or may have it,
//! the request waits for that node, even if this one is ready. So during an outage the client gets an error that asks for
//! a retry, and not the error that the model does not support images.

use baton_schemas::image::Image;
use baton_schemas::node::NodeInfo;

/// The projector that a request's images need on a decode node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ImageNeed<'a> {
    /// The request has no images.
    #[default]
    None,
    /// The request has images and no prompt yet: any projector will do.
    AnyProjector,
    /// The prompt holds this projector's placeholders. Another projector would encode the images differently.
    Projector(&'a str),
}

impl ImageNeed<'static> {
    /// The need of a request with these images.
    pub fn of_images(images: &[Image]) -> ImageNeed<'static> {
        if images.is_empty() { ImageNeed::None } else { ImageNeed::AnyProjector }
    }
}

impl<'a> ImageNeed<'a> {
    /// The need of a prompt with this projector's placeholders, or with none.
    pub fn of_prompt(projector: Option<&'a str>) -> ImageNeed<'a> {
        projector.map_or(ImageNeed::None, ImageNeed::Projector)
    }

    /// Returns true if the node that reported `info` meets the need.
    pub fn is_met_by(self, info: &NodeInfo) -> bool {
        match self {
            ImageNeed::None => true,
            ImageNeed::AnyProjector => info.projector.is_some(),
            ImageNeed::Projector(projector) => info.projector.as_deref() == Some(projector),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, OnceLock};
    use std::time::Duration;

    use baton_engines::sim::{SimConfig, SimEngine};
    use baton_link::Engine;
    use tokio::time::Instant;

    use super::*;
    use crate::error::RequestErrorKind;
    use crate::targets::models::ServedModel;
    use crate::targets::nodes::{Health, Node, StateChange, StateReason};

    const PROJECTOR: Option<&str> = Some("projector");

    /// The report of a node that runs these weights.
    async fn info(weights: &str, projector: Option<&str>) -> Arc<NodeInfo> {
        let sim = SimEngine::new(SimConfig { model: weights.into(), ..SimConfig::default() });
        Arc::new(NodeInfo { projector: projector.map(str::to_owned), ..sim.info().await.unwrap() })
    }

    /// A model on a node without a projector that is ready and on one that has not answered yet, whose health the test controls.
    async fn one_without_projector() -> (ServedModel, Arc<Health>) {
        let healths = [Health::new("without projector"), Health::new("other")];
        healths[0].note_answer(info("m", None).await);
        let sim = || Arc::new(SimEngine::new(SimConfig::default()));
        let decode = healths.iter().map(|health| Node::new("it".into(), None, sim(), Arc::clone(health))).collect();
        let [_, other] = healths;
        (ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, Vec::new()), other)
    }

    /// The projector of the node that a request would be asked of, or the kind of the error.
    async fn chosen(
        model: &ServedModel,
        need: ImageNeed<'_>,
        failed: &[usize],
    ) -> Result<Option<String>, RequestErrorKind> {
        let found = model.ready_node(None, failed, need).await;
        found.map(|(_, info)| info.projector.clone()).map_err(|error| error.kind())
    }

    #[tokio::test(start_paused = true)]
    async fn images_wait_for_a_node_with_a_projector_and_text_does_not() {
        let (model, other) = one_without_projector().await;
        let need = ImageNeed::of_images(&[Image::new(&b"x"[..], "f")]);
        let seen = Ok(Some("projector".to_owned()));
        for how in ["new", "restarted"] {
            let (found, ()) = tokio::join!(chosen(&model, need, &[]), async {
                tokio::time::sleep(Duration::from_secs(2)).await;
                other.note_answer(info("m", PROJECTOR).await);
            });
            assert_eq!(found, seen, "{how}");
            // No other node has a projector, so it is asked again.
            assert_eq!(chosen(&model, need, &[1]).await, seen);
            assert_eq!(chosen(&model, ImageNeed::None, &[1]).await, Ok(None));
            other.note_loading(StateReason::Ended);
            let began = Instant::now();
            assert_eq!(chosen(&model, ImageNeed::None, &[]).await, Ok(None));
            assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        }
        other.note_failure(&StateChange::new(StateReason::Unreachable, "gone"), Duration::from_secs(2));
        assert_eq!(chosen(&model, need, &[]).await, Err(RequestErrorKind::Unavailable));
        assert_eq!(chosen(&model, ImageNeed::Projector("projector"), &[]).await, Err(RequestErrorKind::Unavailable));
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_without_a_projector_is_asked_once_all_are_known_to_lack_one() {
        let need = ImageNeed::AnyProjector;
        for (weights, projector) in [("m", None), ("other", PROJECTOR)] {
            let (model, other) = one_without_projector().await;
            assert_eq!(model.n_supporting(need), 1, "a node that has not answered yet may have a projector");
            other.note_answer(info(weights, projector).await);
            for is_down in [false, true] {
                assert_eq!(model.n_supporting(need), 0, "{weights} {is_down}");
                assert_eq!(chosen(&model, need, &[]).await, Ok(None), "{weights} {is_down}");
                other.note_failure(&StateChange::new(StateReason::Unreachable, "gone"), Duration::from_secs(2));
            }
        }
    }

    #[tokio::test]
    async fn a_prompt_needs_the_projector_that_placed_its_images() {
        let ours = info("m", PROJECTOR).await;
        let other = info("m", Some("other")).await;
        let met = |need: ImageNeed<'_>| [&ours, &other].map(|info| need.is_met_by(info));
        assert_eq!(
            (met(ImageNeed::of_prompt(PROJECTOR)), met(ImageNeed::AnyProjector), met(ImageNeed::of_prompt(None))),
            ([true, false], [true; 2], [true; 2])
        );
    }
}
