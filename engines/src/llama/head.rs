//! The model's own head, which predicts further tokens: a second context of the same model, which computes the head alone.
//!
//! llama.cpp calls it MTP, or nextn. Its rows are a token and the hidden row of the token before it, so they need the batches of
//! `llama_batch_ext`. Two functions that show hidden rows are declared in C++ alone (`llama-ext.h`), and are called by their C++
//! names.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};

use baton_model::gguf::{FoundHead, HeadRows};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_sys_2 as sys;

use super::load;
use crate::engine_options::EngineOptions;
use crate::serving::LoadError;
use crate::serving::context::{BatchToken, ComputeError, PredictionHead};
use crate::serving::drafting::draft_model::DraftLimits;
use crate::serving::drafting::prediction_head::HeadDrafts;
use crate::serving::scheduler::SchedulerLimits;

unsafe extern "C" {
    #[link_name = "_Z26llama_set_embeddings_nextnP13llama_contextbb"]
    fn llama_set_embeddings_nextn(context: *mut sys::llama_context, value: bool, masked: bool);

    #[link_name = "_Z30llama_get_embeddings_nextn_ithP13llama_contexti"]
    fn llama_get_embeddings_nextn_ith(context: *mut sys::llama_context, index: i32) -> *mut f32;
}

/// A context that shows the hidden rows of its last batch.
pub(crate) struct HiddenRows {
    n_values: usize,
}

impl HiddenRows {
    /// Lets a context show the hidden rows of all tokens. `None`: llama.cpp's context is not found.
    pub(crate) fn of_all(context: &LlamaContext<'_>) -> Option<HiddenRows> {
        HiddenRows::show(context, HeadRows::All)
    }

    fn show(context: &LlamaContext<'_>, rows: HeadRows) -> Option<HiddenRows> {
        let context = address(context)?;
        // SAFETY: the context is alive. Its model is, too. Both functions only set and read numbers.
        let n_values = unsafe {
            llama_set_embeddings_nextn(context.as_ptr(), true, rows == HeadRows::WithLogits);
            sys::llama_model_n_embd_out(sys::llama_get_model(context.as_ptr()))
        };
        Some(HiddenRows { n_values: usize::try_from(n_values).ok()? })
    }

    /// The hidden row of the last batch's token at `index`. Empty if it is not shown.
    pub(super) fn row<'c>(&self, context: &'c mut LlamaContext<'_>, index: usize) -> &'c [f32] {
        let (Some(context), Ok(index)) = (address(context), i32::try_from(index)) else { return &[] };
        // SAFETY: the context is alive, and borrowed mutably, so nothing computes with it. llama.cpp checks the index, and
        // returns null if the row is not there. A row has as many values as the model says, and stays until the next batch.
        unsafe {
            let row = llama_get_embeddings_nextn_ith(context.as_ptr(), index);
            if row.is_null() { &[] } else { std::slice::from_raw_parts(row, self.n_values) }
        }
    }
}

/// llama.cpp's own context, whose address the binding only shows when it is printed.
fn address(context: &LlamaContext<'_>) -> Option<NonNull<sys::llama_context>> {
    let printed = format!("{context:?}");
    let (_, digits) = printed.split_once("0x")?;
    let n = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
    NonNull::new(ptr::with_exposed_provenance_mut(usize::from_str_radix(&digits[..n], 16).ok()?))
}

/// The head's context.
pub(crate) struct LlamaHead<'m> {
    context: LlamaContext<'m>,
    rows: HiddenRows,
    batch: NonNull<sys::llama_batch_ext>,
}

impl<'m> LlamaHead<'m> {
    /// Creates the context of a model whose head is loaded, with a sequence for each slot and `n_cells`.
    pub(crate) fn create(
        model: &'m LlamaModel,
        options: &EngineOptions,
        n_cells: u32,
        head: FoundHead,
    ) -> Result<Option<LlamaHead<'m>>, LoadError> {
        let context = load::head_context(model, options, n_cells)?;
        let found = HiddenRows::show(&context, head.rows).zip(address(&context));
        let Some((rows, address)) = found else { return Ok(None) };
        // SAFETY: the context is alive; the batch is freed before it.
        let batch = NonNull::new(unsafe { sys::llama_batch_ext_init(address.as_ptr()) });
        Ok(batch.map(|batch| LlamaHead { context, rows, batch }))
    }

    /// The drafter for a model with these limits.
    pub(crate) fn drafts(self, limits: &SchedulerLimits, n_layer: u32, n_batch: usize) -> HeadDrafts<LlamaHead<'m>> {
        let limits = DraftLimits {
            n_slots: limits.n_slots,
            n_ctx: limits.n_ctx,
            n_cells: limits.n_cells,
            n_batch,
            share_of_target: 1.0 / f64::from(n_layer.max(1)),
        };
        HeadDrafts::new(self, limits)
    }

    fn add(&mut self, row: BatchToken, hidden: &[f32]) -> Result<(), ComputeError> {
        let refused = || ComputeError::Refused("llama.cpp takes no row for the head".into());
        let [slot, token, position] = [row.slot, row.token, row.position].map(u32::cast_signed);
        let hidden = sys::llama_embd { data: hidden.as_ptr(), n_rows: 1, n_embd: hidden.len() };
        let batch = self.batch.as_ptr();
        // SAFETY: the batch is alive. llama.cpp checks slot, token and the length of the hidden row, and copies that.
        let is_added = unsafe {
            let index = sys::llama_batch_ext_add_token(batch, slot, token);
            index >= 0
                && sys::llama_batch_ext_set_pos(batch, index, &raw const position)
                && sys::llama_batch_ext_set_embd_token(batch, index, hidden)
                && sys::llama_batch_ext_set_output_logits(batch, index, row.wants_logits)
        };
        is_added.then_some(()).ok_or_else(refused)
    }
}

impl PredictionHead for LlamaHead<'_> {
    fn n_values(&self) -> usize {
        self.rows.n_values
    }

    fn compute(&mut self, batch: &[BatchToken], hidden: &[f32]) -> Result<(), ComputeError> {
        // SAFETY: the batch is alive.
        unsafe { sys::llama_batch_ext_clear(self.batch.as_ptr()) };
        for (row, hidden) in batch.iter().zip(hidden.chunks_exact(self.rows.n_values.max(1))) {
            self.add(*row, hidden)?;
        }
        let context = address(&self.context).ok_or_else(|| ComputeError::Refused("its context is not found".into()))?;
        // SAFETY: the context and the batch are alive, and nothing else uses them. The batch is no longer than the context's.
        let code = unsafe { sys::llama_process(context.as_ptr(), sys::LLAMA_PROCESS_TYPE_DECODE, self.batch.as_ptr()) };
        match code {
            0 => Ok(()),
            1 => Err(ComputeError::NoCells),
            code => Err(ComputeError::Refused(format!("llama.cpp cannot compute the head: {code}"))),
        }
    }

    fn logits(&mut self, index: usize) -> &[f32] {
        self.context.get_logits_ith(i32::try_from(index).unwrap_or(i32::MAX))
    }

    fn hidden(&mut self, index: usize) -> &[f32] {
        self.rows.row(&mut self.context, index)
    }

    fn cut(&mut self, slot: usize, from: usize) {
        // The head has no states, so nothing that a slot has can stay against its will.
        let removed = self.context.clear_kv_cache_seq(Some(slot as u32), Some(from as u32), None);
        debug_assert!(removed.is_ok(), "a slot fits an i32");
    }
}

impl Drop for LlamaHead<'_> {
    fn drop(&mut self) {
        // SAFETY: the batch was returned by llama.cpp, and this is the only place that frees it, before the context.
        unsafe { sys::llama_batch_ext_free(self.batch.as_ptr()) };
    }
}

#[cfg(test)]
#[path = "head_tests.rs"]
mod tests;
