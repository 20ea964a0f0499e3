//! The secret of KV stores on disk, from which their keys and the scopes of API keys are derived.
//!
//! With a cluster key it follows from that. Otherwise it is a random one in a file of mode 600 beside the pairing's folder,
//! and not in the store's: who takes the store's disk away has sealed files alone.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use baton_engines::engine_options::{StoreSecret, WrittenOptions};
use baton_pairing::ClusterFolder;
use baton_schemas::node::KEY_VARIABLE;
use rustix::fs::{Access, access};

use super::failure::CommandFailure;
use crate::config::transport_args::TransportArgs;
use crate::config::{ServeConfig, StartupConfig};

const FILE: &str = "kv-store.key";

/// Characters of a secret.
const N_CHARS: usize = 64;

/// The secret for an engine with these options. `None`: they name no disk, or as of [`made`]. Errors: the pairing is damaged.
pub fn for_engine(engine: &WrittenOptions, transport: &TransportArgs) -> Result<Option<StoreSecret>, CommandFailure> {
    let has_disk = engine.kv_store.as_ref().is_some_and(|store| store.disk.is_some());
    if has_disk { made(transport) } else { Ok(None) }
}

/// The key of the scopes of API keys. It is the same after a restart wherever a store on disk can be meant: of this endpoint,
/// or of a node with its cluster key. Otherwise none is kept.
pub fn scope_key(config: &ServeConfig) -> Result<Option<[u8; 32]>, CommandFailure> {
    let StartupConfig { transport, engine, .. } = &config.startup;
    let own = config.models.iter().map(|model| &model.engine).chain([engine]);
    let secrets = own.map(|engine| for_engine(engine, transport)).collect::<Result<Vec<_>, _>>()?;
    let secret = match secrets.into_iter().flatten().next() {
        Some(secret) => Some(secret),
        None => of_cluster(transport)?,
    };
    Ok(secret.map(|StoreSecret(secret)| blake3::derive_key("baton 2026-11 scopes of API keys", secret.as_bytes())))
}

/// The secret, which is made if there is none yet. `None`: its file is damaged or cannot be written, as the log says once. A cache is no
/// reason to end. Errors: the pairing is damaged.
pub fn made(transport: &TransportArgs) -> Result<Option<StoreSecret>, CommandFailure> {
    // Scopes that were made without it are found by no later start.
    static UNUSABLE: OnceLock<()> = OnceLock::new();
    if let Some(secret) = of_cluster(transport)? {
        return Ok(Some(secret));
    }
    if UNUSABLE.get().is_some() {
        return Ok(None);
    }
    let made = file().and_then(|path| read_or_make(&path));
    if let Err(CommandFailure(error)) = &made {
        UNUSABLE.get_or_init(|| tracing::error!("{error}; until the next start, KV is kept in memory alone"));
    }
    Ok(made.ok())
}

/// Finds why [`made`] would have no secret. Changes nothing.
pub fn check(transport: &TransportArgs) -> Result<(), CommandFailure> {
    if found(transport)?.is_some() {
        return Ok(());
    }
    let path = file()?;
    check_makable(&path).map_err(|error| unmakable(&path, &error))
}

/// Finds why a file or a folder that is not there cannot be made. Changes nothing.
pub(super) fn check_makable(path: &Path) -> io::Result<()> {
    let there = path.ancestors().skip(1).find(|folder| folder.exists()).unwrap_or(Path::new("/"));
    match there.is_dir() {
        true => access(there, Access::WRITE_OK | Access::EXEC_OK).map_err(io::Error::from),
        false => Err(ErrorKind::NotADirectory.into()),
    }
}

fn read_or_make(path: &Path) -> Result<StoreSecret, CommandFailure> {
    match read(path) {
        Err(error) if is_absent(&error) => make(path).map_err(|error| unmakable(path, &error))?,
        known => return known.map_err(|error| unusable(path, &error)),
    }
    read(path).map_err(|error| unusable(path, &error))
}

/// Returns true if there is no file: its folder may be something else.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

fn unusable(path: &Path, error: &io::Error) -> CommandFailure {
    CommandFailure(format!("the key of the KV store, {}, cannot be used: {error}", path.display()))
}

fn unmakable(path: &Path, error: &io::Error) -> CommandFailure {
    let path = path.display();
    CommandFailure(format!("the key of the KV store cannot be kept in {path}: {error}. Or set {KEY_VARIABLE}"))
}

/// The secret, if there is one. Errors: the pairing or the file is damaged.
pub fn found(transport: &TransportArgs) -> Result<Option<StoreSecret>, CommandFailure> {
    if let Some(secret) = of_cluster(transport)? {
        return Ok(Some(secret));
    }
    let Ok(path) = file() else { return Ok(None) };
    match read(&path) {
        Ok(secret) => Ok(Some(secret)),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(unusable(&path, &error)),
    }
}

fn of_cluster(transport: &TransportArgs) -> Result<Option<StoreSecret>, CommandFailure> {
    let derived = |key: String| blake3::derive_key("baton 2026-11 KV store of a cluster", key.as_bytes());
    let text = |derived| StoreSecret(blake3::Hash::from_bytes(derived).to_hex().to_string());
    Ok(transport.cluster_key()?.map(derived).map(text))
}

fn file() -> Result<PathBuf, CommandFailure> {
    Ok(ClusterFolder::of_user()?.path().with_file_name(FILE))
}

fn read(path: &Path) -> io::Result<StoreSecret> {
    let wrong = |message: &str| Err(io::Error::new(ErrorKind::InvalidData, message));
    // Opening a pipe would wait for a writer.
    if !fs::metadata(path)?.is_file() {
        return wrong("it is no file");
    }
    let file = fs::File::open(path)?;
    if file.metadata()?.mode() & 0o077 != 0 {
        return wrong("other users can read it; its mode must be 600");
    }
    let mut text = String::new();
    file.take(N_CHARS as u64 + 2).read_to_string(&mut text)?;
    match text.trim_end() {
        secret if blake3::Hash::from_hex(secret).is_ok() => Ok(StoreSecret(secret.to_owned())),
        _ => wrong("it is damaged. Remove it: KV of before is not found then"),
    }
}

/// Makes the file, unless another process does so at the same time.
fn make(path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let random = |bytes: [u8; 32]| blake3::Hash::from_bytes(bytes).to_hex();
    let unfinished = path.with_file_name(format!(".{FILE}-{}", &random(rand::random())[..16]));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
    let made = file
        .write_all(format!("{}\n", random(rand::random())).as_bytes())
        .and_then(|()| file.sync_all())
        // Unlike a rename, this replaces no other process's file.
        .and_then(|()| match fs::hard_link(&unfinished, path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        });
    fs::remove_file(&unfinished).and(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_others_can_read_or_that_is_damaged_is_refused_and_a_secret_is_never_replaced() {
        use std::os::unix::fs::PermissionsExt;
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("baton").join(FILE);
        make(&path).unwrap();
        let first = read(&path).unwrap();
        make(&path).unwrap();
        assert!(read(&path).unwrap() == first && first.0.len() == N_CHARS);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing unfinished is left");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("600"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "short").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("damaged. Remove it"));
        let why = |path: &Path| read_or_make(path).map_err(|CommandFailure(why)| why);
        assert!(why(&path).unwrap_err().contains("cannot be used: it is damaged"), "it is not replaced");
        let below_a_file = path.join("baton").join(FILE);
        assert!(why(&below_a_file).unwrap_err().contains("cannot be kept in"));
        assert!(why(&home.path().join(FILE)).is_ok(), "it is made");
    }
}
