//! Lets draft nodes follow sequences. They are reached by the rules for KV, and all sequences of one share a connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_schemas::draft::{DraftRequest, DrafterLoss};
use baton_schemas::handoff::KvSource;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::receive::PullClient;
use crate::drafts::{DraftBoard, RemoteDrafts, loss_of};
use crate::engine::Engine;
use crate::remote::{RemoteDraftStream, RemoteEngine};

/// The deadline of finding the draft node and of its answer. A later one drafts nothing that is still of use.
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);

/// The most draft nodes that are remembered; more than a cluster has.
const MAX_NODES: usize = 64;

/// The clients of draft nodes, by [`KvSource::node`].
#[derive(Default)]
pub(super) struct DraftClients(Mutex<HashMap<String, Arc<RemoteEngine>>>);

impl DraftClients {
    /// The client of a draft node. Errors: the key must not be sent there, or nothing answers.
    pub(super) async fn client(&self, source: &KvSource, by: &PullClient) -> Result<Arc<RemoteEngine>, DrafterLoss> {
        let PullClient { settings, sources, .. } = by;
        let refused = |_| DrafterLoss::Refused;
        settings.check_address(source.base(), "the draft node is not used").map_err(refused)?;
        let reached = sources.reach(source).await.map_err(|_| DrafterLoss::Lost)?;
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let node = source.node();
        if let Some(client) = known.get(&node) {
            return Ok(Arc::clone(client));
        }
        let client = RemoteEngine::with_transport(&reached.address, &settings.cluster_key, &settings.policy.transport);
        let client = client.map_err(|error| {
            tracing::warn!(url = source.base(), %error, "no drafts: there is no client for the draft node");
            DrafterLoss::Refused
        })?;
        if known.len() >= MAX_NODES {
            known.clear();
        }
        let client = Arc::new(client);
        known.insert(node, Arc::clone(&client));
        Ok(client)
    }
}

/// Lets the node that `reached` finds follow a sequence, in a task of the current runtime.
pub(super) fn follow(
    request: DraftRequest,
    n_vocab: u32,
    reached: impl Future<Output = Result<Arc<RemoteEngine>, DrafterLoss>> + Send + 'static,
) -> RemoteDrafts {
    let board = Arc::new(DraftBoard::new(request.tokens.len(), n_vocab));
    let told = Arc::clone(&board);
    let task = tokio::spawn(async move {
        let opened = timeout(OPEN_TIMEOUT, begin(reached, request, &told)).await;
        match opened.unwrap_or(Err(DrafterLoss::Late)) {
            Ok(stream) => tell(&stream, &told).await,
            Err(loss) => told.end(loss),
        }
    });
    RemoteDrafts::kept_by(board, AbortOnDropHandle::new(task))
}

async fn begin(
    reached: impl Future<Output = Result<Arc<RemoteEngine>, DrafterLoss>>,
    request: DraftRequest,
    board: &Arc<DraftBoard>,
) -> Result<RemoteDraftStream, DrafterLoss> {
    let node = reached.await?;
    let info = node.info().await.map_err(|error| loss_of(&error))?;
    if !info.role.drafts() {
        return Err(DrafterLoss::Refused);
    }
    if info.fingerprint.is_none_or(|theirs| theirs.vocabulary != request.vocabulary) {
        return Err(DrafterLoss::OtherVocabulary);
    }
    node.drafts(request, Arc::clone(board)).await.map_err(|error| {
        tracing::info!(%error, "a draft node takes no sequence, which goes on without drafts");
        loss_of(&error)
    })
}

/// Sends what is to be told, until the drafts end.
async fn tell(stream: &RemoteDraftStream, board: &DraftBoard) {
    while let Some((at, tokens)) = board.to_tell().await {
        stream.tell(at, &tokens);
    }
}
