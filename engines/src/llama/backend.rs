//! llama.cpp's process-wide state.

use std::sync::OnceLock;

use llama_cpp_2::llama_backend::LlamaBackend;

use super::load_error::LoadError;

/// llama.cpp's backend, which is initialised once: the crate refuses a second initialisation.
pub(super) fn backend() -> Result<&'static LlamaBackend, LoadError> {
    static BACKEND: OnceLock<Result<LlamaBackend, String>> = OnceLock::new();
    let backend = BACKEND.get_or_init(|| {
        llama_cpp_2::send_logs_to_tracing(llama_cpp_2::LogOptions::default());
        LlamaBackend::init().map_err(|e| e.to_string())
    });
    backend.as_ref().map_err(|e| LoadError::Backend(e.clone()))
}
