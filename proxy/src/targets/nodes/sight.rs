//! What a request needs a decode node to see.
//!
//! A node without the projector is none for a request with images, however well it is, as long as another one has it or
//! may have it: that one is waited for. So an outage is a reason to come back, and not a word on what the model can do.

use baton_schemas::image::Image;
use baton_schemas::node::NodeInfo;

/// See the module.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sight<'a> {
    /// It has no images.
    #[default]
    Unneeded,
    /// It has images, and no prompt yet: any projector will do.
    Any,
    /// In its prompt this projector has counted the images' tokens. Another one sees something else in them.
    By(&'a str),
}

impl Sight<'static> {
    /// Of a request with these images.
    pub fn of(images: &[Image]) -> Sight<'static> {
        if images.is_empty() { Sight::Unneeded } else { Sight::Any }
    }
}

impl<'a> Sight<'a> {
    /// Of a prompt with this projector's placeholders, or with none.
    pub fn by(projector: Option<&'a str>) -> Sight<'a> {
        projector.map_or(Sight::Unneeded, Sight::By)
    }

    /// Whether what a node runs sees that.
    pub fn is_met_by(self, info: &NodeInfo) -> bool {
        match self {
            Sight::Unneeded => true,
            Sight::Any => info.projector.is_some(),
            Sight::By(projector) => info.projector.as_deref() == Some(projector),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, OnceLock};
    use std::time::Duration;

    use baton_engines::Engine;
    use baton_engines::sim::{SimConfig, SimEngine};
    use tokio::time::Instant;

    use super::*;
    use crate::error::RequestErrorKind;
    use crate::targets::nodes::{Health, Node, ServedModel, StateReason, Why};

    const EYES: Option<&str> = Some("eyes");

    /// What a node says that runs these weights.
    async fn info(weights: &str, projector: Option<&str>) -> Arc<NodeInfo> {
        let sim = SimEngine::new(SimConfig { model: weights.into(), ..SimConfig::default() });
        Arc::new(NodeInfo { projector: projector.map(str::to_owned), ..sim.info().await.unwrap() })
    }

    /// A model on a blind node that is ready and on one that has not answered yet, whose life is in the test's hand.
    async fn half_blind() -> (ServedModel, Arc<Health>) {
        let lives = [Health::new("blind"), Health::new("other")];
        lives[0].answers(info("m", None).await);
        let sim = || Arc::new(SimEngine::new(SimConfig::default()));
        let decode = lives.iter().map(|life| Node::new("it".into(), None, sim(), Arc::clone(life))).collect();
        let [_, other] = lives;
        (ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, Vec::new()), other)
    }

    /// The projector of the node that a request would be asked of, or the error in a word.
    async fn chosen(
        model: &ServedModel,
        sight: Sight<'_>,
        failed: &[usize],
    ) -> Result<Option<String>, RequestErrorKind> {
        let found = model.any_ready_but(failed, sight).await;
        found.map(|(_, info)| info.projector.clone()).map_err(|error| error.kind())
    }

    #[tokio::test(start_paused = true)]
    async fn images_wait_for_the_node_that_sees_and_text_does_not() {
        let (model, other) = half_blind().await;
        let sight = Sight::of(&[Image::new(&b"x"[..], "f")]);
        let seen = Ok(Some("eyes".to_owned()));
        for how in ["new", "restarted"] {
            let (found, ()) = tokio::join!(chosen(&model, sight, &[]), async {
                tokio::time::sleep(Duration::from_secs(2)).await;
                other.answers(info("m", EYES).await);
            });
            assert_eq!(found, seen, "{how}");
            // For want of another one that sees, it is asked again.
            assert_eq!(chosen(&model, sight, &[1]).await, seen);
            assert_eq!(chosen(&model, Sight::Unneeded, &[1]).await, Ok(None));
            other.loads(StateReason::Ended);
            let began = Instant::now();
            assert_eq!(chosen(&model, Sight::Unneeded, &[]).await, Ok(None));
            assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        }
        other.fails(&Why::plainly(StateReason::Unreachable, "gone"), Duration::from_secs(2));
        assert_eq!(chosen(&model, sight, &[]).await, Err(RequestErrorKind::Unavailable));
        assert_eq!(chosen(&model, Sight::By("eyes"), &[]).await, Err(RequestErrorKind::Unavailable));
    }

    #[tokio::test(start_paused = true)]
    async fn a_blind_node_is_asked_about_images_once_all_are_known_to_be_blind() {
        let sight = Sight::Any;
        for (weights, projector) in [("m", None), ("other", EYES)] {
            let (model, other) = half_blind().await;
            assert_eq!(model.n_seeing(sight), 1, "one that has not said yet what it runs may see");
            other.answers(info(weights, projector).await);
            for is_down in [false, true] {
                assert_eq!(model.n_seeing(sight), 0, "{weights} {is_down}");
                assert_eq!(chosen(&model, sight, &[]).await, Ok(None), "{weights} {is_down}");
                other.fails(&Why::plainly(StateReason::Unreachable, "gone"), Duration::from_secs(2));
            }
        }
    }

    #[tokio::test]
    async fn images_that_a_projector_has_counted_are_seen_by_no_other() {
        let (ours, other) = (info("m", EYES).await, info("m", Some("other")).await);
        let met = |sight: Sight<'_>| [&ours, &other].map(|info| sight.is_met_by(info));
        assert_eq!(
            (met(Sight::by(EYES)), met(Sight::Any), met(Sight::by(None))),
            ([true, false], [true; 2], [true; 2])
        );
    }
}
