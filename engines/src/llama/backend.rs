//! llama.cpp's process-wide state.

use std::sync::OnceLock;

use llama_cpp_2::llama_backend::LlamaBackend;

use crate::serving::LoadError;

/// The library's name, for people.
pub(super) const NAME: &str = "llama.cpp";

/// llama.cpp's backend, which is initialised once: the crate refuses a second initialisation.
pub(crate) fn backend() -> Result<&'static LlamaBackend, LoadError> {
    static BACKEND: OnceLock<Result<LlamaBackend, String>> = OnceLock::new();
    let backend = BACKEND.get_or_init(|| {
        llama_cpp_2::send_logs_to_tracing(llama_cpp_2::LogOptions::default());
        #[cfg(feature = "dynamic-backends")]
        load_libraries()?;
        LlamaBackend::init().map_err(|e| e.to_string())
    });
    backend.as_ref().map_err(|e| LoadError::Backend(e.clone()))
}

/// Loads the library of each kind of device that can be used here, and for the processor the best that it can run.
///
/// They are in `lib` beside the program, or in `../lib/baton` where it is installed. llama.cpp's own choice would include the
/// working directory. Errors: there is no library for the processor.
#[cfg(feature = "dynamic-backends")]
fn load_libraries() -> Result<(), String> {
    use llama_cpp_2::{LlamaBackendDeviceType, list_llama_ggml_backend_devices, llama_backend};

    let program = std::env::current_exe().map_err(|e| format!("where the program is cannot be read: {e}"))?;
    let folder = program.parent().ok_or("the program is in no folder")?;
    let found = ["lib", "../lib/baton"].map(|name| folder.join(name)).into_iter().find(|folder| folder.is_dir());
    let found = found.ok_or_else(|| format!("there is no folder lib beside {}", program.display()))?;
    if found.to_str().is_none() {
        return Err(format!("{} has a name that is not UTF-8", found.display()));
    }
    llama_backend::load_backends_from_path(&found);
    let is_processor = |device: &_| matches!(device, LlamaBackendDeviceType::Cpu);
    let has_processor = list_llama_ggml_backend_devices().iter().any(|device| is_processor(&device.device_type));
    has_processor.then_some(()).ok_or_else(|| format!("{} has no library for this processor", found.display()))
}
