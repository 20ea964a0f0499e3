//! Shows the states of recurrent layers as soon as each is computed, while llama.cpp goes on with the next layer.
//!
//! llama.cpp shows a tensor of its graph only through a callback of the context, which its Rust binding cannot set. A layer's
//! new state is copied into the cache; that copy is what the callback waits for. Without a visitor it asks for
//! nothing. ggml waits for the device after each part of a graph all the same, as long as there is a callback; what that costs on
//! a GPU was not measured.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::ptr;

use baton_schemas::kv::StateKind;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_sys_2 as sys;

/// llama.cpp's names for the caches of a layer's states, before the layer's number.
const CACHES: [(&str, StateKind); 2] = [("cache_r_l", StateKind::Convolution), ("cache_s_l", StateKind::Recurrence)];

/// The layer and the kind of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StateName {
    pub(super) kind: StateKind,
    /// The layer's number in the model.
    pub(super) layer: u32,
}

/// The callback of a context, and the visitor that it calls meanwhile.
pub(super) struct StateTap(&'static Tapped);

/// The callback's data. Never freed, since the context keeps its address.
struct Tapped {
    /// The visitor of the running computation; null between computations.
    visitor: Cell<*mut Visitor<'static>>,
    /// The caches have so many parts of equal size. The first one has the newest states, the others those before the last tokens.
    n_parts: usize,
}

// SAFETY: the pointer is null unless `during` runs, which borrows the tap and stays on its thread.
unsafe impl Send for StateTap {}

/// Looks at states.
pub(super) enum Visitor<'v> {
    /// Their names alone, before they are computed.
    Names(&'v mut dyn FnMut(StateName)),
    /// Their values, in the order in which they are computed. What is copied may be a part of a state.
    Values(&'v mut dyn FnMut(StateName, Vec<u8>)),
}

impl StateTap {
    /// For a context that keeps the states before `n_rollback` tokens, too. They are not shown.
    pub(super) fn new(n_rollback: u32) -> StateTap {
        let n_parts = n_rollback as usize + 1;
        StateTap(Box::leak(Box::new(Tapped { visitor: Cell::new(ptr::null_mut()), n_parts })))
    }

    /// Sets the callback in the parameters of a context.
    pub(super) fn attach(&self, params: &mut LlamaContextParams) {
        const {
            assert!(size_of::<LlamaContextParams>() == size_of::<sys::llama_context_params>());
            assert!(align_of::<LlamaContextParams>() == align_of::<sys::llama_context_params>());
        }
        // SAFETY: in the pinned version of the binding, llama.cpp's parameters are the only field. It is as large as the whole,
        // so it begins where the whole begins.
        let params = unsafe { &mut *ptr::from_mut(params).cast::<sys::llama_context_params>() };
        params.cb_eval = Some(evaluated);
        params.cb_eval_user_data = ptr::from_ref(self.0).cast_mut().cast();
    }

    /// Runs a computation of the tap's context, whose states `visitor` sees.
    pub(super) fn during<R>(&self, mut visitor: Visitor<'_>, compute: impl FnOnce() -> R) -> R {
        /// Also if `compute` panics, nothing refers to the visitor afterwards.
        struct Reset<'t>(&'t Cell<*mut Visitor<'static>>);
        impl Drop for Reset<'_> {
            fn drop(&mut self) {
                self.0.set(ptr::null_mut());
            }
        }
        let _reset = Reset(&self.0.visitor);
        self.0.visitor.set((&raw mut visitor).cast());
        compute()
    }
}

/// llama.cpp calls this twice for a tensor: first it asks whether to show it, then it shows it.
unsafe extern "C" fn evaluated(tensor: *mut sys::ggml_tensor, asks: bool, data: *mut c_void) -> bool {
    // SAFETY: `attach` gave llama.cpp the address, which is never freed.
    let Tapped { visitor, n_parts } = unsafe { &*data.cast::<Tapped>() };
    // SAFETY: `during` has set the pointer to a visitor that lives while it computes, and uses it for nothing else.
    let Some(visitor) = (unsafe { visitor.get().as_mut() }) else { return !asks };
    // SAFETY: llama.cpp passes a tensor of its graph.
    let Some((name, tensor, n_bytes)) = (unsafe { state_of(tensor, *n_parts) }) else { return !asks };
    match visitor {
        Visitor::Names(see) => {
            if asks {
                see(name);
            }
            !asks
        }
        Visitor::Values(see) => {
            if !asks {
                // SAFETY: as above; the tensor is computed when it is shown.
                see(name, unsafe { values(tensor, n_bytes) });
            }
            true
        }
    }
}

/// The newest state that a tensor copies into the cache, and its bytes, which are the tensor's first ones.
///
/// # Safety
/// The tensor is one of a graph of ggml.
unsafe fn state_of<'t>(
    tensor: *mut sys::ggml_tensor,
    n_parts: usize,
) -> Option<(StateName, &'t sys::ggml_tensor, usize)> {
    // SAFETY: by the caller.
    let tensor = unsafe { tensor.as_ref() }.filter(|tensor| tensor.op == sys::GGML_OP_CPY)?;
    // SAFETY: a view's source is valid as long as the view.
    let cache = unsafe { tensor.view_src.as_ref() }?;
    // SAFETY: ggml ends every name with a zero, within the tensor.
    let cache_name = unsafe { CStr::from_ptr(cache.name.as_ptr()) }.to_str().ok()?;
    let named = |(prefix, kind): &(&str, StateKind)| {
        Some(StateName { kind: *kind, layer: cache_name.strip_prefix(prefix)?.parse().ok()? })
    };
    let name = CACHES.iter().find_map(named)?;
    // SAFETY: as above.
    let (part_bytes, is_contiguous, all_bytes) =
        unsafe { (sys::ggml_nbytes(cache) / n_parts, sys::ggml_is_contiguous(tensor), sys::ggml_nbytes(tensor)) };
    // One copy may write a state to each part. Then they are the tensor's third dimension.
    let [_, n_rows, n_states, _] = tensor.ne;
    let (is_whole, n_bytes) = match n_parts > 1 && n_states > 1 {
        true => (n_rows == 1, tensor.nb[1]),
        false => (is_contiguous, all_bytes),
    };
    (is_whole && n_bytes > 0 && tensor.view_offs < part_bytes).then_some((name, tensor, n_bytes))
}

/// Copies a tensor's first `n_bytes`.
///
/// # Safety
/// The tensor is computed, and has so many contiguous bytes.
unsafe fn values(tensor: &sys::ggml_tensor, n_bytes: usize) -> Vec<u8> {
    // SAFETY: by the caller; the buffer has as many bytes.
    unsafe {
        let mut copy = vec![0; n_bytes];
        sys::ggml_backend_tensor_get(tensor, copy.as_mut_ptr().cast(), 0, copy.len());
        copy
    }
}
