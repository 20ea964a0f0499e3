//! The models folder of this machine: what is in it, what is on its way into it, and orders that change it. Endpoints and nodes
//! have one each; several processes of a machine may share the folder.

mod shared_look;
mod transfer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use baton_fetch::cache::free_bytes;
use baton_fetch::peer::{self, ModelPeer};
use baton_fetch::progress::Silent;
use baton_fetch::stored::{self, CachedModel};
use baton_fetch::{ModelError, ModelSpec, PullOptions, cache, pull_spec, quantization_in};
use baton_link::handoff::{HttpPuller, PullPolicy};
use baton_link::kv_streams;
use baton_link::no_sleep::StayAwake;
use baton_link::node::NodeRequests;
use baton_link::remote::ModelSource;
use baton_link::transport::Transport;
use baton_schemas::EngineError;
use baton_schemas::handoff::{HandoffFailure, KvSource};
use baton_schemas::machine_models::{FileOnDisk, MachineModels, ModelOnDisk, ModelOrder, ModelTransfer, OrderTaken};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};

use self::shared_look::SharedLook;
use self::transfer::{RunningTransfer, TransferSlot};
use super::failure::CommandFailure;

/// The pause between two questions whether the other machine has computed its checksums.
const OFFER_PAUSE: Duration = Duration::from_secs(1);

/// How long another machine may compute checksums: a terabyte at half the speed of one core.
const OFFER_DEADLINE: Duration = Duration::from_secs(2 * 60 * 60);

/// Failed questions in a row after which a copy ends.
const MAX_FAILED_OFFERS: u32 = 5;

/// The slowest copy that is waited for: its time is bounded, however little a machine sends.
const SLOWEST: u64 = 256 << 10;

/// What every copy may take.
const SHORTEST_DEADLINE: Duration = Duration::from_secs(10 * 60);

/// The models folder of this machine. Cheap to clone.
#[derive(Clone)]
pub struct ModelsFolder(Arc<FolderState>);

struct FolderState {
    pull: PullOptions,
    /// Bytes of memory that models may take here.
    memory_bytes: u64,
    /// The way to other machines; `None` without a cluster key.
    sources: Option<HttpPuller>,
    transfers: TransferSlot,
    listed: SharedLook<Vec<ModelOnDisk>>,
    /// One model's checksums are computed at a time.
    checksums: Arc<Semaphore>,
    /// A transfer to this machine is one, so a node's machine is not sent to sleep meanwhile.
    requests: NodeRequests,
}

impl ModelsFolder {
    /// The folder that the environment names. `cluster_key`: for copies from other machines. `requests`: those of the process, of which
    /// transfers are some.
    pub fn new(
        memory_bytes: u64,
        cluster_key: Option<&str>,
        transport: &Transport,
        requests: &NodeRequests,
    ) -> Result<ModelsFolder, CommandFailure> {
        let policy = || PullPolicy { transport: transport.clone(), ..PullPolicy::default() };
        let sources = cluster_key.map(|key| HttpPuller::new(key, policy())).transpose()?;
        let pull = PullOptions::from_env(cache::default_folder()?, Arc::new(Silent));
        let pull = PullOptions { pause_after: kv_streams::pause_after, ..pull };
        Ok(ModelsFolder(Arc::new(FolderState {
            pull,
            memory_bytes,
            sources,
            transfers: TransferSlot::default(),
            listed: SharedLook::default(),
            checksums: Arc::new(Semaphore::new(1)),
            requests: requests.clone(),
        })))
    }

    /// What is in the folder, and the latest transfer.
    pub async fn report(&self) -> MachineModels {
        let folder = self.clone();
        let look = async move {
            let list = move || {
                let models = stored::list(&folder.0.pull.cache_dir);
                models.into_iter().map(|model| folder.described(model)).collect()
            };
            tokio::task::spawn_blocking(list).await.unwrap_or_default()
        };
        MachineModels {
            models: self.0.listed.get(look).await,
            free_bytes: free_bytes(&self.0.pull.cache_dir),
            memory_bytes: Some(self.0.memory_bytes).filter(|bytes| *bytes < u64::MAX),
            transfer: self.transfer(),
        }
    }

    /// The latest transfer.
    pub fn transfer(&self) -> Option<ModelTransfer> {
        self.0.transfers.latest().map(|transfer| transfer.shown())
    }

    /// Ends the transfer of this number if it still runs, and no later one.
    pub fn cancel(&self, number: u64) {
        self.0.transfers.cancel(number);
    }

    /// Describes a model for a machine that wants to copy it. What lacks a checksum gets one in the background.
    pub async fn offer(&self, model: &str) -> Result<ModelOnDisk, EngineError> {
        let found = self.find(model).await?;
        if found.files.iter().any(|file| file.sha256.is_none())
            && let Ok(turn) = Arc::clone(&self.0.checksums).try_acquire_owned()
        {
            let found = found.clone();
            // The machine that asked comes again, and this one must not sleep until then.
            let open = self.0.requests.begin();
            tokio::spawn(async move {
                let _open = (turn, open);
                if let Err(error) = found.with_checksums().await {
                    tracing::warn!(%error, "the checksums of a model cannot be computed");
                }
            });
        }
        Ok(self.described(found))
    }

    /// The path of one file of a model, and its description.
    pub async fn file(&self, model: &str, file: &str) -> Result<(PathBuf, FileOnDisk), EngineError> {
        let found = self.find(model).await?;
        let path = found.path_of(file).map_err(refused)?;
        let described = found.files.into_iter().find(|own| own.path == file);
        Ok((path, described.ok_or_else(|| EngineError::invalid("the model has no such file"))?))
    }

    /// Carries an order out, or begins to. Errors: it is refused.
    pub async fn order(&self, order: ModelOrder) -> Result<OrderTaken, EngineError> {
        self.order_then(order, async { Ok(()) }).await
    }

    /// The same. A transfer that has brought its model ends with `then`, whose error says why the model cannot be used.
    pub async fn order_then(
        &self,
        order: ModelOrder,
        then: impl Future<Output = Result<(), String>> + Send + 'static,
    ) -> Result<OrderTaken, EngineError> {
        match order {
            ModelOrder::Pull { model } => {
                let spec = ModelSpec::named(&model).map_err(refused)?;
                self.begin(&model, false, then, |folder, transfer| {
                    let options = folder.options(transfer);
                    let pull = async move { pull_spec(spec, &options).await.map(drop).map_err(|error| said(&error)) };
                    pull.boxed()
                })
            }
            ModelOrder::Copy { model, from } => {
                let spec = ModelSpec::named(&model).map_err(refused)?;
                let asked = model.clone();
                self.begin(&model, true, then, |folder, transfer| {
                    async move { folder.copy(&spec, &asked, &from, transfer).await }.boxed()
                })
            }
            ModelOrder::Cancel => {
                let running = self.0.transfers.latest().filter(|transfer| !transfer.shown().state.is_over());
                running.ok_or_else(|| EngineError::invalid("nothing is on its way to this machine"))?.cancel();
                Ok(OrderTaken::default())
            }
            ModelOrder::Delete { model } => self.delete(&model).await.map(|()| OrderTaken::default()),
        }
    }

    /// Returns false if it has nothing of a model of this name.
    pub async fn has(&self, model: &str) -> bool {
        let (model, folder) = (model.to_owned(), self.0.pull.cache_dir.clone());
        tokio::task::spawn_blocking(move || stored::has(&model, &folder)).await.unwrap_or(true)
    }

    /// Deletes the files of a model that no process uses.
    pub async fn delete(&self, model: &str) -> Result<(), EngineError> {
        stored::delete(model, &self.0.pull.cache_dir).await.map_err(refused)?;
        tracing::info!(model, "a model was deleted");
        Ok(())
    }

    fn begin(
        &self,
        model: &str,
        is_copy: bool,
        then: impl Future<Output = Result<(), String>> + Send + 'static,
        work: impl FnOnce(ModelsFolder, Arc<RunningTransfer>) -> BoxFuture<'static, Result<(), String>>,
    ) -> Result<OrderTaken, EngineError> {
        let transfer = self.0.transfers.begin(model, is_copy)?;
        let number = transfer.shown().number;
        let work = work(self.clone(), Arc::clone(&transfer));
        let whole = async {
            work.await?;
            Ok(then.await.err())
        };
        let open = (self.0.requests.begin(), StayAwake::begin());
        tokio::spawn(async move {
            transfer.run(whole).await;
            drop(open);
        });
        Ok(OrderTaken { transfer: Some(number) })
    }

    async fn copy(
        &self,
        spec: &ModelSpec,
        model: &str,
        from: &KvSource,
        transfer: Arc<RunningTransfer>,
    ) -> Result<(), String> {
        let sources = self.0.sources.as_ref().ok_or("this machine has no cluster key")?;
        let source = sources.model_source(from).await.map_err(|failure| unreached(failure).to_owned())?;
        let offer = complete_offer(&source, model).await?;
        let files_url = source.files_url().map_err(|error| error.to_string())?;
        let peer = ModelPeer { client: source.client, files_url, key: source.key };
        let options = self.options(transfer);
        let copied = timeout(deadline(&offer), peer::copy(spec, &offer, &peer, &options)).await;
        copied.map_err(|_| "the other machine sends too slowly")?.map(drop).map_err(|error| said(&error))
    }

    fn options(&self, transfer: Arc<RunningTransfer>) -> PullOptions {
        PullOptions { progress: transfer, ..self.0.pull.clone() }
    }

    /// The folder's path.
    pub(super) fn path(&self) -> &Path {
        &self.0.pull.cache_dir
    }

    /// A message for an operator at another machine: a path below the folder loses the folder's.
    pub(super) fn without_its_path(&self, message: &str) -> String {
        message.replace(&format!("{}/", self.path().display()), "")
    }

    /// The model of that name. Errors: it is not here.
    pub(super) async fn find(&self, model: &str) -> Result<CachedModel, EngineError> {
        let (model, cache_dir) = (model.to_owned(), self.0.pull.cache_dir.clone());
        let found = tokio::task::spawn_blocking(move || stored::find(&model, &cache_dir)).await;
        found.map_err(EngineError::internal)?.map_err(refused)
    }

    fn described(&self, model: CachedModel) -> ModelOnDisk {
        let in_use = model.is_in_use();
        let n_bytes = model.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.n_bytes));
        ModelOnDisk {
            quantization: model.files.first().and_then(|file| quantization_in(&file.path)),
            n_bytes,
            fits: n_bytes.saturating_add(n_bytes / 10) <= self.0.memory_bytes,
            in_use,
            name: model.name,
            files: model.files,
        }
    }
}

/// Waits until the other machine has all checksums.
async fn complete_offer(source: &ModelSource, model: &str) -> Result<ModelOnDisk, String> {
    let since = Instant::now();
    let mut n_failed = 0;
    while since.elapsed() < OFFER_DEADLINE {
        match source.offer(model).await {
            Ok(offer) if offer.files.iter().all(|file| file.sha256.is_some()) => return Ok(offer),
            Ok(_) => n_failed = 0,
            Err(error @ (EngineError::InvalidRequest { .. } | EngineError::Unauthorized)) => {
                return Err(error.to_string());
            }
            Err(error) => {
                n_failed += 1;
                if n_failed >= MAX_FAILED_OFFERS {
                    return Err(format!("the other machine does not describe the model: {error}"));
                }
            }
        }
        sleep(OFFER_PAUSE).await;
    }
    Err("the other machine does not compute the checksums in time".to_owned())
}

/// How long a copy may take. The files' sizes are checked against the disk, and what else the other machine says of them is not.
fn deadline(offer: &ModelOnDisk) -> Duration {
    let n_bytes = offer.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.n_bytes));
    SHORTEST_DEADLINE + Duration::from_secs(n_bytes / SLOWEST)
}

fn unreached(failure: HandoffFailure) -> &'static str {
    match failure {
        HandoffFailure::AddressRefused => {
            "the other machine is reached over plain HTTP, which the operator does not allow"
        }
        HandoffFailure::KeyRefused | HandoffFailure::PrefillRefused => {
            "the other machine does not prove the cluster key"
        }
        _ => "the other machine cannot be reached",
    }
}

/// Words for an operator, without paths. The log has the cause.
fn said(error: &ModelError) -> String {
    tracing::warn!(%error, "a model is not transferred");
    error.summary()
}

fn refused(error: ModelError) -> EngineError {
    EngineError::invalid(error.summary())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_copy_is_bounded_by_its_files_whatever_the_other_machine_says_of_them() {
        let offer = |n_bytes, sizes: &[u64]| {
            let file = |n_bytes: &u64| FileOnDisk { path: "a.gguf".to_owned(), n_bytes: *n_bytes, sha256: None };
            let files = sizes.iter().map(file).collect();
            ModelOnDisk { name: String::new(), quantization: None, n_bytes, fits: true, in_use: false, files }
        };
        assert_eq!(deadline(&offer(u64::MAX, &[1])), SHORTEST_DEADLINE);
        let large = deadline(&offer(0, &[1 << 40, 1 << 40]));
        assert_eq!(large, SHORTEST_DEADLINE + Duration::from_secs((1 << 41) / SLOWEST));
        assert!(deadline(&offer(0, &[u64::MAX, 1])) > large);
    }
}
