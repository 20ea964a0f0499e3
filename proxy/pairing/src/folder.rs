//! Where a machine keeps what it has of its cluster: `~/.config/baton/cluster`, of mode 700, its files of mode 600.
//!
//! A pairing is written into a folder beside it, which is then renamed: a reader finds all of it or nothing.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::authority;
use super::error::PairingError;
use super::membership::{About, MachineName, Membership};
use crate::mac_address::MacAddress;

/// The environment variable that names another folder.
pub const FOLDER_VARIABLE: &str = "BATON_CLUSTER_FOLDER";

const ABOUT: &str = "about.json";
const CLUSTER_KEY: &str = "cluster.key";
const AUTHORITY: &str = "authority.pem";
const CERTIFICATE: &str = "machine.pem";
const PRIVATE_KEY: &str = "machine.key";
const AUTHORITY_KEY: &str = "authority.key";
const MACHINES: &str = "machines.json";

/// Machines whose network cards are remembered; more than a cluster has.
const MAX_MACHINES: usize = 256;

/// The longest of these files has some 800 bytes, and that of the machines some 100 for each.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// The folder of a machine's pairing, which may not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterFolder(PathBuf);

impl ClusterFolder {
    /// `$BATON_CLUSTER_FOLDER`, or `baton/cluster` in `$XDG_CONFIG_HOME` or `~/.config`, also on macOS, where Baton's
    /// configuration is, too. Creates nothing.
    ///
    /// Reads the environment, so call it once, at start-up. Errors: no such variable is set.
    pub fn of_user() -> Result<ClusterFolder, PairingError> {
        folder_from(|name| env::var_os(name).filter(|value| !value.is_empty()))
    }

    /// This folder.
    pub fn at(path: impl Into<PathBuf>) -> ClusterFolder {
        ClusterFolder(path.into())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The authority's certificate, PEM.
    pub fn authority(&self) -> PathBuf {
        self.0.join(AUTHORITY)
    }

    /// This machine's certificate, PEM.
    pub fn certificate(&self) -> PathBuf {
        self.0.join(CERTIFICATE)
    }

    /// This machine's private key, PEM.
    pub fn private_key(&self) -> PathBuf {
        self.0.join(PRIVATE_KEY)
    }

    /// Returns true if this machine is in a cluster.
    pub fn exists(&self) -> bool {
        self.0.join(ABOUT).is_file()
    }

    /// What this machine is. `None` if it is in no cluster.
    pub fn about(&self) -> Result<Option<About>, PairingError> {
        if !self.exists() {
            return Ok(None);
        }
        let text = self.read_file(ABOUT)?;
        let about = serde_json::from_str(&text);
        about.map(Some).map_err(|error| PairingError::Damaged { path: self.0.join(ABOUT), reason: error.to_string() })
    }

    /// The secret that the cluster's machines share.
    pub fn cluster_key(&self) -> Result<String, PairingError> {
        let key = self.read_file(CLUSTER_KEY)?.trim().to_owned();
        match key.is_empty() {
            false => Ok(key),
            true => Err(PairingError::Damaged { path: self.0.join(CLUSTER_KEY), reason: "it is empty".into() }),
        }
    }

    /// All that this machine has. `None` if it is in no cluster. Errors: a file is missing, or they do not belong together.
    pub fn read(&self) -> Result<Option<Membership>, PairingError> {
        let Some(about) = self.about()? else { return Ok(None) };
        let authority_key = about.admitted_by.is_none().then(|| self.read_file(AUTHORITY_KEY)).transpose()?;
        let member = Membership {
            about,
            cluster_key: self.cluster_key()?,
            authority: self.read_file(AUTHORITY)?,
            certificate: self.read_file(CERTIFICATE)?,
            private_key: self.read_file(PRIVATE_KEY)?,
            authority_key,
        };
        authority::check(&member)
            .map_err(|error| PairingError::Damaged { path: self.0.clone(), reason: error.to_string() })?;
        Ok(Some(member))
    }

    /// The network cards of the machines that have joined here, as far as they told. Errors: the file is damaged.
    pub fn machines(&self) -> Result<BTreeMap<String, MacAddress>, PairingError> {
        let path = self.0.join(MACHINES);
        if !path.is_file() {
            return Ok(BTreeMap::new());
        }
        let machines = serde_json::from_str(&self.read_file(MACHINES)?);
        machines.map_err(|error| PairingError::Damaged { path, reason: error.to_string() })
    }

    /// Remembers the network card of a machine that has joined. Errors: it cannot be written.
    pub(crate) fn note_machine(&self, name: &MachineName, mac: MacAddress) -> Result<(), PairingError> {
        let path = self.0.join(MACHINES);
        let failed = |error| PairingError::File { path: path.clone(), error };
        let mut machines = self.machines().unwrap_or_default();
        while machines.len() >= MAX_MACHINES && !machines.contains_key(name.as_str()) {
            machines.pop_first();
        }
        machines.insert(name.to_string(), mac);
        let text = serde_json::to_string_pretty(&machines).map_err(|error| failed(error.into()))?;
        let mut new = tempfile::NamedTempFile::with_prefix_in(TEMPORARY, self.parent()).map_err(failed)?;
        new.write_all(text.as_bytes()).map_err(failed)?;
        new.persist(&path).map(drop).map_err(|error| failed(error.error))
    }

    /// Errors: this machine is in a cluster, or its pairing is damaged.
    pub fn check_free(&self) -> Result<(), PairingError> {
        match self.about()? {
            Some(about) => Err(PairingError::AlreadyPaired { cluster: about.cluster }),
            None => Ok(()),
        }
    }

    /// Checks that a pairing can be stored here, before anything is agreed on. Errors: it cannot, or the folder holds something else.
    pub fn check_usable(&self) -> Result<(), PairingError> {
        let usable = || {
            self.check_own_files()?;
            let parent = self.made_parent()?;
            self.remove_leftovers(parent, self.exists());
            temporary_in(parent).map(drop)
        };
        usable().map_err(|error| PairingError::File { path: self.0.clone(), error })
    }

    fn parent(&self) -> &Path {
        self.0.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    /// The folder around it, which is made if it is missing. It holds the secrets of a cluster, so nobody else needs to list it.
    fn made_parent(&self) -> io::Result<&Path> {
        let parent = self.parent();
        DirBuilder::new().recursive(true).mode(0o700).create(parent).map(|()| parent)
    }

    /// Errors: there is something else than a pairing. A folder that was named by mistake must not be removed.
    fn check_own_files(&self) -> io::Result<()> {
        if !self.0.try_exists()? {
            return Ok(());
        }
        for entry in fs::read_dir(&self.0)? {
            let name = entry?.file_name();
            if !FILES.iter().any(|file| name == *file) {
                let name = name.display();
                return Err(io::Error::other(format!(
                    "it holds {name}, which is no part of a pairing: name another folder"
                )));
            }
        }
        Ok(())
    }

    /// Writes a pairing. Errors: there is one already, unless `replaces`.
    pub fn store(&self, member: &Membership, replaces: bool) -> Result<(), PairingError> {
        let failed = |error| PairingError::File { path: self.0.clone(), error };
        if !replaces {
            self.check_free()?;
        }
        let parent = self.made_parent().map_err(failed)?;
        let new = temporary_in(parent).map_err(failed)?;
        fs::set_permissions(new.path(), Permissions::from_mode(0o700)).map_err(failed)?;
        let about = serde_json::to_string_pretty(&member.about).map_err(|error| failed(error.into()))?;
        let key_of_authority = member.authority_key.as_deref().map(|key| (AUTHORITY_KEY, key));
        let files = [
            (ABOUT, about.as_str()),
            (CLUSTER_KEY, &member.cluster_key),
            (AUTHORITY, &member.authority),
            (CERTIFICATE, &member.certificate),
            (PRIVATE_KEY, &member.private_key),
        ];
        for (name, content) in files.into_iter().chain(key_of_authority) {
            write_private(&new.path().join(name), content).map_err(failed)?;
        }
        // A folder can only be renamed over an empty one.
        let old = self.set_aside(parent).map_err(failed)?;
        if let Err(error) = fs::rename(new.path(), &self.0) {
            if let Some(old) = old {
                fs::rename(old.path().join(OLD), &self.0).map_err(failed)?;
            }
            return Err(failed(error));
        }
        // It has another name now, under which nothing is removed.
        drop(new.keep());
        // So that a power cut after "paired" does not undo it.
        fs::File::open(parent).and_then(|folder| folder.sync_all()).map_err(failed)?;
        self.remove_leftovers(parent, true);
        Ok(())
    }

    /// Removes the pairing. Returns what it was; `None` if there was none.
    pub fn forget(&self) -> Result<Option<About>, PairingError> {
        // A damaged pairing can be removed, too.
        let about = self.about();
        let parent = self.parent();
        let failed = |error| PairingError::File { path: self.0.clone(), error };
        // Renamed first, so that nobody reads half of it.
        let old = self.set_aside(parent).map_err(failed)?;
        if let Some(old) = old {
            old.close().map_err(failed)?;
        }
        self.remove_leftovers(parent, true);
        about
    }

    /// Removes what processes have left behind in `parent` that were killed while they wrote: it may hold a cluster's key. Whole
    /// pairings that were being replaced go `with_old`: one of them may be the only one that this machine has.
    fn remove_leftovers(&self, parent: &Path, with_old: bool) {
        let may_go = |name: &OsStr| FILES.iter().any(|file| name == *file) || (name == OLD && with_old);
        let entries = match fs::read_dir(parent) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => {
                let path = parent.display();
                return tracing::warn!(%path, %error, "unfinished pairings cannot be searched for");
            }
        };
        for entry in entries.filter_map(Result::ok) {
            let is_temporary = entry.file_name().to_string_lossy().starts_with(TEMPORARY);
            let Ok(written) = entry.metadata().and_then(|found| found.modified()) else { continue };
            if !is_temporary || !written.elapsed().is_ok_and(|age| age >= LEFTOVER_AFTER) {
                continue;
            }
            // A file, or a folder that happens to have such a name, stays. Another process may remove it meanwhile.
            let Ok(mut inside) = fs::read_dir(entry.path()) else { continue };
            if inside.all(|file| file.is_ok_and(|file| may_go(&file.file_name())))
                && let Err(error) = fs::remove_dir_all(entry.path())
            {
                tracing::warn!(path = %entry.path().display(), %error, "an unfinished pairing cannot be removed");
            }
        }
    }

    /// Moves the folder into a temporary one, which removes it when dropped. `None` if there is none.
    fn set_aside(&self, parent: &Path) -> io::Result<Option<tempfile::TempDir>> {
        if !self.0.try_exists()? {
            return Ok(None);
        }
        self.check_own_files()?;
        let aside = temporary_in(parent)?;
        fs::rename(&self.0, aside.path().join(OLD))?;
        Ok(Some(aside))
    }

    fn read_file(&self, name: &str) -> Result<String, PairingError> {
        let path = self.0.join(name);
        let mut text = String::new();
        let read = fs::File::open(&path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text));
        match read {
            Ok(n) if n as u64 > MAX_FILE_BYTES => Err(PairingError::Damaged { path, reason: "it is too long".into() }),
            Ok(_) => Ok(text),
            Err(error) => Err(PairingError::File { path, error }),
        }
    }
}

/// A temporary folder this old belongs to no process that runs: writing a pairing takes milliseconds.
const LEFTOVER_AFTER: Duration = Duration::from_secs(60);

/// How temporary folders are called.
const TEMPORARY: &str = ".cluster-";

/// Where [`ClusterFolder::set_aside`] puts the old pairing in one.
const OLD: &str = "old";

fn temporary_in(parent: &Path) -> io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix(TEMPORARY).tempdir_in(parent)
}

/// All files of a pairing.
const FILES: [&str; 7] = [ABOUT, CLUSTER_KEY, AUTHORITY, AUTHORITY_KEY, CERTIFICATE, PRIVATE_KEY, MACHINES];

fn folder_from(var: impl Fn(&str) -> Option<OsString>) -> Result<ClusterFolder, PairingError> {
    if let Some(folder) = var(FOLDER_VARIABLE) {
        return Ok(ClusterFolder(folder.into()));
    }
    // The XDG specification says to ignore a relative path here.
    let xdg = var("XDG_CONFIG_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let home = || var("HOME").map(|home| PathBuf::from(home).join(".config"));
    let config = xdg.or_else(home).ok_or(PairingError::NoFolder)?;
    Ok(ClusterFolder(config.join("baton").join("cluster")))
}

/// Writes a new file that only its owner may read.
fn write_private(path: &Path, content: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content.as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::super::authority::found_cluster;
    use super::*;

    fn member(name: &str) -> Membership {
        found_cluster(MachineName::parse(name).unwrap()).unwrap()
    }

    #[test]
    fn a_folder_with_other_files_is_neither_replaced_nor_removed() {
        let parent = tempfile::tempdir().unwrap();
        let folder = ClusterFolder(parent.path().join("etc"));
        fs::create_dir(&folder.0).unwrap();
        fs::write(folder.0.join("baton.toml"), "x").unwrap();
        for replaces in [false, true] {
            let error = folder.store(&member("mac"), replaces).unwrap_err().to_string();
            assert!(error.contains("baton.toml"), "{error}");
        }
        assert!(folder.forget().is_err());
        assert_eq!(fs::read_to_string(folder.0.join("baton.toml")).unwrap(), "x");
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn what_killed_processes_left_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let folder = ClusterFolder(parent.path().join("cluster"));
        let make = |folder: &str, file: &str| {
            fs::create_dir(parent.path().join(folder)).unwrap();
            fs::write(parent.path().join(folder).join(file), "secret").unwrap();
        };
        let age = |name: &str| {
            let folder = fs::File::open(parent.path().join(name)).unwrap();
            folder.set_modified(std::time::SystemTime::now() - LEFTOVER_AFTER).unwrap();
        };
        make(".cluster-half", CLUSTER_KEY);
        make(".cluster-other", "notes.txt");
        make(".cluster-aside", OLD);
        let left = || {
            let names = fs::read_dir(parent.path()).unwrap().map(|entry| entry.unwrap().file_name());
            names.collect::<std::collections::BTreeSet<_>>()
        };
        folder.check_usable().unwrap();
        assert_eq!(left().len(), 3, "they may belong to a process that runs");
        [".cluster-half", ".cluster-other", ".cluster-aside"].into_iter().for_each(age);
        folder.check_usable().unwrap();
        assert!(left().iter().eq([".cluster-aside", ".cluster-other"]), "the only pairing stays: {:?}", left());
        folder.store(&member("mac"), false).unwrap();
        assert!(left().iter().eq([".cluster-other", "cluster"]), "{:?}", left());
        make(".cluster-aside", OLD);
        age(".cluster-aside");
        assert!(folder.forget().unwrap().is_some());
        assert!(left().iter().eq([".cluster-other"]), "{:?}", left());
        // A process was killed while it forgot.
        make(".cluster-aside", OLD);
        age(".cluster-aside");
        assert!(folder.forget().unwrap().is_none());
        assert!(left().iter().eq([".cluster-other"]), "{:?}", left());
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_pairing_is_private_whole_and_read_as_it_was_written() {
        let home = tempfile::tempdir().unwrap();
        let folder = ClusterFolder::at(home.path().join("config/baton/cluster"));
        assert!(!folder.exists() && folder.read().unwrap().is_none());
        let stored = member("a");
        folder.store(&stored, false).unwrap();
        assert_eq!((mode(folder.path()), mode(folder.path().parent().unwrap())), (0o700, 0o700));
        let files: Vec<PathBuf> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 6);
        assert!(files.iter().all(|file| mode(file) == 0o600));
        let read = folder.read().unwrap().unwrap();
        assert!(read.about == stored.about && read.cluster_key == stored.cluster_key);
        assert!(read.private_key == stored.private_key && read.authority_key == stored.authority_key);
    }

    #[test]
    fn a_pairing_is_replaced_only_when_told_and_forgotten_entirely() {
        let home = tempfile::tempdir().unwrap();
        let folder = ClusterFolder::at(home.path().join("cluster"));
        assert_eq!(folder.forget().unwrap(), None);
        let (first, second) = (member("a"), member("b"));
        folder.store(&first, false).unwrap();
        assert!(matches!(folder.store(&second, false), Err(PairingError::AlreadyPaired { .. })));
        assert_eq!(folder.about().unwrap(), Some(first.about));
        folder.store(&second, true).unwrap();
        assert_eq!(folder.about().unwrap(), Some(second.about.clone()));
        assert_eq!(folder.forget().unwrap(), Some(second.about));
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn damage_is_named_and_can_be_forgotten() {
        let home = tempfile::tempdir().unwrap();
        let folder = ClusterFolder::at(home.path().join("cluster"));
        let damage = |name: &str, content: &str| {
            folder.store(&member("a"), true).unwrap();
            fs::write(folder.path().join(name), content).unwrap();
            folder.read().err().unwrap().to_string()
        };
        assert!(damage(ABOUT, "{").contains("about.json is damaged"));
        assert!(damage(CLUSTER_KEY, " \n").contains("it is empty"));
        assert!(damage(CERTIFICATE, &member("b").certificate).contains("certificate"));
        assert!(damage(CLUSTER_KEY, &"a".repeat(70_000)).contains("too long"));
        folder.store(&member("a"), true).unwrap();
        fs::remove_file(folder.private_key()).unwrap();
        assert!(folder.read().err().unwrap().to_string().contains("machine.key"));
        fs::write(folder.path().join(ABOUT), "{").unwrap();
        assert!(folder.store(&member("a"), false).is_err(), "what is damaged is not lost silently");
        assert!(folder.forget().is_err() && !folder.path().exists());
    }

    #[test]
    fn the_folder_is_in_the_users_configuration() {
        let folder = |vars: &[(&str, &str)]| {
            folder_from(|name| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
                .map(|folder| folder.0)
                .ok()
        };
        assert_eq!(folder(&[("HOME", "/home/me")]), Some("/home/me/.config/baton/cluster".into()));
        assert_eq!(folder(&[("XDG_CONFIG_HOME", "/c"), ("HOME", "/home/me")]), Some("/c/baton/cluster".into()));
        assert_eq!(folder(&[("XDG_CONFIG_HOME", "c"), ("HOME", "/h")]), Some("/h/.config/baton/cluster".into()));
        assert_eq!(
            folder(&[(FOLDER_VARIABLE, "/etc/baton/cluster"), ("HOME", "/h")]),
            Some("/etc/baton/cluster".into())
        );
        assert_eq!(folder(&[]), None);
    }
}
