//! Imports and exports a context's KV.

use std::sync::Arc;

use baton_schemas::kv::{Contiguous, KvLayout, Placement, Span};

use super::blob::form::BlobForm;
use super::compressed::transfer::CompressedTransfer;
use super::placement::BlobPlacement;
use super::probe::ProbedKv;
use super::transfer::KvTransfer;
use crate::serving::described::KvForm;

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
