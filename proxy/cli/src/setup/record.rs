//! What `baton setup` has made on this machine, so that it can be undone: `~/.config/baton/setup.json`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use baton_pairing::{About, ClusterFolder};
use baton_proxy::serve::CommandFailure;
use serde::{Deserialize, Serialize};

use super::boot::{BootCommand, BootService};
use super::lingering;
use super::place::SetupPlace;

/// The file's name.
const FILE: &str = "setup.json";

/// What was changed, and nothing that was there before.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct SetupRecord {
    /// By path, the BLAKE3 hash of what was written, hexadecimal.
    pub files: BTreeMap<PathBuf, String>,
    /// Files that the service writes, and that were not there.
    pub logs: BTreeSet<PathBuf>,
    /// Folders that were not there.
    pub folders: BTreeSet<PathBuf>,
    /// Run before the files are removed.
    pub stop: Vec<BootCommand>,
    /// A line for a shell by which its owner starts it, if no service does.
    pub start_by_hand: Option<String>,
    /// Lingering was off.
    pub lingers: bool,
    /// The pairing that was made.
    pub pairing: Option<About>,
}

/// A part of a setup that stays, and why, in a sentence.
pub(super) type Remnant = String;

impl SetupRecord {
    /// The record in this folder; an empty one if there is none. Errors: it cannot be read.
    pub(super) fn read(folder: &Path) -> Result<SetupRecord, CommandFailure> {
        let path = SetupRecord::path(folder);
        let failed = |reason: String| CommandFailure(format!("{} cannot be read: {reason}", path.display()));
        match fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text).map_err(|error| failed(error.to_string())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(SetupRecord::default()),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// The record's file.
    pub(super) fn path(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == SetupRecord::default()
    }

    /// Writes the record. Before what it records is done: a machine that stops meanwhile can still be undone.
    pub(super) fn write(&self, folder: &Path) -> Result<(), CommandFailure> {
        write_file(&SetupRecord::path(folder), &serde_json::to_string_pretty(self)?)
    }

    /// Returns true if this file is as setup wrote it, or if there is none.
    pub(super) fn may_replace(&self, path: &Path) -> bool {
        match fs::read(path) {
            Ok(bytes) => self.files.get(path) == Some(&hash(&bytes)),
            Err(error) => error.kind() == ErrorKind::NotFound,
        }
    }

    /// The folders of these files that are missing will be made.
    pub(super) fn note_missing_folders<'a>(&mut self, files: impl Iterator<Item = &'a Path>) {
        for file in files {
            self.folders.extend(file.ancestors().skip(1).take_while(|folder| !folder.exists()).map(Path::to_owned));
        }
    }

    /// The logs of this service that are missing will be made.
    pub(super) fn note_missing_logs(&mut self, boot: &BootService) {
        self.logs.extend(boot.logs().into_iter().filter(|log| !log.exists()));
    }

    /// The commands that stop the service and end what it needed.
    pub(super) fn stop_commands(&self) -> Vec<BootCommand> {
        self.stop.iter().cloned().chain(self.lingers.then(lingering::off)).collect()
    }

    /// Stops the service, and ends what it needed.
    pub(super) fn stop_service(&mut self) -> Result<Option<Remnant>, CommandFailure> {
        for command in std::mem::take(&mut self.stop) {
            command.run()?;
        }
        let was_on = std::mem::take(&mut self.lingers);
        let ended = if was_on { lingering::off().run() } else { Ok(()) };
        Ok(ended.err().map(|failure| format!("Lingering stays on: {}", failure.0)))
    }

    /// Undoes everything. Returns what stays.
    pub(super) fn undo(mut self, place: &SetupPlace) -> Result<Vec<Remnant>, CommandFailure> {
        let mut left: Vec<Remnant> = self.stop_service()?.into_iter().collect();
        for path in self.files.keys() {
            match self.may_replace(path) {
                true => remove_file(path)?,
                false => left.push(format!("{} was changed since, so it stays", path.display())),
            }
        }
        self.logs.iter().try_for_each(|path| remove_file(path))?;
        if let Some(made) = &self.pairing {
            match pairing_now(&place.cluster, made) {
                PairingNow::AsMade => drop(place.cluster.forget()?),
                PairingNow::Gone => {}
                PairingNow::Another => left.push("This machine was paired anew since, so its pairing stays".into()),
                PairingNow::Damaged(problem) => left.push(format!("The pairing stays, because {problem}")),
            }
        }
        remove_file(&SetupRecord::path(&place.config))?;
        // The inner ones first. One that others use is not empty.
        for folder in self.folders.iter().rev() {
            let _ = fs::remove_dir(folder);
        }
        Ok(left)
    }
}

/// This machine's pairing beside the one that setup made.
enum PairingNow {
    AsMade,
    Another,
    Gone,
    Damaged(String),
}

fn pairing_now(cluster: &ClusterFolder, made: &About) -> PairingNow {
    match cluster.about() {
        Ok(Some(now)) if now == *made => PairingNow::AsMade,
        Ok(Some(_)) => PairingNow::Another,
        Ok(None) => PairingNow::Gone,
        Err(error) => PairingNow::Damaged(error.to_string()),
    }
}

impl fmt::Display for SetupRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for command in self.stop_commands() {
            writeln!(f, "  run     {}", command.args.join(" "))?;
        }
        for path in self.files.keys().chain(&self.logs) {
            writeln!(f, "  remove  {}", path.display())?;
        }
        if let Some(made) = &self.pairing {
            writeln!(f, "  remove  this machine's pairing with cluster {}", made.cluster)?;
        }
        Ok(())
    }
}

/// A file's hash, as the record has it.
pub(super) fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// Writes a file and its folders. A reader finds the old text or the new one.
pub(super) fn write_file(path: &Path, text: &str) -> Result<(), CommandFailure> {
    let failed = |error: std::io::Error| CommandFailure(format!("{} cannot be written: {error}", path.display()));
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    let part = path.with_extension("part");
    fs::write(&part, text).and_then(|()| fs::rename(&part, path)).map_err(failed)
}

fn remove_file(path: &Path) -> Result<(), CommandFailure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(CommandFailure(format!("{} cannot be removed: {error}", path.display())))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use baton_pairing::{MachineName, Membership};

    use super::*;

    /// A home with a pairing of this moment.
    fn paired(home: &Path, since: &str) -> (SetupPlace, About) {
        let config = home.join("baton");
        let cluster = ClusterFolder::at(config.join("cluster"));
        let machine = MachineName::parse("mac").unwrap();
        let about = About { cluster: "c".into(), machine, admitted_by: None, since: since.into() };
        let text = String::new;
        let (authority, certificate, private_key) = (text(), text(), text());
        let (cluster_key, about_it) = ("k".into(), about.clone());
        let member =
            Membership { about: about_it, cluster_key, authority, certificate, private_key, authority_key: None };
        cluster.store(&member, true).unwrap();
        (SetupPlace { program: PathBuf::new(), config, cluster, boot: None }, about)
    }

    #[test]
    fn a_services_log_goes_whatever_it_has() {
        let home = tempfile::tempdir().unwrap();
        let log = home.path().join("baton.log");
        let agent = home.path().join("agent");
        let boot = BootService::Launchd { agent, log: log.clone(), user: 1 };
        let mut record = SetupRecord::default();
        record.note_missing_logs(&boot);
        let (place, _) = paired(home.path(), "2026-11-01T00:00:00Z");
        fs::write(&log, "lines\n").unwrap();
        assert!(record.to_string().contains(&format!("remove  {}\n", log.display())), "{record}");
        assert_eq!(record.undo(&place).unwrap(), Vec::<Remnant>::new());
        assert!(!log.exists());

        // One that was there before.
        fs::write(&log, "mine\n").unwrap();
        let mut record = SetupRecord::default();
        record.note_missing_logs(&boot);
        record.undo(&place).unwrap();
        assert!(log.exists());
    }

    #[test]
    fn a_pairing_that_setup_made_goes_and_one_that_was_made_anew_stays() {
        let home = tempfile::tempdir().unwrap();
        let (place, made) = paired(home.path(), "2026-11-01T00:00:00Z");
        let mut record = SetupRecord { pairing: Some(made), ..SetupRecord::default() };
        record.folders.insert(place.config.clone());
        record.write(&place.config).unwrap();
        let record = SetupRecord::read(&place.config).unwrap();
        assert_eq!(record.clone().undo(&place).unwrap(), Vec::<Remnant>::new());
        assert!(!place.config.exists());
        assert_eq!(record.clone().undo(&place).unwrap(), Vec::<Remnant>::new(), "somebody was faster");

        let (place, _) = paired(home.path(), "2026-11-02T00:00:00Z");
        let left = record.clone().undo(&place).unwrap();
        assert!(left.len() == 1 && left[0].contains("paired anew") && place.cluster.exists(), "{left:?}");
        // One that was there before setup.
        assert_eq!(SetupRecord { pairing: None, ..record.clone() }.undo(&place).unwrap(), Vec::<Remnant>::new());
        assert!(place.cluster.exists());
        fs::write(place.cluster.path().join("about.json"), "{").unwrap();
        let left = record.undo(&place).unwrap();
        assert!(left[0].contains("The pairing stays, because") && place.cluster.exists(), "{left:?}");
    }
}
