//! Where a running endpoint reads its configuration from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::{ConfigError, ServeConfig};

/// Where the configuration comes from.
#[derive(Clone)]
pub struct ConfigSource {
    /// The file, which is watched for changes. `None`: there is nothing to reload.
    pub path: Option<PathBuf>,
    /// Reads and checks the file, or the one that is given instead, with the command line's flags over it. Blocks: it opens models' files.
    pub read: ReadConfig,
}

/// Reads and checks a configuration.
pub type ReadConfig = Arc<dyn Fn(Option<&Path>) -> Result<ServeConfig, ConfigError> + Send + Sync>;

impl ConfigSource {
    /// Reads the file for a reload, or another one instead. `needs_key`: the endpoint has keys. Errors: a mistake in the file, or it lost what
    /// no reload takes away.
    pub(super) async fn read_again(
        &self,
        instead: Option<PathBuf>,
        needs_key: bool,
    ) -> Result<ServeConfig, ConfigError> {
        if let Some(path) = instead.as_ref().or(self.path.as_ref())
            && tokio::fs::metadata(path).await.is_ok_and(|metadata| metadata.len() == 0)
        {
            // It would be valid, and end all models and upstreams.
            let problem = "the file is empty. Its disk may be full. Restart the endpoint if nothing is configured";
            return Err(ConfigError::Later(problem.to_owned()));
        }
        let read = Arc::clone(&self.read);
        // Models' files are opened.
        let new = tokio::task::spawn_blocking(move || read(instead.as_deref())).await;
        let new = new.map_err(|panic| ConfigError::Later(panic.to_string()))??;
        // A truncated file can still be valid. Without its keys it would open the endpoint to everybody.
        if needs_key && !new.access.needs_key() {
            let problem = "the file has no keys any more. Restart the endpoint if everybody may use it";
            return Err(ConfigError::Later(problem.to_owned()));
        }
        Ok(new)
    }
}
