//! The device that computes.

use candle_core::Device;

use crate::serving::LoadError;

/// A device with its name.
pub(super) struct NamedDevice {
    pub(super) device: Device,
    /// As [`NodeInfo::devices`](baton_schemas::node::NodeInfo::devices) shows it.
    pub(super) name: String,
}

/// The name of the processor in options.
const CPU: &str = "cpu";

impl NamedDevice {
    /// The device with this name in options: `cpu`, or a GPU's kind and number. Without a name, the first GPU of this
    /// build, else the processor. Errors: there is no such device.
    pub(super) fn choose(name: Option<&str>) -> Result<NamedDevice, LoadError> {
        match name {
            Some(name) if name.eq_ignore_ascii_case(CPU) => Ok(NamedDevice::cpu()),
            None if !cfg!(any(feature = "candle-cuda", feature = "candle-metal")) => Ok(NamedDevice::cpu()),
            None => NamedDevice::gpu(if cfg!(feature = "candle-metal") { "Metal0" } else { "CUDA0" }),
            Some(name) => NamedDevice::gpu(name),
        }
    }

    /// The name has the processor's architecture: different ones round differently.
    fn cpu() -> NamedDevice {
        NamedDevice { device: Device::Cpu, name: format!("CPU ({})", std::env::consts::ARCH) }
    }

    fn gpu(name: &str) -> Result<NamedDevice, LoadError> {
        let unknown = || LoadError::Config(format!("there is no device {name:?} for candle; try cpu, CUDA0 or Metal0"));
        let lower = name.to_ascii_lowercase();
        let number = |kind: &str| lower.strip_prefix(kind).and_then(|number| number.parse::<usize>().ok());
        let device = match (number("cuda"), number("metal")) {
            (Some(number), _) => Device::new_cuda(number),
            (None, Some(number)) => Device::new_metal(number),
            (None, None) => return Err(unknown()),
        };
        let device = device.map_err(|error| LoadError::Config(format!("the device {name} cannot be used: {error}")))?;
        Ok(NamedDevice { device, name: name.to_owned() })
    }
}
