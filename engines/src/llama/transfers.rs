//! Imports and exports a context's KV.

use std::ops::Range;
use std::sync::Arc;

use baton_schemas::kv::{Chunk, Contiguous, KvLayout, Placement, Span, StatePart, VerifiedKv};
use bytes::Bytes;
use llama_cpp_2::context::LlamaContext;

use super::blob::form::BlobForm;
use super::compressed::transfer::CompressedTransfer;
use super::import_state::ImportState;
use super::placement::{BlobPlacement, ImportBlob};
use super::positions::TokenPositions;
use super::probe::ProbedKv;
use super::transfer::KvTransfer;
use crate::serving::context::{ExportTo, NO_STATES};
use crate::serving::described::KvForm;

/// A slot whose KV is moved.
pub(super) struct MovedSlot {
    pub(super) slot: u32,
    /// The positions of its tokens.
    pub(super) at: TokenPositions,
}

/// Imports and exports KV, by the kind of cache.
pub(super) enum Transfers {
    /// All slots share one cache.
    Shared {
        to_node: KvTransfer,
        /// With buffers of its own, since copies in this process keep theirs, and not in pinned memory, which is scarce.
        to_host: KvTransfer,
    },
    /// Each slot has a cache of its own.
    Separate(CompressedTransfer),
}

impl Transfers {
    /// The transfers of a context with `n_slots` slots.
    pub(super) fn of(probed: ProbedKv, n_slots: u32) -> Transfers {
        match probed {
            ProbedKv::Shared(to_node) => {
                let to_host = KvTransfer::new(BlobForm::clone(to_node.form()), n_slots, None);
                Transfers::Shared { to_node, to_host }
            }
            ProbedKv::Separate(transfer) => Transfers::Separate(transfer),
        }
    }

    #[cfg(test)]
    pub(super) fn form(&self) -> KvForm {
        match self {
            Transfers::Shared { to_node, .. } => shared_form(to_node),
            Transfers::Separate(transfer) => KvForm::rows(KvLayout::clone(transfer.layout())),
        }
    }

    /// Exports the rows of some positions, as a part of a prompt that ends at `end`. Errors, in words: as for all of these.
    pub(super) fn export(
        &mut self,
        context: &mut LlamaContext<'_>,
        of: &MovedSlot,
        (positions, end): (Range<u32>, u32),
        to: ExportTo,
    ) -> Result<Chunk, String> {
        let exported = match (self, to) {
            (Transfers::Shared { to_node, .. }, ExportTo::Node) => {
                to_node.among(&of.at).export(context, of.slot, positions, end)
            }
            (Transfers::Shared { to_host, .. }, ExportTo::Host) => {
                to_host.among(&of.at).export(context, of.slot, positions, end)
            }
            (Transfers::Separate(transfer), _) => transfer.export(context, of.slot, positions, end),
        };
        exported.map_err(|e| e.to_string())
    }

    /// Adds a received chunk to a slot that holds `n_present` positions. Returns the chunk's buffer.
    pub(super) fn import(
        &mut self,
        context: &mut LlamaContext<'_>,
        of: &MovedSlot,
        n_present: u32,
        chunk: VerifiedKv,
    ) -> Result<Vec<u8>, String> {
        let transfer = match self {
            Transfers::Shared { to_node, .. } => to_node,
            Transfers::Separate(transfer) => {
                let received = transfer.receive(context, of.slot, n_present, chunk);
                // The chunk keeps its buffer until its states come.
                return received.map(|()| Vec::new()).map_err(|e| e.to_string());
            }
        };
        // The chunk's buffer becomes the blob: no row is copied.
        let span = chunk.span();
        let placement = BlobPlacement::among(transfer.form(), span.p0..span.p1, &span.starts, of.at.clone());
        let blob = placement.and_then(|p| p.seal(chunk)).map_err(|e| e.to_string())?;
        transfer.import(context, of.slot, n_present, &blob).map_err(|e| e.to_string())?;
        Ok(blob.into_buffer())
    }

    /// Adds a chunk that this context exported.
    pub(super) fn restore(
        &mut self,
        context: &mut LlamaContext<'_>,
        of: &MovedSlot,
        chunk: &Chunk,
    ) -> Result<(), String> {
        let transfer = match self {
            Transfers::Shared { to_host, .. } => to_host,
            Transfers::Separate(transfer) => {
                return transfer.restore(context, of.slot, chunk).map_err(|e| e.to_string());
            }
        };
        let buffer = transfer.imports().take().unwrap_or_default();
        let blob = ImportBlob::build_among(chunk, transfer.form(), of.at.clone(), buffer).map_err(|e| e.to_string())?;
        let imported = transfer.import(context, of.slot, chunk.p0, &blob);
        transfer.imports().put(blob.into_buffer());
        imported.map_err(|e| e.to_string())
    }

    /// Gives a slot states of its last position, which come from another node or from this process.
    pub(super) fn import_state(
        &mut self,
        context: &mut LlamaContext<'_>,
        of: &MovedSlot,
        states: &ImportState,
        from: ExportTo,
    ) -> Result<(), String> {
        let imported = match (self, from) {
            (Transfers::Shared { to_node, .. }, ExportTo::Node) => {
                to_node.among(&of.at).import_state(context, of.slot, states)
            }
            (Transfers::Shared { to_host, .. }, ExportTo::Host) => {
                to_host.among(&of.at).import_state(context, of.slot, states)
            }
            (Transfers::Separate(transfer), _) => transfer.import_state(context, of.slot, states),
        };
        imported.map_err(|e| e.to_string())
    }

    /// Exports all states of a slot that ends at `position`.
    pub(super) fn export_state(
        &self,
        context: &LlamaContext<'_>,
        of: &MovedSlot,
        position: u32,
    ) -> Result<StatePart, String> {
        let exported = match self {
            Transfers::Shared { to_node, .. } => to_node.among(&of.at).export_state(context, of.slot, position),
            Transfers::Separate(transfer) => transfer.export_state(context, of.slot, position),
        };
        exported.map_err(|e| e.to_string())
    }

    /// The states in a checkpoint of the first `position` tokens.
    pub(super) fn states_of(&self, position: u32, checkpoint: &Bytes) -> Result<StatePart, String> {
        let states = match self {
            Transfers::Shared { to_node, .. } => to_node.states_of(checkpoint).map_err(|e| e.to_string())?,
            Transfers::Separate(transfer) => Some(transfer.states_of(position, checkpoint).map_err(|e| e.to_string())?),
        };
        // A checkpoint has the end of its positions.
        states.map(|part| StatePart { position, ..part }).ok_or_else(|| NO_STATES.into())
    }

    pub(super) fn layout(&self) -> &Arc<KvLayout> {
        match self {
            Transfers::Shared { to_node, .. } => to_node.layout(),
            Transfers::Separate(transfer) => transfer.layout(),
        }
    }
}

/// The way in which a context's KV is handed over.
pub(crate) fn kv_form(probed: &ProbedKv) -> KvForm {
    match probed {
        ProbedKv::Shared(transfer) => shared_form(transfer),
        ProbedKv::Separate(transfer) => KvForm::rows(KvLayout::clone(transfer.layout())),
    }
}

/// A chunk's rows are placed where llama.cpp's state format has them, so that the import copies nothing.
fn shared_form(transfer: &KvTransfer) -> KvForm {
    let form = Arc::clone(transfer.form());
    let placement = Arc::new(move |span: &Span, layout: &KvLayout| {
        let placed = BlobPlacement::new(&form, span.p0..span.p1, &span.starts);
        placed.map_or_else(|_| Contiguous.place(span, layout), |placement| placement.places())
    });
    KvForm { layout: Arc::clone(transfer.layout()), placement, buffers: transfer.imports().clone() }
}
