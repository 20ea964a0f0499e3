//! Guesses of an engine that is lost.

use baton_schemas::draft::{DraftCounts, DraftReport, DrafterKind};
use baton_schemas::sequence::GeneratedToken;

use super::*;

/// Says with each token that two guesses were verified, and that this token was one of them.
struct Guessing(MortalEngine);

#[async_trait]
impl EngineWrapper for Guessing {
    fn inner(&self) -> &dyn Engine {
        &self.0
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let verified = Some((DrafterKind::PromptLookup, DraftCounts { n: 2, n_accepted: 1 }));
        let reported = move |event| match event {
            SequenceEvent::Token(token) => {
                SequenceEvent::Token(GeneratedToken { drafts: Some(DraftReport { verified, loss: None }), ..token })
            }
            other => other,
        };
        Ok(EngineWrapper::generate(&self.0, request).await?.map_ok(reported).boxed())
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_lost_engine_guessed_counts_beside_what_the_next_one_guesses() {
    let pair = model(vec![node("mortal", Guessing(mortal(5, 9))).await, node("spare", sim()).await]);
    let (tokens, _, timings) = timed(request(), Span::none(), &pair).await.unwrap();
    assert_eq!((tokens.len(), timings.predicted_n), (12, 12));
    assert_eq!(timings.drafts.lookup, DraftCounts { n: 10, n_accepted: 5 });
}
