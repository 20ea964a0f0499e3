//! The start of an endpoint: the first engine that is ready, and short waits for nodes and upstreams.

use std::sync::Arc;
use std::time::Duration;

use baton_schemas::node::NodeInfo;
use futures::future::BoxFuture;

use super::failure::CommandFailure;
use crate::targets::models;
use crate::targets::nodes::Node;
use crate::targets::upstreams::{UpstreamHealth, UpstreamPool};

/// How long the start waits for nodes and upstreams.
const ANSWER_DEADLINE: Duration = Duration::from_secs(2);

/// The first engine that is ready, or why none will be. `None`: only upstreams serve, so there is no engine to wait for.
pub(super) type FirstStart = BoxFuture<'static, Result<Option<Arc<NodeInfo>>, CommandFailure>>;

/// Gives nodes a moment to answer, so that the first request can use them. A late node is used once it has answered.
pub(super) async fn wait_for_nodes(nodes: impl Iterator<Item = &Arc<Node>>) {
    let answers = nodes.map(|node| async {
        let _ = node.ready().await;
    });
    if tokio::time::timeout(ANSWER_DEADLINE, futures::future::join_all(answers)).await.is_err() {
        tracing::warn!("a node has not answered yet; requests are served without it until it does");
    }
    // The models that nodes have reported are served after one more look at them.
    tokio::time::sleep(2 * models::REPORT_INTERVAL).await;
}

/// Gives upstreams a moment to list their models.
pub(super) async fn wait_for_upstreams(upstreams: &UpstreamPool) {
    let answers = async {
        while upstreams.servers.iter().any(|server| server.health() == UpstreamHealth::Unknown) {
            tokio::time::sleep(models::REPORT_INTERVAL).await;
        }
    };
    // An upstream that is late is used later; the log names it.
    let _ = tokio::time::timeout(ANSWER_DEADLINE, answers).await;
}
