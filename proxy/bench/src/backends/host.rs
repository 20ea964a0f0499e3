//! The facts about the machine in a report, besides its devices.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

/// The time that `nvidia-smi` gets. A card that hangs keeps it for minutes.
const DEADLINE: Duration = Duration::from_secs(10);

/// The version of NVIDIA's driver, from the kernel's module or from `nvidia-smi`. `None` where there is none.
pub(super) async fn nvidia_driver() -> Option<String> {
    if let Some(version) = std::fs::read_to_string("/proc/driver/nvidia/version").ok().and_then(|text| version(&text)) {
        return Some(version);
    }
    let mut smi = Command::new("nvidia-smi");
    smi.args(["--query-gpu=driver_version", "--format=csv,noheader"]);
    smi.stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(DEADLINE, smi.output()).await.ok()?.ok()?;
    version(&String::from_utf8_lossy(&output.stdout))
}

/// The first word that is a version: numbers and dots.
fn version(text: &str) -> Option<String> {
    let is_version = |word: &&str| {
        let parts: Vec<&str> = word.split('.').collect();
        parts.len() >= 2 && parts.iter().all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    text.split_whitespace().find(is_version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn the_drivers_version_is_found_in_both_forms() {
        let kernel = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 13.3.0";
        assert_eq!(version(kernel).as_deref(), Some("580.95.05"));
        assert_eq!(version("550.144.03\n550.144.03\n").as_deref(), Some("550.144.03"));
        assert_eq!(version("NVIDIA-SMI has failed because it couldn't communicate. "), None);
        assert_eq!(version(""), None);
    }
}
