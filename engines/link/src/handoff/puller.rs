//! Pulls KV over the node protocol.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use baton_schemas::CacheScope;
use baton_schemas::EngineError;
use baton_schemas::handoff::{HandoffFailure, HandoffReport, KvSource, LinkMeasurement};
use baton_schemas::kv::{Codec, CodecLoss, Contiguous, Fingerprint, Placement};
use futures::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tracing::Instrument;

use super::canary::{self, ComputedKv, Farthest, KvDistances};
use super::codecs::LinkCodecs;
use super::draft_nodes::{self, DraftClients};
use super::peers::{AdmittedPeer, Match, Peers, compare};
use super::policy::{KvPart, PullPolicy, PullSettings, lossless};
use super::receive::{PeerCodecs, PrefillPeer, PullClient, failure_of};
use super::sources::{ReachedSource, Sources};
use super::{ChunkBuffers, KvPuller, LocalKv, PULL_WINDOW, PullEnd, PullEvent, PullOrder};
use crate::drafts::{DraftOrder, RemoteDrafts};
use crate::engine::Engine;
use crate::kv_streams::KvStreamOpen;
use crate::remote::{ClientError, ModelSource, RemoteEngine};
use crate::trace;

/// Pulls KV from prefill nodes over HTTP. Cheap to clone.
#[derive(Clone)]
pub struct HttpPuller(Arc<PullerState>);

struct PullerState {
    client: PullClient,
    runtime: Handle,
    peers: Peers,
    local: OnceLock<LocalKv>,
    draft_clients: DraftClients,
}

impl HttpPuller {
    /// A puller whose tasks run on the current tokio runtime.
    pub fn new(cluster_key: &str, policy: PullPolicy) -> Result<HttpPuller, EngineError> {
        let settings = Arc::new(PullSettings { cluster_key: cluster_key.to_owned(), policy });
        let client = PullClient {
            read_ahead: Semaphore::new(settings.policy.read_ahead.min(Semaphore::MAX_PERMITS)),
            sources: Sources::new(Arc::clone(&settings)).map_err(EngineError::internal)?,
            settings,
            links: LinkCodecs::default(),
        };
        let runtime = Handle::try_current().map_err(EngineError::internal)?;
        let (peers, local, draft_clients) = Default::default();
        Ok(HttpPuller(Arc::new(PullerState { client, runtime, peers, local, draft_clients })))
    }

    /// Finds the way to another node's model files, by the rules for KV. Errors: the key must not be sent there, or none of its
    /// addresses answers.
    pub async fn model_source(&self, source: &KvSource) -> Result<ModelSource, HandoffFailure> {
        let PullClient { settings, sources, .. } = &self.0.client;
        settings.check_address(source.base(), "no model file is copied")?;
        let reached = sources.reach(source).await?;
        Ok(ModelSource::new(reached.http, source.base(), &settings.cluster_key))
    }
}

impl KvPuller for HttpPuller {
    fn introduce(&self, local: LocalKv) {
        if self.0.local.set(local).is_err() {
            tracing::error!("a puller was given a second engine; it keeps serving the first");
        }
    }

    fn pull(&self, order: PullOrder, notify: Arc<dyn Fn() + Send + Sync>) -> mpsc::Receiver<PullEvent> {
        let (sender, receiver) = mpsc::channel(PULL_WINDOW);
        let inner = Arc::clone(&self.0);
        let parent = order.source.traceparent.as_deref().and_then(trace::parent_of);
        let span = match &parent {
            Some(_) => tracing::info_span!(target: trace::TARGET, parent: None, "handoff_pull"),
            None => tracing::Span::none(),
        };
        trace::continue_from(&span, parent);
        let pull = async move {
            let _open = KvStreamOpen::new();
            let sink = PullSender { sender, notify };
            let outcome = tokio::select! {
                outcome = inner.pull(order, &sink) => outcome,
                // The sequence was cancelled: dropping the pull closes its connection, which ends the prefill.
                () = sink.sender.closed() => return,
            };
            sink.send(PullEvent::End(outcome.unwrap_or_else(PullEnd::from))).await;
        };
        self.0.runtime.spawn(pull.instrument(span));
        receiver
    }

    fn takes_other_weights(&self) -> bool {
        self.0.client.settings.policy.max_canary_distance.is_some()
    }

    fn drafts(&self, order: DraftOrder) -> Option<RemoteDrafts> {
        let DraftOrder { source, request, n_vocab } = order;
        let inner = Arc::clone(&self.0);
        let _entered = self.0.runtime.enter();
        let client = async move { inner.draft_clients.client(&source, &inner.client).await };
        Some(draft_nodes::follow(request, n_vocab, client))
    }

    fn measure_link(&self, source: &KvSource) -> BoxFuture<'static, Result<LinkMeasurement, HandoffFailure>> {
        let inner = Arc::clone(&self.0);
        let source = source.clone();
        Box::pin(async move {
            let url = source.base();
            let client = &inner.client;
            if source.socket.is_none() {
                client.settings.check_address(url, "the link to the prefill node is not measured")?;
            }
            let measured = client.sources.measure(&source).await?;
            client.links.measured(&source.node(), &measured);
            Ok(measured)
        })
    }
}

struct PullSender {
    sender: mpsc::Sender<PullEvent>,
    notify: Arc<dyn Fn() + Send + Sync>,
}

impl PullSender {
    /// Waits for room in the channel. Meanwhile the pull reads ahead; beyond its budget, this backpressure slows the
    /// prefill node down to the engine's speed.
    async fn send(&self, event: PullEvent) {
        // `KvPuller::pull` ends the pull when the channel is closed.
        if self.sender.send(event).await.is_ok() {
            (self.notify)();
        }
    }
}

impl PullerState {
    /// Errors: the pull was not begun.
    async fn pull(&self, order: PullOrder, sink: &PullSender) -> Result<PullEnd, HandoffFailure> {
        let local = self.local.get().ok_or(HandoffFailure::FingerprintMismatch)?;
        let source = order.source.clone();
        let (url, node) = (source.base(), source.node());
        let client = &self.client;
        let reached = client.sources.reach(&order.source).await?;
        let AdmittedPeer { fingerprint, kv_distance, losses } = match self.peers.known(&node) {
            Some(known) => known?,
            None => {
                let outcome = self.examine(&source, &reached, local).await;
                // An unreachable peer is examined again with the next request.
                if !matches!(outcome, Err(HandoffFailure::PrefillDown | HandoffFailure::PrefillStalled)) {
                    self.peers.remember(&node, outcome.clone());
                }
                outcome?
            }
        };
        let best_first = |part| {
            let mut allowed = client.settings.policy.allowed_codecs(part, &losses, &local.identity.layout);
            if order.lossless {
                allowed = lossless(allowed);
            }
            client.links.choose(&node, &allowed)
        };
        let [codecs, state_codecs] = [KvPart::Rows, KvPart::States].map(best_first);
        let codecs = PeerCodecs { rows: &codecs, states: &state_codecs };
        let peer = PrefillPeer { http: &reached.http, url, node: &node, fingerprint, codecs };
        let end = self.client.receive(peer, local, order, |event| sink.send(event)).await;
        match end.report.failure {
            Some(HandoffFailure::FingerprintMismatch) => self.peers.forget(&node),
            Some(HandoffFailure::PrefillDown | HandoffFailure::PrefillStalled | HandoffFailure::PrefillLost) => {
                self.client.sources.note_failure(&source);
            }
            _ => {}
        }
        Ok(PullEnd { report: HandoffReport { kv_distance, ..end.report }, ..end })
    }

    /// Decides whether a peer's KV may be used.
    async fn examine(
        &self,
        source: &KvSource,
        reached: &ReachedSource,
        local: &LocalKv,
    ) -> Result<AdmittedPeer, HandoffFailure> {
        let PullSettings { cluster_key, policy } = &*self.client.settings;
        let url = source.base();
        let node = RemoteEngine::with_transport(&reached.address, cluster_key, &policy.transport);
        let node = node.map_err(|error| {
            tracing::warn!(url, %error, "no KV is pulled: the transport settings forbid this address");
            match error {
                ClientError::Address(_) => HandoffFailure::AddressRefused,
                ClientError::Setup(_) => HandoffFailure::PrefillDown,
            }
        })?;
        let info = tokio::time::timeout(policy.timeouts.head, node.info()).await;
        let info = info.map_err(|_| HandoffFailure::PrefillStalled)?;
        let info = info.map_err(|error| {
            tracing::warn!(url, %error, "no KV is pulled: the prefill node did not describe its model");
            failure_of(&error)
        })?;
        let Some(peer) = info.kv else {
            tracing::warn!(url, "no KV is pulled: the KV of the prefill node's model cannot be handed over");
            return Err(HandoffFailure::FingerprintMismatch);
        };
        let losses = CodecLoss::usable(&peer.losses);
        match (compare(&local.identity, &peer), policy.max_canary_distance) {
            (Match::Exact, _) => Ok(AdmittedPeer { fingerprint: peer.fingerprint, kv_distance: None, losses }),
            (Match::Impossible(why), _) => {
                tracing::warn!(url, %why, "no KV is pulled: the prefill node's KV does not fit this model");
                Err(HandoffFailure::FingerprintMismatch)
            }
            (Match::OtherWeights, None) => {
                tracing::warn!(
                    url,
                    "no KV is pulled: the prefill node has other weights; --max-canary-distance allows it"
                );
                Err(HandoffFailure::FingerprintMismatch)
            }
            (Match::OtherWeights, Some(limit)) => {
                let distances = self.canary_distances(source, reached, peer.fingerprint, local).await?;
                let distance = distances.worst();
                let admitted = distance <= limit;
                let (rows, states) = (Farthest(&distances.rows), Farthest(&distances.states));
                tracing::warn!(
                    url,
                    distance,
                    limit,
                    admitted,
                    %rows,
                    %states,
                    "the prefill node has other weights; the canary was compared"
                );
                let fingerprint = peer.fingerprint;
                let peer = AdmittedPeer { fingerprint, kv_distance: Some(distance), losses };
                if admitted { Ok(peer) } else { Err(HandoffFailure::CanaryFailed) }
            }
        }
    }

    /// Pulls the KV of the canary's tokens from the peer. Returns its distances from this engine's: none if they cannot be
    /// compared.
    async fn canary_distances(
        &self,
        source: &KvSource,
        reached: &ReachedSource,
        peer: Fingerprint,
        local: &LocalKv,
    ) -> Result<KvDistances, HandoffFailure> {
        let url = source.base();
        let order = PullOrder {
            source: KvSource::at(url),
            tokens: local.identity.canary.clone(),
            images: None,
            start: 0,
            checkpoints: Vec::new(),
            cache_scope: CacheScope::SHARED,
            ephemeral: true,
            gives_way: false,
            held_only: false,
            lossless: true,
            placement: Arc::new(|span, layout| Contiguous.place(span, layout)),
            buffers: ChunkBuffers::default(),
        };
        let theirs = Mutex::new(ComputedKv::default());
        let keep = |event: PullEvent| {
            let mut theirs = theirs.lock().unwrap_or_else(PoisonError::into_inner);
            match event {
                PullEvent::Chunk(kv) => theirs.chunks.push(kv.into_chunk()),
                PullEvent::State(state) => theirs.states = Some(state.into_part()),
                PullEvent::Begun | PullEvent::End(_) => {}
            }
            std::future::ready(())
        };
        let codecs = PeerCodecs { rows: &[Codec::None], states: &[] };
        let peer = PrefillPeer { http: &reached.http, url, node: &source.node(), fingerprint: peer, codecs };
        let end = self.client.receive(peer, local, order, keep).await;
        if let Some(failure) = end.report.failure {
            return Err(failure);
        }
        let theirs = theirs.into_inner().unwrap_or_else(PoisonError::into_inner);
        let distances = canary::compare(&local.identity.layout, &local.layers, &local.canary, &theirs);
        Ok(distances.unwrap_or_default())
    }
}
