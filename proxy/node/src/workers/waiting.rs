//! Waits for workers that cannot be used yet.

use std::time::Duration;

use baton_engines::workers::tunnel::{WorkerFailure, WorkerSource};
use baton_process::parent;
use baton_schemas::node::ChildEvent;

use crate::event::{NodeEvent, Tell};
use crate::failure::NodeFailure;

/// The pause between two attempts to reach a worker.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Calls a worker until it can be used. Says once why it waits, and again when the reason changes.
pub(super) async fn until_usable<T>(
    source: &WorkerSource,
    tell: Tell,
    call: impl AsyncFn() -> Result<T, WorkerFailure>,
) -> Result<T, NodeFailure> {
    let mut said = String::new();
    loop {
        match call().await {
            Ok(answer) => return Ok(answer),
            Err(failure @ (WorkerFailure::Address(_) | WorkerFailure::Client(_) | WorkerFailure::Port(_))) => {
                return Err(NodeFailure::setup(failure));
            }
            Err(failure) => {
                let reason = failure.to_string();
                if reason != said {
                    said.clone_from(&reason);
                    // A process with workers has a parent: an endpoint, or the keeper of its node.
                    parent::tell(&ChildEvent::Waits {
                        summary: format!("it waits for a worker: {}", failure.summary()),
                    });
                    tell(NodeEvent::WaitsForWorker { worker: source.name().to_owned(), reason });
                }
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }
}
