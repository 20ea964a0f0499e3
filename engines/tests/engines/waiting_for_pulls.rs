//! A sequence whose first tokens another one is pulling computes them itself when the pull is slow.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_engines::registry::EngineOptions;
use baton_link::handoff::{KvPuller, LocalKv, PullEvent, PullOrder};
use baton_schemas::handoff::{HandoffFailure, KvSource, LinkMeasurement};
use baton_schemas::{SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc;

use crate::{models, peers};

/// A prefill node that is busy until the test lets its pulls fail.
#[derive(Default)]
struct BusyPuller(Mutex<Vec<mpsc::Sender<PullEvent>>>);

impl BusyPuller {
    fn n_pulls(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    fn give_up(&self) {
        for pull in self.0.lock().unwrap().iter() {
            pull.try_send(PullEvent::End(HandoffFailure::PrefillLate.into())).unwrap();
        }
    }
}

impl KvPuller for BusyPuller {
    fn introduce(&self, _: LocalKv) {}

    fn pull(&self, _: PullOrder, _: Arc<dyn Fn() + Send + Sync>) -> mpsc::Receiver<PullEvent> {
        let (events, pulled) = mpsc::channel(1);
        self.0.lock().unwrap().push(events);
        pulled
    }

    fn measure_link(&self, _: &KvSource) -> BoxFuture<'static, Result<LinkMeasurement, HandoffFailure>> {
        Box::pin(async { Err(HandoffFailure::PrefillDown) })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_prompt_does_not_wait_for_a_strangers_pull() {
    let Some(model) = models::smollm2() else { return };
    let config = EngineOptions { n_threads: Some(1), n_ctx: Some(1_024), n_slots: Some(4), ..models::of_llama(model) };
    let puller = Arc::new(BusyPuller::default());
    let engine = models::start(config, Some(Arc::clone(&puller) as Arc<dyn KvPuller>)).await;
    let system: Vec<Token> = (1_000..1_060).collect();
    let long: Vec<Token> = system.iter().copied().chain(2_000..2_540).collect();
    let mut pulling = engine.generate(peers::request(&long, 2, Some("http://192.0.2.1:9000"))).await.unwrap();
    assert!(matches!(pulling.next().await, Some(Ok(SequenceEvent::Started { .. }))));
    // Another choice of the same request goes on waiting, instead of pulling the prompt once more from the same node.
    let mut choice = engine.generate(peers::request(&long, 2, Some("http://192.0.2.1:9000"))).await.unwrap();

    // The pull brings nothing until this reply is complete.
    let short: Vec<Token> = system.iter().copied().chain([7, 8, 9]).collect();
    let reply =
        peers::generate(engine.as_ref(), SequenceRequest { ignore_eos: true, ..peers::request(&short, 4, None) });
    let reply = tokio::time::timeout(Duration::from_secs(60), reply).await.expect("it waits for the stranger's pull");
    assert_eq!((reply.tokens.len(), reply.timings.prompt_n as usize), (4, short.len()));
    assert_eq!(puller.n_pulls(), 1);
    // A stranger with the whole prompt pulls it from another node.
    let _stranger = engine.generate(peers::request(&long, 2, Some("http://192.0.2.2:9000"))).await.unwrap();
    let pulls = async {
        while puller.n_pulls() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), pulls).await.expect("it waits for the first pull");

    puller.give_up();
    let pulled = pulling.next().await;
    assert!(matches!(&pulled, Some(Ok(SequenceEvent::Handoff(report))) if report.failure.is_some()), "{pulled:?}");
    assert!(matches!(choice.next().await, Some(Ok(SequenceEvent::Started { .. }))));
}
