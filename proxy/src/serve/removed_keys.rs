//! An API key that is removed takes its KV with it: from the disks of this endpoint's own engines, and from the memory and the
//! disks of all engines that run.

use std::path::Path;
use std::sync::Arc;

use baton_engines::engine_options::StoreSecret;
use baton_schemas::CacheScope;
use baton_store::{StoreKey, keep_scopes};

use super::failure::CommandFailure;
use super::store_secret;
use crate::config::ServeConfig;
use crate::targets::nodes::Node;

/// Lets the engines that run forget the KV of removed keys. One that does not answer is named in the log.
pub(super) async fn forget(mut nodes: Vec<Arc<Node>>, removed: Vec<CacheScope>) {
    if removed.is_empty() {
        return;
    }
    nodes.retain(|node| node.health.usable().is_some());
    nodes.sort_by_key(Arc::as_ptr);
    nodes.dedup_by_key(|node| Arc::as_ptr(node));
    let removed: Arc<[CacheScope]> = removed.into();
    let calls = nodes.into_iter().map(|node| {
        let removed = Arc::clone(&removed);
        async move {
            if let Err(error) = node.engine.forget(&removed).await {
                tracing::warn!(node = %node.name, %error, "a node cannot forget the KV of removed API keys");
            }
        }
    });
    futures::future::join_all(calls).await;
}

/// Removes from the disks of own engines what belongs to keys that the configuration has no more. `file` is the configuration's.
/// Errors: the secret of the stores cannot be used. That a folder cannot be used is no reason to end: nothing is kept there then.
pub(super) async fn clear_disks(
    config: &ServeConfig,
    file: Option<&Path>,
    scopes: Vec<CacheScope>,
) -> Result<(), CommandFailure> {
    let disks = config.store_folders();
    if disks.is_empty() {
        return Ok(());
    }
    let StoreSecret(secret) = store_secret::made(&config.startup.transport)?;
    let key = StoreKey::derive(secret.as_bytes());
    // The same after a restart. Endpoints with other files have other keys.
    let endpoint = match file.map(std::path::absolute) {
        Some(Ok(path)) => path.to_string_lossy().into_owned(),
        _ => config.startup.listen.clone(),
    };
    let clear = move || {
        for disk in disks {
            match keep_scopes(&disk, &key, &endpoint, &scopes) {
                Ok(cleared) if cleared.n_files > 0 => {
                    let n_files = cleared.n_files;
                    tracing::info!(disk = %disk.display(), n_files, "the KV of removed API keys was removed");
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(disk = %disk.display(), %error, "the KV of removed API keys cannot be removed");
                }
            }
        }
    };
    Ok(tokio::task::spawn_blocking(clear).await?)
}
