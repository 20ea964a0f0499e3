//! Hands over the states of a prompt's end while the last tokens are computed: those of the first layers leave while the last
//! layers compute.

use baton_schemas::kv::{StateKind, StatePart};
use bytes::Bytes;

use super::blob::form::StatesForm;
use super::state_tap::{StateName, StateTap, Visitor};

/// The states of a context, as they are computed.
pub(crate) struct StateStream {
    tap: StateTap,
    /// The numbers of the recurrent layers, in order. Empty until a batch was computed.
    layers: Vec<u32>,
}

impl StateStream {
    pub(super) fn new(tap: StateTap) -> StateStream {
        StateStream { tap, layers: Vec::new() }
    }

    /// Computes a batch. The first one tells which layers have states.
    pub(super) fn learn<R>(&mut self, compute: impl FnOnce() -> R) -> R {
        if !self.layers.is_empty() {
            return compute();
        }
        let layers = &mut self.layers;
        let computed = self.tap.during(Visitor::Names(&mut |name| layers.push(name.layer)), compute);
        self.layers.sort_unstable();
        self.layers.dedup();
        computed
    }

    /// Computes the tokens before `position` of one sequence, alone and in one physical batch, and passes states to `sink` when
    /// they are computed, in the layout's order. Returns what was computed, and the number of states that were passed on. The
    /// others were not seen, because llama.cpp writes them in parts, or follow one that was not.
    pub(super) fn during<R>(
        &self,
        form: &StatesForm,
        position: u32,
        sink: &mut dyn FnMut(StatePart),
        compute: impl FnOnce() -> R,
    ) -> (R, usize) {
        let order: Vec<usize> = form.of_layout().collect();
        let mut arrived = vec![None; order.len()];
        let mut n_sent = 0;
        let mut see = |name: StateName, values: Vec<u8>| {
            let Some(index) = self.index(form, name).filter(|i| form.shapes[*i].values.bytes() == values.len()) else {
                return;
            };
            if let Some(place) = order.iter().position(|i| *i == index) {
                arrived[place] = Some(values.into());
            }
            let tensors: Vec<Bytes> = arrived[n_sent..].iter_mut().map_while(Option::take).collect();
            if !tensors.is_empty() {
                let first = n_sent as u32;
                n_sent += tensors.len();
                sink(StatePart { position, first, tensors });
            }
        };
        let computed = self.tap.during(Visitor::Values(&mut see), compute);
        (computed, n_sent)
    }

    /// The index of a state in the form.
    fn index(&self, form: &StatesForm, name: StateName) -> Option<usize> {
        let n_recurrent = form.shapes.len() / 2;
        let layer = self.layers.iter().position(|layer| *layer == name.layer)?;
        let index = match name.kind {
            StateKind::Convolution => layer,
            StateKind::Recurrence => n_recurrent + layer,
            StateKind::Compressor | StateKind::CompressorScore => return None,
        };
        (self.layers.len() == n_recurrent).then_some(index)
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::kv::KvLayout;
    use tiny_gguf::Architecture;

    use super::*;
    use crate::llama::context::LlamaSlots;
    use crate::llama::context_tests::{Tiny, batch};
    use crate::serving::context::ModelContext;

    /// Streams the states of a prompt's last chunk beside other sequences, and compares them with those of its end.
    fn check(architecture: Architecture, is_streamed: bool) {
        let tiny = Tiny::new(architecture);
        let slots = |is_watched: bool| tiny.slots(is_watched);
        let layout = KvLayout::clone(&slots(false).form().unwrap().layout);
        let run = |slots: &mut LlamaSlots<'_>| {
            slots.compute(&batch(1, 0..40)).unwrap();
            slots.compute(&batch(0, 0..64)).unwrap();
            slots.compute(&batch(2, 0..30)).unwrap();
            slots.compute(&batch(1, 40..41)).unwrap();
            let mut parts: Vec<StatePart> = Vec::new();
            slots.compute_streaming_state(&batch(0, 64..100), &mut |part| parts.push(part)).unwrap();
            let whole = slots.export_state(0, 100).unwrap();
            slots.compute(&batch(0, 100..101)).unwrap();
            (parts, whole, slots.logits(0).to_vec())
        };
        let (parts, whole, logits) = run(&mut slots(true));
        let mut tensors = Vec::new();
        for part in &parts {
            part.check(&layout).unwrap();
            assert_eq!(
                (part.position, part.first as usize),
                (100, tensors.len()),
                "{architecture:?}: one after the other"
            );
            tensors.extend(part.tensors.clone());
        }
        assert!(tensors == whole.tensors, "{architecture:?}: the states of the end, each once");
        assert_eq!(parts.len() > 1, is_streamed, "{architecture:?}: {} parts", parts.len());
        let (in_one, plainly, expected) = run(&mut slots(false));
        assert!(in_one == [plainly.clone()] && plainly == whole, "{architecture:?}: without the callback");
        assert!(logits == expected, "{architecture:?}: the callback changes what is computed");
    }

    #[test]
    fn each_state_leaves_when_it_is_computed() {
        for architecture in [
            Architecture::Qwen35,
            Architecture::Qwen35Moe,
            Architecture::Qwen3Next,
            Architecture::NemotronH,
            Architecture::NemotronHMoe,
            Architecture::GraniteHybrid,
            Architecture::FalconH1,
            Architecture::Jamba,
            Architecture::MiniMax01,
            Architecture::Lfm2,
            Architecture::Lfm2Moe,
            Architecture::Lfm2Windowed,
            Architecture::Mamba2,
        ] {
            check(architecture, true);
        }
    }

    /// Their convolutions are copied in parts.
    #[test]
    fn states_that_llama_cpp_writes_in_parts_follow_the_batch() {
        for architecture in [Architecture::KimiLinear, Architecture::Glm5Next] {
            check(architecture, false);
        }
    }
}
