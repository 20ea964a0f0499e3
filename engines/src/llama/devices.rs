//! The devices of this machine that llama.cpp can compute on.

use baton_schemas::worker::LentDevice;
use llama_cpp_2::{LlamaBackendDevice, LlamaBackendDeviceType, list_llama_ggml_backend_devices};

use super::backend::backend;
use crate::serving::LoadError;

/// The name of the processor, for computing without a GPU.
pub const CPU: &str = "cpu";

/// The GPU backends that can be built in, and whether this build has them.
const GPU_BACKENDS: [(&str, bool); 3] = [
    ("cuda", cfg!(feature = "cuda")),
    ("metal", cfg!(any(feature = "metal", all(target_os = "macos", target_arch = "aarch64")))),
    ("vulkan", cfg!(feature = "vulkan")),
];

/// GPU backends of this build.
pub fn gpu_backends() -> Vec<&'static str> {
    GPU_BACKENDS.into_iter().filter(|(_, built)| *built).map(|(name, _)| name).collect()
}

/// ggml's name of the backend of workers' devices, which it lists as GPUs.
const WORKERS_BACKEND: &str = "RPC";

/// A device that models can be computed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// llama.cpp's name for it, e.g. `CUDA0`, `Metal`, `Vulkan0`; [`CPU`] for the processor.
    pub name: String,
    /// The device's model, e.g. `NVIDIA GB10`.
    pub description: String,
    /// Its memory, bytes; 0 if unknown.
    pub memory: u64,
}

/// The processor and every GPU that this build can use. The processor is first.
pub fn all() -> Result<Vec<Device>, LoadError> {
    let listed = listed()?;
    let processor = listed.iter().find(|device| is_processor(device));
    let processor = Device {
        name: CPU.to_owned(),
        description: processor.map_or_else(|| "processor".to_owned(), |device| device.description.clone()),
        memory: processor.map_or(0, |device| device.memory_total as u64),
    };
    let gpus = listed.iter().filter(|device| is_gpu(device)).map(|device| Device {
        name: device.name.clone(),
        description: device.description.clone(),
        memory: device.memory_total as u64,
    });
    Ok(std::iter::once(processor).chain(gpus).collect())
}

/// Errors: the program was built for a GPU, and with these options the CPU would compute the model because no GPU is found.
/// llama.cpp would do so silently, tens of times slower.
pub(super) fn check(name: Option<&str>, n_gpu_layers: Option<u32>) -> Result<(), LoadError> {
    let is_left_to_processor = || Ok::<_, LoadError>(name.is_none() && gpus(None, n_gpu_layers)?.is_empty());
    let kinds = gpu_backends();
    if kinds.is_empty() || n_gpu_layers == Some(0) || !is_left_to_processor()? {
        return Ok(());
    }
    Err(LoadError::Config(format!(
        "{}: is its driver installed? --device cpu computes on the processor.",
        not_found(&kinds)
    )))
}

/// Says that none of the kinds of GPUs that this program was built for is here.
pub fn not_found(kinds: &[&str]) -> String {
    format!("built for {}, but no such device was found", kinds.join(" or "))
}

/// Descriptions of the devices that compute a model with these options.
pub(super) fn in_use(name: Option<&str>, n_gpu_layers: Option<u32>) -> Result<Vec<String>, LoadError> {
    let words = |device: LlamaBackendDevice| format!("{} ({})", device.name, device.description);
    let gpus: Vec<String> = gpus(name, n_gpu_layers)?.into_iter().map(words).collect();
    Ok(if gpus.is_empty() { vec![processor()?] } else { gpus })
}

/// The processor. Its kind is part of the name: different processors are different devices, whose kernels round differently.
fn processor() -> Result<String, LoadError> {
    let description = listed()?.into_iter().find(is_processor).map_or_else(String::new, |device| device.description);
    Ok(format!("CPU ({description}, {})", std::env::consts::ARCH))
}

/// llama.cpp's index of the first GPU that computes a model with these options, or a part of it; `None`: the processor
/// computes it alone.
pub(super) fn first_gpu(name: Option<&str>, n_gpu_layers: Option<u32>) -> Result<Option<usize>, LoadError> {
    Ok(gpus(name, n_gpu_layers)?.first().map(|device| device.index))
}

fn gpus(name: Option<&str>, n_gpu_layers: Option<u32>) -> Result<Vec<LlamaBackendDevice>, LoadError> {
    if n_gpu_layers == Some(0) {
        return Ok(Vec::new());
    }
    let is_chosen = |device: &LlamaBackendDevice| is_gpu(device) && name.is_none_or(|name| is_called(device, name));
    Ok(listed()?.into_iter().filter(is_chosen).collect())
}

/// The devices that compute a model with workers: theirs, whose indexes these are, and this machine's GPUs.
pub(super) fn with_workers(workers: &[Vec<usize>]) -> Result<Vec<LlamaBackendDevice>, LoadError> {
    let listed = listed()?;
    let of_workers = workers.iter().flatten().filter_map(|index| listed.iter().find(|device| device.index == *index));
    // Workers come first, as llama.cpp itself orders them.
    Ok(of_workers.chain(own_gpus(&listed)).cloned().collect())
}

/// The GPUs that llama.cpp uses by itself: integrated ones only where there is no other.
fn own_gpus(listed: &[LlamaBackendDevice]) -> impl Iterator<Item = &LlamaBackendDevice> {
    let is_of = |kind| move |device: &&LlamaBackendDevice| is_gpu(device) && device.device_type == kind;
    let kind = match listed.iter().any(|device| is_of(LlamaBackendDeviceType::Gpu)(&device)) {
        true => LlamaBackendDeviceType::Gpu,
        false => LlamaBackendDeviceType::IntegratedGpu,
    };
    listed.iter().filter(is_of(kind))
}

/// The most devices that a model can be divided among: `GGML_SCHED_MAX_BACKENDS` of ggml-backend.cpp, less the processor and
/// the libraries that compute for it.
pub(super) fn most_for_model() -> Result<usize, LoadError> {
    const MAX_BACKENDS: usize = 16;
    let is_beside = |device: &&LlamaBackendDevice| {
        matches!(device.device_type, LlamaBackendDeviceType::Cpu | LlamaBackendDeviceType::Accelerator)
    };
    Ok(MAX_BACKENDS.saturating_sub(listed()?.iter().filter(is_beside).count()))
}

/// Bytes of free memory of this machine's GPUs; 0 if there is none.
pub fn free_gpu_memory() -> Result<u64, LoadError> {
    Ok(own_gpus(&listed()?).map(|device| device.memory_free as u64).sum())
}

/// llama.cpp's indexes of the devices that a worker lends: the named one, or every GPU, or the processor. Errors: this program
/// was built for a GPU, none is found, and the processor is not named.
pub(crate) fn lendable(name: Option<&str>) -> Result<Vec<usize>, LoadError> {
    if let Some(name) = name.filter(|name| !name.eq_ignore_ascii_case(CPU)) {
        return indices(name);
    }
    check(name, None)?;
    let listed = listed()?;
    let gpus: Vec<usize> = own_gpus(&listed).filter(|_| name.is_none()).map(|device| device.index).collect();
    match gpus.is_empty() {
        true => Ok(listed.iter().filter(|device| is_processor(device)).map(|device| device.index).take(1).collect()),
        false => Ok(gpus),
    }
}

/// The devices with these indexes, as a worker describes them.
pub(crate) fn lent(indices: &[usize]) -> Result<Vec<LentDevice>, LoadError> {
    let listed = listed()?;
    let found = indices.iter().filter_map(|index| listed.iter().find(|device| device.index == *index));
    let words = |device: &LlamaBackendDevice| LentDevice {
        name: format!("{} ({})", device.name, device.description),
        memory: device.memory_free as u64,
        is_processor: is_processor(device),
    };
    Ok(found.map(words).collect())
}

/// llama.cpp's indexes of the named device: none for [`CPU`]. Errors: there is no such device.
pub(super) fn indices(name: &str) -> Result<Vec<usize>, LoadError> {
    if name.eq_ignore_ascii_case(CPU) {
        return Ok(Vec::new());
    }
    let listed = listed()?;
    let Some(device) = listed.iter().find(|device| is_gpu(device) && is_called(device, name)) else {
        let known: Vec<&str> = listed.iter().filter(|d| is_gpu(d)).map(|d| d.name.as_str()).collect();
        let known = if known.is_empty() { "only cpu".to_owned() } else { format!("cpu, {}", known.join(", ")) };
        return Err(LoadError::Config(format!("there is no device {name:?} here; there is {known}")));
    };
    Ok(vec![device.index])
}

fn listed() -> Result<Vec<LlamaBackendDevice>, LoadError> {
    backend()?;
    Ok(list_llama_ggml_backend_devices())
}

fn is_processor(device: &LlamaBackendDevice) -> bool {
    device.device_type == LlamaBackendDeviceType::Cpu
}

fn is_gpu(device: &LlamaBackendDevice) -> bool {
    matches!(device.device_type, LlamaBackendDeviceType::Gpu | LlamaBackendDeviceType::IntegratedGpu)
        && device.backend != WORKERS_BACKEND
}

fn is_called(device: &LlamaBackendDevice, name: &str) -> bool {
    device.name.eq_ignore_ascii_case(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_always_listed_and_gpus_are_found_by_name() {
        let devices = all().unwrap();
        assert_eq!(devices[0].name, CPU);
        assert_eq!(indices("CPU").unwrap(), Vec::<usize>::new());
        let error = indices("Warp9").unwrap_err().to_string();
        assert!(error.contains("\"Warp9\"") && error.contains("cpu"), "{error}");
        assert_eq!(in_use(Some(CPU), None).unwrap(), [processor().unwrap()]);
        assert_eq!(in_use(None, Some(0)).unwrap(), [processor().unwrap()]);
        assert!(first_gpu(Some(CPU), None).unwrap().is_none() && first_gpu(None, Some(0)).unwrap().is_none());
        assert!(check(Some(CPU), None).is_ok() && check(None, Some(0)).is_ok());
        assert_eq!(check(None, None).is_ok(), gpu_backends().is_empty() || devices.len() > 1);
        for gpu in &devices[1..] {
            assert_eq!(indices(&gpu.name).unwrap().len(), 1);
            assert!(in_use(Some(&gpu.name), None).unwrap()[0].starts_with(&gpu.name));
            assert_eq!(first_gpu(Some(&gpu.name), None).unwrap(), indices(&gpu.name).unwrap().first().copied());
        }
    }
}
