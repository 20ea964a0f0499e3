//! Where things are on the machine that is set up.

use std::path::PathBuf;

use baton_pairing::ClusterFolder;
use baton_proxy::serve::CommandFailure;

use super::boot::{self, BootService};

/// Where this machine keeps what is set up.
pub(super) struct SetupPlace {
    /// The program that the service starts.
    pub(super) program: PathBuf,
    /// `~/.config/baton`.
    pub(super) config: PathBuf,
    /// The pairing.
    pub(super) cluster: ClusterFolder,
    /// What starts services at boot; `None` if it is none that Baton knows.
    pub(super) boot: Option<BootService>,
}

impl SetupPlace {
    /// Reads the environment, so call it at start-up.
    pub(super) fn of_user() -> Result<SetupPlace, CommandFailure> {
        let cluster = ClusterFolder::of_user()?;
        let home = std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute());
        let home = home.ok_or_else(|| CommandFailure("HOME is not set, so there is no place for the setup".into()))?;
        let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
        let config = config.unwrap_or_else(|| home.join(".config"));
        let boot = BootService::of_this_machine(&home, &config);
        Ok(SetupPlace { program: boot::program()?, config: config.join("baton"), cluster, boot })
    }
}
