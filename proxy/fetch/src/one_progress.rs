//! Shows the progress of several files, which together are one model, as that of one file.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::progress::DownloadProgress;

/// See the module. Files are fetched one after another.
pub(super) struct OneProgress<'p> {
    shown: &'p dyn DownloadProgress,
    name: String,
    /// `None` if the size of a file is unknown.
    total_bytes: Option<u64>,
    state: Mutex<OneProgressState>,
}

struct OneProgressState {
    is_started: bool,
    /// Files that are not complete yet.
    n_left: usize,
    /// Bytes of complete files.
    complete_bytes: u64,
    /// Bytes of the file that is being fetched.
    done_bytes: u64,
    /// Its size.
    file_bytes: Option<u64>,
}

impl<'p> OneProgress<'p> {
    /// The progress of files of these sizes, bytes, is shown as that of one file called `name`.
    pub(super) fn of(name: String, sizes: &[Option<u64>], shown: &'p dyn DownloadProgress) -> Self {
        let total_bytes = sizes.iter().try_fold(0_u64, |sum, size| sum.checked_add((*size)?));
        let state = OneProgressState {
            is_started: false,
            n_left: sizes.len(),
            complete_bytes: 0,
            done_bytes: 0,
            file_bytes: None,
        };
        OneProgress { shown, name, total_bytes, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, OneProgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DownloadProgress for OneProgress<'_> {
    fn started(&self, _name: &str, total_bytes: Option<u64>) {
        let mut state = self.state();
        if !state.is_started {
            self.shown.started(&self.name, self.total_bytes);
        }
        (state.is_started, state.file_bytes) = (true, total_bytes);
    }

    fn reached(&self, done_bytes: u64) {
        let mut state = self.state();
        state.done_bytes = done_bytes;
        self.shown.reached(state.complete_bytes.saturating_add(done_bytes));
    }

    fn finished(&self) {
        let mut state = self.state();
        // A file that an earlier pull has received is finished without another byte.
        let n_bytes = state.file_bytes.unwrap_or(state.done_bytes);
        state.complete_bytes = state.complete_bytes.saturating_add(n_bytes);
        state.done_bytes = 0;
        state.n_left = state.n_left.saturating_sub(1);
        self.shown.reached(state.complete_bytes);
        if state.n_left == 0 {
            self.shown.finished();
        }
    }

    fn notice(&self, line: &str) {
        self.shown.notice(line);
    }
}
