//! Nodes whose streams do not keep to the protocol.

use baton_schemas::sequence::{CachedTokens, GeneratedToken};

use super::*;

/// What a node sends without end.
#[derive(Debug, Clone, Copy)]
enum Endless {
    Starts,
    Handoffs,
    Tokens,
}

struct EndlessEngine {
    sim: SimEngine,
    repeats: Endless,
}

#[async_trait]
impl EngineWrapper for EndlessEngine {
    fn inner(&self) -> &dyn Engine {
        &self.sim
    }

    async fn generate(&self, _: SequenceRequest) -> Result<SequenceStream, EngineError> {
        let repeated = match self.repeats {
            Endless::Starts => SequenceEvent::Started(CachedTokens::in_slot(0)),
            Endless::Handoffs => SequenceEvent::Handoff(HandoffReport::default()),
            Endless::Tokens => SequenceEvent::Token(GeneratedToken {
                id: 7,
                bytes: b"x".to_vec(),
                special: false,
                logprobs: None,
                drafts: None,
            }),
        };
        let stream = async_stream::stream! {
            loop {
                tokio::time::sleep(Duration::from_millis(500)).await;
                yield Ok(repeated.clone());
            }
        };
        Ok(stream.boxed())
    }
}

async fn endless(repeats: Endless) -> Arc<Node> {
    node("endless", EndlessEngine { sim: sim(), repeats }).await
}

fn n_decode_lost(node: &Node) -> Option<u64> {
    node.breakers.of(Task::Decode).view().counts.get(&FailureReason::DecodeLost).copied()
}

#[tokio::test(start_paused = true)]
async fn a_node_that_repeats_an_event_is_lost() {
    let (expected, _, _) = run(&model(vec![node("well", sim()).await])).await.unwrap();
    for repeats in [Endless::Starts, Endless::Handoffs] {
        let pair = model(vec![endless(repeats).await, node("spare", sim()).await]);
        let outcome = tokio::time::timeout(Duration::from_secs(3_600), run(&pair)).await;
        let (tokens, _, _) = outcome.unwrap_or_else(|_| panic!("{repeats:?}: the request is held")).unwrap();
        assert_eq!(tokens, expected, "{repeats:?}");
        assert_eq!((count(&pair, FallbackReason::DecodeLost), n_decode_lost(&pair.decode[0])), (1, Some(1)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_sends_too_many_tokens_is_lost_and_its_reply_complete() {
    let n_left_in_context = SimConfig::default().n_ctx - request().prompt.len() as u32;
    for (max_tokens, n_expected) in
        [(Some(0), 0), (Some(5), 5), (None, n_left_in_context), (Some(1 << 20), n_left_in_context)]
    {
        let pair = model(vec![endless(Endless::Tokens).await, node("spare", sim()).await]);
        let asked = run_of(SequenceRequest { max_tokens, ..request() }, Span::none(), &pair);
        let outcome = tokio::time::timeout(Duration::from_secs(86_400), asked).await;
        let (tokens, _, _) = outcome.unwrap_or_else(|_| panic!("{max_tokens:?}: the reply has no end")).unwrap();
        assert_eq!(tokens.len() as u32, n_expected, "{max_tokens:?}");
        assert!(tokens.iter().all(|token| *token == 7), "no other engine was asked");
        assert_eq!(n_decode_lost(&pair.decode[0]), Some(1), "{max_tokens:?}");
    }
}
