//! A transfer of a model to this machine, and how far it is. There is one at a time: two would share the disk and the network,
//! and both would come later.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_fetch::progress::DownloadProgress;
use baton_schemas::EngineError;
use baton_schemas::machine_models::{ModelTransfer, TransferState};
use tokio_util::sync::CancellationToken;

/// The latest transfer.
#[derive(Default)]
pub(super) struct TransferSlot(Mutex<Option<Arc<RunningTransfer>>>);

impl TransferSlot {
    /// Begins a transfer. Errors: another one runs.
    pub(super) fn begin(&self, model: &str, is_copy: bool) -> Result<Arc<RunningTransfer>, EngineError> {
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = latest.as_ref().map(|transfer| transfer.shown());
        if let Some(running) = before.as_ref().filter(|before| !before.state.is_over()) {
            let reason = format!("{} is on its way to this machine, and transfers come one at a time", running.model);
            return Err(EngineError::Unavailable { reason });
        }
        let shown = ModelTransfer {
            number: before.map_or(1, |before| before.number + 1),
            model: model.to_owned(),
            is_copy,
            state: TransferState::Preparing,
            done_bytes: 0,
            total_bytes: None,
            problem: None,
        };
        let transfer = Arc::new(RunningTransfer { shown: Mutex::new(shown), cancelled: CancellationToken::new() });
        *latest = Some(Arc::clone(&transfer));
        Ok(transfer)
    }

    /// Ends the transfer of this number, and no later one.
    pub(super) fn cancel(&self, number: u64) {
        if let Some(transfer) = self.latest().filter(|transfer| transfer.shown().number == number) {
            transfer.cancel();
        }
    }

    pub(super) fn latest(&self) -> Option<Arc<RunningTransfer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// One transfer.
pub(super) struct RunningTransfer {
    shown: Mutex<ModelTransfer>,
    cancelled: CancellationToken,
}

impl RunningTransfer {
    pub(super) fn shown(&self) -> ModelTransfer {
        self.lock().clone()
    }

    /// Runs `work` unless the transfer is cancelled, and notes how it ends: with the reason why a model that has come cannot be served,
    /// if there is one. Dropping `work` stops it.
    pub(super) async fn run(&self, work: impl Future<Output = Result<Option<String>, String>>) {
        // `cancel` has noted the end.
        let Some(ended) = self.cancelled.run_until_cancelled(work).await else { return };
        let mut shown = self.lock();
        let (state, problem) = match ended {
            Ok(not_served) => (TransferState::Done, not_served),
            Err(problem) => (TransferState::Failed, Some(problem)),
        };
        tracing::info!(model = shown.model, is_copy = shown.is_copy, problem, "the transfer of a model has ended");
        (shown.state, shown.problem) = (state, problem);
        if state == TransferState::Done {
            shown.done_bytes = shown.total_bytes.unwrap_or(shown.done_bytes);
        }
    }

    /// Ends the transfer. What has arrived stays.
    pub(super) fn cancel(&self) {
        let mut shown = self.lock();
        if !shown.state.is_over() {
            shown.state = TransferState::Cancelled;
            tracing::info!(model = shown.model, "the transfer of a model was cancelled");
        }
        drop(shown);
        self.cancelled.cancel();
    }

    fn lock(&self) -> MutexGuard<'_, ModelTransfer> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DownloadProgress for RunningTransfer {
    fn started(&self, _name: &str, total_bytes: Option<u64>) {
        let mut shown = self.lock();
        if !shown.state.is_over() {
            (shown.state, shown.total_bytes) = (TransferState::Receiving, total_bytes);
        }
    }

    fn reached(&self, done_bytes: u64) {
        self.lock().done_bytes = done_bytes;
    }

    fn finished(&self) {}

    fn notice(&self, line: &str) {
        tracing::info!("{line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_transfer_runs_at_a_time_and_a_cancelled_one_ends_at_once() {
        let transfers = TransferSlot::default();
        let first = transfers.begin("a", true).unwrap();
        assert!(matches!(transfers.begin("b", true), Err(EngineError::Unavailable { .. })));
        first.started("a", Some(10));
        first.reached(4);
        first.cancel();
        first.run(std::future::pending()).await;
        let shown = transfers.latest().unwrap().shown();
        assert_eq!((shown.number, shown.state, shown.done_bytes), (1, TransferState::Cancelled, 4));
        let second = transfers.begin("b", false).unwrap();
        transfers.cancel(1);
        assert_eq!(second.shown().state, TransferState::Preparing, "who waited for the first one leaves late");
        second.run(async { Err("no".to_owned()) }).await;
        let shown = transfers.latest().unwrap().shown();
        assert_eq!((shown.number, shown.state, shown.problem.as_deref()), (2, TransferState::Failed, Some("no")));
    }
}
