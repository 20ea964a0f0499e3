//! The machine and the programs of a run.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

/// The machine of a run. Nothing in it names an owner or a network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunMachine {
    processor: String,
    cores: usize,
    memory_gib: u64,
    /// Name and version of the system's kernel, and the kind of processor.
    system: String,
}

impl RunMachine {
    /// This machine.
    pub(super) fn this() -> RunMachine {
        let kind = RefreshKind::nothing()
            .with_cpu(CpuRefreshKind::nothing())
            .with_memory(MemoryRefreshKind::nothing().with_ram());
        let system = System::new_with_specifics(kind);
        let processor = system.cpus().first().map_or("", |cpu| cpu.brand()).trim();
        let kernel = System::kernel_version().unwrap_or_default();
        RunMachine {
            processor: if processor.is_empty() { "an unnamed processor" } else { processor }.to_owned(),
            cores: system.cpus().len(),
            memory_gib: (system.total_memory() + (1 << 29)) >> 30,
            system: format!("{} {} {}", std::env::consts::OS, kernel, std::env::consts::ARCH),
        }
    }

    pub(super) fn words(&self) -> String {
        let RunMachine { processor, cores, memory_gib, system } = self;
        format!("{processor}, {cores} cores, {memory_gib} GiB, {system}")
    }
}

/// Versions of this program, of its source tree where it lies in one, and of llama.cpp's crate.
pub(super) fn versions() -> BTreeMap<String, String> {
    let mut versions = BTreeMap::from([("baton".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]);
    let folder = std::env::current_exe().ok().and_then(|program| program.parent().map(Path::to_owned));
    versions.extend(folder.and_then(|folder| tree(&folder)).map(|tree| ("source tree".to_owned(), tree)));
    #[cfg(feature = "llama")]
    versions.extend(locked(LOCK_FILE, "llama-cpp-sys-2").map(|version| ("llama-cpp-sys".to_owned(), version)));
    versions
}

/// The commit of the source tree around a folder, with `-dirty` if files were changed. `None` outside of one.
fn tree(folder: &Path) -> Option<String> {
    let mut git = Command::new("git");
    git.arg("-C").arg(folder).args(["describe", "--always", "--dirty", "--abbrev=12"]).stdin(Stdio::null());
    let output = git.stderr(Stdio::null()).output().ok().filter(|output| output.status.success())?;
    let commit = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (!commit.is_empty()).then_some(commit)
}

/// The versions of everything that this program was built with.
#[cfg(feature = "llama")]
const LOCK_FILE: &str = include_str!("../../../../Cargo.lock");

/// The version of a package in the text of a Cargo.lock.
#[cfg(feature = "llama")]
fn locked(lock_file: &str, package: &str) -> Option<String> {
    let (_, rest) = lock_file.split_once(&format!("\nname = \"{package}\"\nversion = \""))?;
    Some(rest.split_once('"')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_and_its_versions_are_known() {
        let machine = RunMachine::this();
        assert!(machine.cores > 0 && machine.memory_gib > 0, "{machine:?}");
        let versions = versions();
        assert!(versions["baton"].starts_with("0."), "{versions:?}");
        #[cfg(feature = "llama")]
        assert!(versions["llama-cpp-sys"].split('.').count() >= 3, "{versions:?}");
        // Nothing is known of a folder without a source tree.
        assert_eq!(tree(Path::new("/")), None);
    }
}
