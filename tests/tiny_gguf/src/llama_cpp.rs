//! Asks llama.cpp which tensors a model needs, so that no list of them stands here: `llama_model_init_from_user` makes a
//! model from metadata alone, and calls back for each of its tensors.
//!
//! The only unsafe code of this crate.
#![allow(unsafe_code, reason = "llama.cpp's C interface")]

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::Mutex;

use llama_cpp_sys_2 as sys;

/// The name of each tensor that llama.cpp creates for a model of this header, and its dimensions as ggml counts them. The
/// header is a GGUF file without tensors. Panics if llama.cpp refuses it: `RUST_LOG=info` shows why in an engine's test.
pub(crate) fn tensors(header: &[u8]) -> Vec<(String, Vec<usize>)> {
    // The log's receiver is global.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    // SAFETY: the header outlives the calls; the metadata and the model are freed once, after their last use; `found` is
    // only used by the callback while `llama_model_init_from_user` runs, on this thread. The former receiver of the log
    // is set again.
    let is_model = unsafe {
        let params = sys::gguf_init_params { no_alloc: true, ctx: ptr::null_mut() };
        let metadata = sys::gguf_init_from_buffer(header.as_ptr().cast(), header.len(), params);
        assert!(!metadata.is_null(), "llama.cpp cannot read the header");
        let (mut log, mut log_data) = (None, ptr::null_mut());
        sys::llama_log_get(&raw mut log, &raw mut log_data);
        sys::llama_log_set(Some(errors_only), ptr::null_mut());
        let mut params = sys::llama_model_default_params();
        params.n_gpu_layers = 0;
        params.load_mtp = true;
        params.progress_callback = Some(go_on);
        let model = sys::llama_model_init_from_user(metadata, Some(keep), (&raw mut found).cast(), params);
        sys::llama_log_set(log, log_data);
        sys::gguf_free(metadata);
        if !model.is_null() {
            sys::llama_model_free(model);
        }
        !model.is_null()
    };
    assert!(is_model, "llama.cpp makes no model of the header");
    found
}

/// Adds a tensor to a `Vec<(String, Vec<usize>)>`.
unsafe extern "C" fn keep(tensor: *mut sys::ggml_tensor, found: *mut c_void) {
    // SAFETY: `tensors` passes its list; llama.cpp passes a tensor whose name ends with a zero byte.
    let (tensor, found, name) = unsafe {
        let tensor = &*tensor;
        (tensor, &mut *found.cast::<Vec<(String, Vec<usize>)>>(), CStr::from_ptr(tensor.name.as_ptr()))
    };
    let name = name.to_string_lossy().into_owned();
    // One that stands in two places is one tensor of the file.
    if found.iter().any(|(known, _)| *known == name) {
        return;
    }
    let n_dims = tensor.ne.iter().rposition(|&n| n > 1).map_or(1, |last| last + 1);
    found.push((name, tensor.ne[..n_dims].iter().map(|&n| n as usize).collect()));
}

unsafe extern "C" fn go_on(_progress: f32, _: *mut c_void) -> bool {
    true
}

unsafe extern "C" fn errors_only(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if level == sys::GGML_LOG_LEVEL_ERROR {
        // SAFETY: llama.cpp passes a string that ends with a zero byte.
        eprint!("{}", unsafe { CStr::from_ptr(text) }.to_string_lossy());
    }
}
