//! The queries of a prompt, as they meet K in every layer. `baton-bench calibrate-codec` weights the error of K with them.
//!
//! llama.cpp shows a tensor of its graph only through a callback that its Rust binding cannot set. So this loads the model once
//! more, computes prompts and frees all of it.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;

use baton_schemas::Token;
use llama_cpp_sys_2 as sys;

use super::backend::backend;
use super::load::threads;
use super::vocabulary::token;
use crate::engine_options::EngineOptions;
use crate::serving::LoadError;

/// What llama.cpp calls the K cache of a layer, before the layer's number.
const K_CACHE: &str = "cache_k_l";

/// The most heads, elements of a head and tokens that are copied.
const LIMIT: usize = 1 << 16;

/// The queries of one layer for the tokens of one batch, after RoPE.
#[derive(Debug)]
pub(super) struct Queries<'a> {
    /// The layer's number in the model.
    pub(super) layer: usize,
    /// Cells of the cache that they meet: a sliding window's has fewer.
    pub(super) n_cells: u64,
    /// The position of the first token.
    pub(super) p0: u32,
    pub(super) n_tokens: usize,
    pub(super) head_size: usize,
    /// `[n_heads][n_tokens][head_size]`.
    pub(super) values: &'a [f32],
}

/// A model with one context.
struct Session {
    model: NonNull<sys::llama_model>,
    context: NonNull<sys::llama_context>,
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: `watch` got both from llama.cpp, and nothing else has them. The context goes before its model.
        unsafe {
            sys::llama_free(self.context.as_ptr());
            sys::llama_model_free(self.model.as_ptr());
        }
    }
}

/// What the callback gets.
struct Watcher<'a> {
    p0: u32,
    copy: Vec<f32>,
    visit: &'a mut dyn FnMut(Queries<'_>),
}

/// Computes each prompt in batches of at most `n_ubatch` tokens in a cache of `n_cells`, and calls `visit` for every layer of
/// every batch.
pub(super) fn watch(
    options: &EngineOptions,
    n_cells: u32,
    prompts: &[Vec<Token>],
    visit: &mut dyn FnMut(Queries<'_>),
) -> Result<(), LoadError> {
    backend()?;
    let failed = || LoadError::Context { n_cells };
    let path = options.path()?.to_str().and_then(|path| CString::new(path).ok()).ok_or_else(failed)?;
    let mut watcher = Watcher { p0: 0, copy: Vec::new(), visit };
    let watcher = &raw mut watcher;
    let n_threads = i32::try_from(threads(options)).unwrap_or(i32::MAX);
    // SAFETY: the parameters are llama.cpp's own defaults with other numbers. The path lives through the call. What is returned
    // is checked, and freed by `Session`. The callback's data lives longer than the session, which is declared after it, and is
    // used by nothing else while llama.cpp computes.
    let session = unsafe {
        let mut params = sys::llama_context_default_params();
        params.n_ctx = n_cells;
        params.n_batch = options.ubatch();
        params.n_ubatch = options.ubatch();
        params.n_seq_max = 1;
        params.n_threads = n_threads;
        params.n_threads_batch = n_threads;
        params.swa_full = false;
        params.flash_attn_type = sys::LLAMA_FLASH_ATTN_TYPE_ENABLED;
        params.cb_eval = Some(evaluated);
        params.cb_eval_user_data = watcher.cast::<c_void>();
        let model = sys::llama_model_load_from_file(path.as_ptr(), sys::llama_model_default_params());
        let model = NonNull::new(model).ok_or_else(failed)?;
        match NonNull::new(sys::llama_init_from_model(model.as_ptr(), params)) {
            Some(context) => Session { model, context },
            None => {
                sys::llama_model_free(model.as_ptr());
                return Err(failed());
            }
        }
    };
    for prompt in prompts {
        let mut p0 = 0;
        for piece in prompt.chunks(options.ubatch().max(1) as usize) {
            let mut tokens: Vec<sys::llama_token> = piece.iter().map(|t| token(*t).0).collect();
            let n_tokens = i32::try_from(tokens.len()).map_err(|_| failed())?;
            // SAFETY: nothing else refers to the watcher between two batches.
            unsafe { (*watcher).p0 = p0 };
            // SAFETY: the context is valid, and the tokens outlive the call.
            let result = unsafe {
                sys::llama_decode(session.context.as_ptr(), sys::llama_batch_get_one(tokens.as_mut_ptr(), n_tokens))
            };
            if result != 0 {
                return Err(failed());
            }
            p0 += piece.len() as u32;
        }
        // SAFETY: the context is valid.
        unsafe { sys::llama_memory_clear(sys::llama_get_memory(session.context.as_ptr()), true) };
    }
    drop(session);
    Ok(())
}

/// llama.cpp calls this twice for a tensor: first it asks whether to show it, then it shows it.
unsafe extern "C" fn evaluated(tensor: *mut sys::ggml_tensor, asks: bool, data: *mut c_void) -> bool {
    // SAFETY: llama.cpp passes a valid tensor, and the data of `watch`, which nothing else uses meanwhile.
    let (tensor, watcher) = unsafe { (&*tensor, &mut *data.cast::<Watcher<'_>>()) };
    if tensor.op != sys::GGML_OP_FLASH_ATTN_EXT {
        return !asks;
    }
    if !asks {
        // SAFETY: attention has queries and keys as its first sources, which ggml keeps while the graph is computed.
        unsafe { show(tensor, watcher) };
    }
    true
}

/// Copies the queries of an attention and shows them.
///
/// # Safety
/// The tensor is a computed attention of ggml.
unsafe fn show(attention: &sys::ggml_tensor, watcher: &mut Watcher<'_>) {
    let [queries, keys, ..] = attention.src;
    // SAFETY: by the caller, both are valid.
    let (queries, keys) = unsafe { (&*queries, &*keys) };
    // SAFETY: a view's source is valid as long as the view.
    let cache = unsafe { keys.view_src.as_ref() }.unwrap_or(keys);
    // SAFETY: ggml ends every name with a zero, within the tensor.
    let name = unsafe { CStr::from_ptr(cache.name.as_ptr()) }.to_str().unwrap_or_default();
    let Some(layer) = name.strip_prefix(K_CACHE).and_then(|layer| layer.parse().ok()) else { return };
    let sizes = queries.ne.map(|n| usize::try_from(n).unwrap_or(0));
    let [head_size, n_tokens, n_heads, 1] = sizes else { return };
    if queries.type_ != sys::GGML_TYPE_F32 || sizes.iter().any(|n| *n == 0 || *n > LIMIT) {
        return;
    }
    watcher.copy.clear();
    watcher.copy.resize(n_heads * n_tokens * head_size, 0.0);
    let rows = watcher.copy.chunks_exact_mut(head_size).enumerate();
    for (i, row) in rows {
        let offset = (i % n_tokens) * queries.nb[1] + (i / n_tokens) * queries.nb[2];
        // SAFETY: the row has as many bytes as are copied, and ggml ends the process if they are not all in the tensor.
        unsafe { sys::ggml_backend_tensor_get(queries, row.as_mut_ptr().cast(), offset, size_of_val(row)) };
    }
    let n_cells = u64::try_from(cache.ne[1]).unwrap_or(0);
    (watcher.visit)(Queries { layer, n_cells, p0: watcher.p0, n_tokens, head_size, values: &watcher.copy });
}
