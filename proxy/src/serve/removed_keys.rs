//! An API key that is removed takes its KV with it: from the disks of this endpoint's own engines, and from the memory and the
//! disks of all engines that run.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use baton_engines::engine_options::StoreSecret;
use baton_schemas::CacheScope;
use baton_store::{StoreKey, keep_scopes};

use super::failure::CommandFailure;
use super::store_secret;
use crate::config::ServeConfig;
use crate::targets::models::{ModelPool, ServedModel};
use crate::targets::nodes::{Node, NodeState};

/// When engines are told once more, each time after the one before: by then what was sent to them before has arrived, and some
/// that did not answer are back.
const AGAIN_AFTER: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(10), Duration::from_secs(60), Duration::from_secs(600)];

/// How long a start or a reload waits for the disks. What takes longer goes on beside them.
const CLEAR_WAIT: Duration = Duration::from_secs(10);

/// Lets all engines of these models, and those of `known`, forget the KV of removed keys: now, and again later unless a key has come
/// back. Returns after the first time.
pub(super) async fn forget(pool: &Arc<ModelPool>, known: Vec<Arc<Node>>, mut removed: Vec<CacheScope>) {
    if removed.is_empty() {
        return;
    }
    let mut told = forget_now(nodes_of(&pool.models(), &known), &removed).await;
    let pool = Arc::downgrade(pool);
    tokio::spawn(async move {
        for pause in AGAIN_AFTER {
            tokio::time::sleep(pause).await;
            let Some(pool) = pool.upgrade() else { return };
            removed.retain(|scope| pool.removed_keys.contains(*scope));
            if removed.is_empty() {
                return;
            }
            told.extend(forget_now(nodes_of(&pool.models(), &known), &removed).await);
        }
        let Some(pool) = pool.upgrade() else { return };
        let nodes = nodes_of(&pool.models(), &known);
        let untold = untold(&nodes, &told);
        if !untold.is_empty() {
            let nodes = untold.join(", ");
            tracing::warn!(nodes, "nodes that did not answer may still have the KV of removed API keys");
        }
    });
}

/// The names of nodes that have never answered, but may run.
fn untold<'n>(nodes: &'n [Arc<Node>], told: &[Arc<Node>]) -> Vec<&'n str> {
    let is_untold = |node: &&Arc<Node>| {
        node.health.state() != NodeState::Unloaded && !told.iter().any(|told| Arc::ptr_eq(told, node))
    };
    nodes.iter().filter(is_untold).map(|node| &*node.name).collect()
}

/// Each node once.
fn nodes_of(models: &[Arc<ServedModel>], known: &[Arc<Node>]) -> Vec<Arc<Node>> {
    let of_models = models.iter().flat_map(|model| model.decode.iter().chain(&model.prefill));
    let mut nodes: Vec<Arc<Node>> = of_models.chain(known).cloned().collect();
    nodes.sort_by_key(Arc::as_ptr);
    nodes.dedup_by_key(|node| Arc::as_ptr(node));
    nodes
}

/// Returns the nodes that have answered. One that fails is named in the log.
async fn forget_now(mut nodes: Vec<Arc<Node>>, removed: &[CacheScope]) -> Vec<Arc<Node>> {
    nodes.retain(|node| node.health.usable().is_some());
    let calls = nodes.into_iter().map(|node| async move {
        match node.engine.forget(removed).await {
            Ok(()) => Some(node),
            Err(error) => {
                tracing::warn!(node = %node.name, %error, "a node cannot forget the KV of removed API keys");
                None
            }
        }
    });
    futures::future::join_all(calls).await.into_iter().flatten().collect()
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
    let Some(StoreSecret(secret)) = store_secret::made(&config.startup.transport)? else { return Ok(()) };
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
                    tracing::warn!(disk = %disk.display(), %error, "the KV store cannot be written; KV of removed API keys may stay there");
                }
            }
        }
    };
    match tokio::time::timeout(CLEAR_WAIT, tokio::task::spawn_blocking(clear)).await {
        Ok(cleared) => cleared?,
        Err(_) => tracing::warn!("a disk is slow; the KV of removed API keys is removed from it later"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, OnceLock};

    use async_trait::async_trait;
    use baton_engines::sim::{SimConfig, SimEngine};
    use baton_link::Engine;
    use baton_link::wrapper::EngineWrapper;
    use baton_schemas::EngineError;

    use super::*;
    use crate::targets::nodes::Health;

    /// Notes what it is to forget, and does not answer the first call.
    struct Forgetful {
        sim: SimEngine,
        told: Arc<Mutex<Vec<Vec<CacheScope>>>>,
    }

    #[async_trait]
    impl EngineWrapper for Forgetful {
        fn inner(&self) -> &dyn Engine {
            &self.sim
        }

        async fn forget(&self, scopes: &[CacheScope]) -> Result<(), EngineError> {
            let mut told = self.told.lock().unwrap();
            told.push(scopes.to_vec());
            if told.len() == 1 { Err(EngineError::lost("not now")) } else { Ok(()) }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn engines_are_told_again_until_nothing_of_a_removed_key_can_be_on_its_way() {
        let told: Arc<Mutex<Vec<Vec<CacheScope>>>> = Arc::default();
        let engine = Forgetful { sim: SimEngine::new(SimConfig::default()), told: Arc::clone(&told) };
        let health = Health::new("it");
        health.note_answer(Arc::new(Engine::info(&engine).await.unwrap()));
        let node = Node::new("it".into(), None, Arc::new(engine), health);
        let model = ServedModel::new(OnceLock::from("m".to_owned()), Vec::new(), vec![Arc::clone(&node)], Vec::new());
        let pool = Arc::new(ModelPool::of(vec![Arc::new(model)]));
        let (one, two) = (CacheScope(1), CacheScope(2));
        let note = |removed: &[CacheScope], valid: &[CacheScope]| {
            pool.removed_keys.note(removed, valid);
        };
        note(&[one, two], &[]);
        forget(&pool, vec![Arc::clone(&node)], vec![one, two]).await;
        // No model is served any more.
        pool.replace_nodes(&[], &[], || unreachable!(), Arc::new);
        assert!(pool.models().is_empty());
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(*told.lock().unwrap(), [[one, two], [one, two]], "a node of two lists is told once each time");
        // A key comes back, and may keep what it has now.
        note(&[], &[one]);
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert_eq!(told.lock().unwrap()[2..], [[two], [two], [two]]);
        assert_eq!(untold(&[Arc::clone(&node)], &[]), ["it"], "a node that never answered is named");
        assert!(untold(&[Arc::clone(&node)], &[node]).is_empty());
    }
}
