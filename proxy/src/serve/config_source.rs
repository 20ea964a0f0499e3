//! Where a running endpoint reads its configuration from.

use std::path::PathBuf;
use std::sync::Arc;

use crate::config::{ConfigError, ServeConfig};

/// Where the configuration comes from.
#[derive(Clone)]
pub struct ConfigSource {
    /// The file, which is watched for changes. `None`: there is nothing to reload.
    pub path: Option<PathBuf>,
    /// Reads and checks the file, with the command line's flags over it. Blocks: it opens models' files.
    pub read: Arc<dyn Fn() -> Result<ServeConfig, ConfigError> + Send + Sync>,
}
