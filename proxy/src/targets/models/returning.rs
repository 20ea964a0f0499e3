//! KV flows both ways: after a reply, what the decode node has computed goes to the node that computed the prompt, so that it
//! computes nothing of this turn for the next one.
//!
//! The prefill node pulls it, as any handoff, from the decode node, which must have an address. Neither node computes for it, and
//! both end it when a request comes: what has come by then stays. It is tried only while both are idle, one conversation at a time,
//! and only if it is faster than computing the same tokens.

use std::sync::Arc;
use std::time::Duration;

use baton_planner::cost::Route;
use baton_planner::rates::WireBytes;
use baton_schemas::{EngineError, SequenceRequest};
use tokio::time::Instant;

use super::returns::KvReturn;
use super::served_model::ServedModel;

/// The interval between two searches for idle nodes. After a return the pause is as long as it took, if that is longer: so returns
/// leave a link half of its time.
const INTERVAL: Duration = Duration::from_millis(500);

/// The longest that a return may take.
const DEADLINE: Duration = Duration::from_secs(30);

impl ServedModel {
    /// A reply to this request was generated on a route with a handoff. Its KV returns to the prefill node if that pays.
    pub fn return_kv(&self, route: Route, request: &SequenceRequest) {
        let n_new = request.generated.len();
        let is_own = n_new > 0 && !request.ephemeral && request.images.is_none();
        if !is_own || !self.return_pays(route, n_new, request.lossless_kv) {
            return;
        }
        let Some(prefill) = route.prefill.map(|p| Arc::clone(&self.prefill[p])) else { return };
        self.returns.add(KvReturn {
            decode: Arc::clone(&self.decode[route.decode]),
            prefill,
            scope: request.cache_scope,
            tokens: [&request.prompt[..], &request.generated[..]].concat(),
            since: Instant::now(),
        });
    }

    /// Returns true if so many tokens cross the link sooner than the prefill node computes them. The link was measured in the other
    /// direction. Without measurements, nothing returns, nor what was computed after KV that had lost something on its way: the
    /// decode node does not hand it over. What a request with `lossless_kv` got had lost nothing.
    fn return_pays(&self, Route { decode, prefill }: Route, n_new: usize, lossless_kv: bool) -> bool {
        let (Some(p), decode_node) = (prefill, &self.decode[decode]) else { return false };
        let kv = decode_node.info().and_then(|info| info.kv.clone()).filter(|_| decode_node.url.is_some());
        let Some((kv, link)) = kv.zip(self.routes.view().links.get(p).and_then(|row| row.get(decode)).copied()) else {
            return false;
        };
        let node = &self.prefill[p];
        let prefill_tps = node.rates().prefill.at(n_new as f64).unwrap_or(node.load().prefill_tps);
        // The prefill node pulls it losslessly.
        let WireBytes { per_token, .. } = link.for_kv(true).wire_bytes();
        let per_token = if per_token > 0.0 { per_token } else { kv.bytes_per_token() as f64 };
        let n_bytes = n_new as f64 * per_token + kv.state_bytes() as f64;
        let is_measured = link.bytes_per_second > 0.0 && prefill_tps > 0.0;
        is_measured
            && !link.for_kv(lossless_kv).is_lossy
            && n_bytes / link.bytes_per_second < n_new as f64 / prefill_tps
    }
}

/// Returns the KV of replies between a model's nodes until the model is dropped.
pub fn keep_returning(model: &Arc<ServedModel>) {
    if model.prefill.is_empty() {
        return;
    }
    let model = Arc::downgrade(model);
    tokio::spawn(async move {
        while let Some(model) = model.upgrade() {
            // A model's predecessor may still have a return under way.
            let returns = Arc::clone(&model.returns);
            let Ok(_turn) = returns.turn.try_lock() else {
                drop(model);
                tokio::time::sleep(INTERVAL).await;
                continue;
            };
            let began = Instant::now();
            if let Some(next) = model.returns.next(&model.removed_keys) {
                let mut n_tokens = 0;
                let returned = tokio::select! {
                    biased;
                    // Nothing new of a removed key may come to a node.
                    () = model.removed_keys.removal_of(next.scope) => Err(EngineError::invalid("its key was removed")),
                    returned = next.bring_back(&mut n_tokens) => returned,
                    () = tokio::time::sleep(DEADLINE) => Err(EngineError::lost("a return of KV missed its deadline")),
                };
                returns.count(&returned, n_tokens);
                let (from, to) = (&next.decode.name, &next.prefill.name);
                match returned {
                    Ok(()) => tracing::debug!(from, to, n_tokens, "the KV of a reply has returned"),
                    Err(error) => {
                        tracing::debug!(from, to, n_tokens, %error, "the rest of a reply's KV stays where it is")
                    }
                }
            }
            drop(model);
            tokio::time::sleep(began.elapsed().max(INTERVAL)).await;
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, OnceLock};

    use async_trait::async_trait;
    use baton_engines::sim::{SimConfig, SimEngine};
    use baton_link::wrapper::EngineWrapper;
    use baton_link::{Engine, SequenceStream};
    use baton_schemas::handoff::{HandoffFailure, HandoffReport};
    use baton_schemas::sequence::SequenceEvent;
    use baton_schemas::{CacheScope, Token};
    use futures::StreamExt;

    use super::super::returns::ReturnCounts;
    use super::*;
    use crate::targets::nodes::{Health, Node};

    /// Notes what it is asked for.
    struct Noting {
        sim: SimEngine,
        asked: Arc<Mutex<Vec<SequenceRequest>>>,
        /// Its streams have no end, and each has a clone of this.
        hangs: Option<Arc<()>>,
    }

    #[async_trait]
    impl EngineWrapper for Noting {
        fn inner(&self) -> &dyn Engine {
            &self.sim
        }

        async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
            self.asked.lock().unwrap().push(request.clone());
            if let Some(running) = self.hangs.clone() {
                return Ok(futures::stream::pending().map(move |event| (&running, event).1).boxed());
            }
            self.sim.generate(SequenceRequest { kv_source: None, ..request }).await
        }
    }

    const ROUTE: Route = Route { decode: 0, prefill: Some(0) };

    fn node(
        name: &str,
        url: Option<&str>,
        engine: Arc<dyn Engine>,
        info: &Arc<baton_schemas::node::NodeInfo>,
    ) -> Arc<Node> {
        let health = Health::new(name);
        health.note_answer(Arc::clone(info));
        Node::new(name.into(), url.map(str::to_owned), engine, health)
    }

    /// A prefill node that computes 100 tokens per second, and a decode node behind a link of so many bytes per second.
    async fn pair(url: Option<&str>, bytes_per_second: u64) -> (Arc<ServedModel>, Arc<Mutex<Vec<SequenceRequest>>>) {
        pair_with(url, bytes_per_second, None).await
    }

    async fn pair_with(
        url: Option<&str>,
        bytes_per_second: u64,
        hangs: Option<Arc<()>>,
    ) -> (Arc<ServedModel>, Arc<Mutex<Vec<SequenceRequest>>>) {
        let asked: Arc<Mutex<Vec<SequenceRequest>>> = Arc::default();
        let config = SimConfig { kv_bytes_per_token: 1_000, ..SimConfig::default() };
        let sim = || SimEngine::new(config.clone());
        let noting = Noting { sim: sim(), asked: Arc::clone(&asked), hangs };
        let info = Arc::new(Engine::info(&noting).await.unwrap());
        let decode = vec![node("d", url, Arc::new(sim()), &info)];
        let prefill = vec![node("p", Some("http://192.0.2.1:9000"), Arc::new(noting), &info)];
        prefill[0].learn(|rates| rates.prefill.learn(64.0, 100.0));
        let model = Arc::new(ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), decode, prefill));
        model.routes.learn_link(0, 0, |link| link.learn_probe(1.0, bytes_per_second, 1.0));
        (model, asked)
    }

    /// A pull that ends after 12 tokens.
    struct Ending(SimEngine, HandoffFailure);

    #[async_trait]
    impl EngineWrapper for Ending {
        fn inner(&self) -> &dyn Engine {
            &self.0
        }

        async fn generate(&self, _: SequenceRequest) -> Result<SequenceStream, EngineError> {
            let report = HandoffReport { n_tokens: 12, ..HandoffReport::failed(self.1) };
            Ok(futures::stream::iter([Ok(SequenceEvent::Handoff(report))]).boxed())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_came_before_a_return_ended_counts_and_one_that_gave_way_is_no_failure() {
        for (failure, gave_way, failed) in [(HandoffFailure::GaveWay, 1, 0), (HandoffFailure::PrefillLost, 0, 1)] {
            let (pair, _) = pair(Some("http://192.0.2.2:9000"), 1_000_000).await;
            let ending = Arc::new(Ending(SimEngine::new(SimConfig::default()), failure));
            let prefill = node("p", None, ending, &pair.prefill[0].info().unwrap());
            prefill.learn(|rates| rates.prefill.learn(64.0, 100.0));
            let model = Arc::new(pair.with_nodes(pair.decode.clone(), vec![prefill]));
            model.routes.learn_link(0, 0, |link| link.learn_probe(1.0, 1_000_000, 1.0));
            // The predecessor's task and this one share the returns.
            keep_returning(&pair);
            keep_returning(&model);
            model.return_kv(ROUTE, &replied(100));
            tokio::time::sleep(MAX_AGE_OF_TEST).await;
            assert_eq!(model.returns.counts(), ReturnCounts { gave_way, failed, tokens: 12, returned: 0 });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_returns_where_kv_loses_something_on_its_way() {
        let (model, asked) = pair(Some("http://192.0.2.2:9000"), 1_000_000).await;
        let lossy = HandoffReport { n_tokens: 100, n_bytes: 1, is_lossy: true, ..HandoffReport::default() };
        model.learn_handoff(ROUTE, &lossy, false);
        keep_returning(&model);
        model.return_kv(ROUTE, &replied(100));
        tokio::time::sleep(MAX_AGE_OF_TEST).await;
        assert!(asked.lock().unwrap().is_empty());
        model.return_kv(ROUTE, &SequenceRequest { lossless_kv: true, ..replied(100) });
        tokio::time::sleep(MAX_AGE_OF_TEST).await;
        assert_eq!(asked.lock().unwrap().len(), 1, "a request that got lossless KV has something to return");
    }

    fn replied(n_prompt: Token) -> SequenceRequest {
        SequenceRequest { prompt: (0..n_prompt).collect(), generated: vec![7; 20], ..SequenceRequest::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn the_node_that_computed_a_prompt_is_asked_once_to_bring_the_reply_back() {
        let (model, asked) = pair(Some("http://192.0.2.2:9000"), 1_000_000).await;
        keep_returning(&model);
        model.return_kv(ROUTE, &replied(100));
        tokio::time::sleep(MAX_AGE_OF_TEST).await;
        let asked = asked.lock().unwrap();
        let SequenceRequest { prompt, max_tokens, gives_way, held_only, ephemeral, kv_source, .. } = &asked[0];
        assert_eq!((asked.len(), prompt.len(), *max_tokens), (1, 120, Some(0)));
        assert!(*gives_way && *held_only && !*ephemeral, "it computes nothing, ends for a request, and stays");
        assert_eq!(kv_source.as_ref().unwrap().url, "http://192.0.2.2:9000");
        assert_eq!(model.returns.counts(), ReturnCounts { returned: 1, ..ReturnCounts::default() });
    }

    #[tokio::test(start_paused = true)]
    async fn a_reply_stays_where_a_link_is_too_slow_or_nobody_may_have_it() {
        let url = Some("http://192.0.2.2:9000");
        let usual = replied(100);
        let cases = [
            // 20 tokens in 0.2 s, their 20,000 bytes in 0.25 s.
            (url, 80_000, usual.clone()),
            (None, 1_000_000, usual.clone()),
            (url, 1_000_000, SequenceRequest { ephemeral: true, ..usual.clone() }),
            (url, 1_000_000, SequenceRequest { generated: Vec::new(), ..usual.clone() }),
        ];
        for (i, (url, bytes_per_second, request)) in cases.into_iter().enumerate() {
            let (model, asked) = pair(url, bytes_per_second).await;
            keep_returning(&model);
            model.return_kv(ROUTE, &request);
            tokio::time::sleep(MAX_AGE_OF_TEST).await;
            assert!(asked.lock().unwrap().is_empty(), "case {i}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_removed_key_takes_what_waits_with_it() {
        let (model, asked) = pair(Some("http://192.0.2.2:9000"), 1_000_000).await;
        for scope in [1, 2] {
            model.return_kv(ROUTE, &SequenceRequest { cache_scope: CacheScope(scope), ..replied(100) });
        }
        model.removed_keys.note(&[CacheScope(1)], &[]);
        keep_returning(&model);
        tokio::time::sleep(MAX_AGE_OF_TEST).await;
        let scopes: Vec<CacheScope> = asked.lock().unwrap().iter().map(|request| request.cache_scope).collect();
        assert_eq!(scopes, [CacheScope(2)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_removed_key_ends_the_return_that_is_under_way_and_begins_no_other() {
        let running = Arc::new(());
        let (model, asked) = pair_with(Some("http://192.0.2.2:9000"), 1_000_000, Some(Arc::clone(&running))).await;
        keep_returning(&model);
        let reply = SequenceRequest { cache_scope: CacheScope(1), ..replied(100) };
        let n_running = || Arc::strong_count(&running) - 2;
        model.return_kv(ROUTE, &reply);
        tokio::time::sleep(2 * INTERVAL).await;
        assert_eq!((n_running(), asked.lock().unwrap().len()), (1, 1));
        model.removed_keys.note(&[CacheScope(1)], &[]);
        tokio::time::sleep(INTERVAL / 2).await;
        assert_eq!(n_running(), 0, "the prefill node is told to end it");
        assert_eq!(model.returns.counts(), ReturnCounts { failed: 1, ..ReturnCounts::default() });
        // A stream of the key that ends later.
        model.return_kv(ROUTE, &reply);
        tokio::time::sleep(MAX_AGE_OF_TEST).await;
        assert_eq!(asked.lock().unwrap().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_newest_replies_return_first_and_few_wait() {
        let (model, asked) = pair(Some("http://192.0.2.2:9000"), 1_000_000).await;
        for n_prompt in 100..130 {
            model.return_kv(ROUTE, &replied(n_prompt));
        }
        // The next turn of the last one.
        let last = replied(129);
        let prompt = [&last.prompt[..], &last.generated, &[1, 2, 3]].concat();
        model.return_kv(ROUTE, &SequenceRequest { prompt, ..last });
        keep_returning(&model);
        tokio::time::sleep(MAX_AGE_OF_TEST).await;
        let asked: Vec<usize> = asked.lock().unwrap().iter().map(|request| request.prompt.len()).collect();
        assert_eq!(asked, [&[129 + 43], &(134..149).rev().collect::<Vec<_>>()[..]].concat());
    }

    const MAX_AGE_OF_TEST: Duration = Duration::from_secs(30);
}
