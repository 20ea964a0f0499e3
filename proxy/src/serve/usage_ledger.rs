//! Opens the ledger of everyone's usage where the configuration or the system has a folder for it.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::failure::CommandFailure;
use crate::config::{StartupConfig, state_folder};
use crate::http::SharedAccess;
use crate::usage::{UsageLedger, log_counts};

/// Opens the ledger, and lets each key's budgets begin with what it has spent. Errors: the configured folder cannot be used. Without
/// a configured one, the usage is then kept in memory.
pub(super) async fn open(startup: &StartupConfig, access: &SharedAccess) -> Result<Arc<UsageLedger>, CommandFailure> {
    let configured = startup.state_folder.clone();
    let ledger = tokio::task::spawn_blocking(move || open_in(configured)).await??;
    match ledger.spent().await {
        Ok(spent) => access.load().keys.restore(&spent),
        Err(error) => return Err(CommandFailure(format!("what the keys have used cannot be read: {error}"))),
    }
    let ledger = Arc::new(ledger);
    log_counts(&ledger);
    Ok(ledger)
}

/// The folder for what outlives the process, once [`open`] has made it. `None`: there is none.
pub(super) fn folder(startup: &StartupConfig) -> Option<PathBuf> {
    let configured = startup.state_folder.clone();
    configured.or_else(state_folder::existing).filter(|folder| !folder.as_os_str().is_empty())
}

fn open_in(configured: Option<PathBuf>) -> Result<UsageLedger, CommandFailure> {
    let in_memory = || UsageLedger::open(None).map_err(|error| CommandFailure(error.to_string()));
    match configured {
        Some(folder) if folder.as_os_str().is_empty() => in_memory(),
        Some(folder) => {
            make(&folder)?;
            UsageLedger::open(Some(&folder)).map_err(|error| CommandFailure(error.to_string()))
        }
        None => match state_folder::existing() {
            Some(folder) => UsageLedger::open(Some(&folder)).or_else(|error| {
                tracing::warn!("the usage of keys is forgotten when this process ends: {error}");
                in_memory()
            }),
            None => in_memory(),
        },
    }
}

/// Makes a folder that only its owner reads, if it is missing.
fn make(folder: &Path) -> Result<(), CommandFailure> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(|error| CommandFailure(format!("the state_folder {} cannot be made: {error}", folder.display())))
}
