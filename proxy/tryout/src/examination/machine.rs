//! The machine that is examined: its devices, and what this binary can do with them.

use baton_engines::llama::devices::{self, Device};
use baton_proxy::serve::CommandFailure;
use serde::Serialize;

use super::system::SystemFinding;

/// This machine, for a report.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    pub version: &'static str,
    /// Operating system and architecture.
    pub system: String,
    /// GPU backends in this binary.
    pub backends: Vec<&'static str>,
    /// Message if the binary has GPU backends and none of them finds a device.
    pub missing: Option<String>,
    /// The processor first.
    pub devices: Vec<Listed>,
}

/// A device, for a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Listed {
    pub name: String,
    pub description: String,
    pub memory_bytes: u64,
}

impl Machine {
    /// This machine with these devices.
    pub fn with(devices: &[Device]) -> Machine {
        let backends = devices::gpu_backends();
        let lacks_gpu = !backends.is_empty() && devices.len() == 1;
        let missing = lacks_gpu.then(|| devices::not_found(&backends));
        let listed = |device: &Device| Listed {
            name: device.name.clone(),
            description: device.description.clone(),
            memory_bytes: device.memory,
        };
        Machine {
            version: env!("CARGO_PKG_VERSION"),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            backends,
            missing,
            devices: devices.iter().map(listed).collect(),
        }
    }

    /// The GPU backends in this binary, in words.
    pub fn built_for(&self) -> String {
        if self.backends.is_empty() { "no GPU".to_owned() } else { self.backends.join(", ") }
    }

    /// Devices besides the processor.
    pub fn gpus(&self) -> impl Iterator<Item = &Listed> {
        self.devices.iter().filter(|device| device.name != devices::CPU)
    }
}

/// The devices with these names; all if there are no names. Errors: there is no such device.
pub fn chosen(known: &[Device], names: &[String]) -> Result<Vec<Device>, CommandFailure> {
    let unknown = |name: &&String| !known.iter().any(|device| device.name.eq_ignore_ascii_case(name));
    if let Some(name) = names.iter().find(unknown) {
        let known: Vec<&str> = known.iter().map(|device| device.name.as_str()).collect();
        return Err(CommandFailure(format!("there is no device {name:?} here; there is {}", known.join(", "))));
    }
    let is_wanted =
        |device: &&Device| names.is_empty() || names.iter().any(|name| device.name.eq_ignore_ascii_case(name));
    Ok(known.iter().filter(is_wanted).cloned().collect())
}

/// What this system allows, for a model whose file has this size. Empty where nothing is forbidden.
pub fn findings(model_bytes: u64) -> Vec<SystemFinding> {
    #[cfg(target_os = "macos")]
    return super::mac::findings(model_bytes);
    #[cfg(not(target_os = "macos"))]
    {
        let _ = model_bytes;
        Vec::new()
    }
}
