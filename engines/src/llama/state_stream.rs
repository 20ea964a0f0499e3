//! Hands over the states of a prompt's end while the last tokens are computed: those of the first layers leave while the last
//! layers compute.

use baton_schemas::kv::{KvLayout, StateKind, StatePart};

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

    /// Computes the tokens before `position` of one sequence, alone and in one physical batch, and passes each state to `sink`
    /// when it is computed. Returns what was computed, and which states were not passed on because llama.cpp writes them in
    /// parts.
    pub(super) fn during<R>(
        &self,
        layout: &KvLayout,
        position: u32,
        sink: &mut dyn FnMut(StatePart),
        compute: impl FnOnce() -> R,
    ) -> (R, Vec<usize>) {
        let mut missing: Vec<usize> = (0..layout.states.len()).collect();
        let mut see = |name: StateName, values: Vec<u8>| {
            let Some(index) = self.index(layout, name) else { return };
            let is_whole = layout.states[index].values.bytes() == values.len();
            if let Some(place) = missing.iter().position(|i| *i == index).filter(|_| is_whole) {
                missing.swap_remove(place);
                sink(StatePart { position, first: index as u32, tensors: vec![values.into()] });
            }
        };
        let computed = self.tap.during(Visitor::Values(&mut see), compute);
        missing.sort_unstable();
        (computed, missing)
    }

    /// The index of a state in the layout, which has those of one kind in the order of layers.
    fn index(&self, layout: &KvLayout, name: StateName) -> Option<usize> {
        let n_convolutions = layout.states.iter().filter(|state| state.kind == StateKind::Convolution).count();
        let n_of_kind = match name.kind {
            StateKind::Convolution => n_convolutions,
            StateKind::Recurrence => layout.states.len() - n_convolutions,
        };
        // Layers of which some have no state of this kind cannot be told apart.
        let place =
            self.layers.iter().position(|layer| *layer == name.layer).filter(|_| self.layers.len() == n_of_kind)?;
        Some(if name.kind == StateKind::Convolution { place } else { n_convolutions + place })
    }
}

#[cfg(test)]
mod tests {
    use baton_model::gguf::Gguf;
    use tiny_gguf::Architecture;

    use super::*;
    use crate::engine_options::EngineOptions;
    use crate::llama::context::LlamaSlots;
    use crate::llama::placed::Placed;
    use crate::llama::{load, probe};
    use crate::serving::context::{BatchToken, ModelContext};

    const N_SLOTS: u32 = 3;

    /// The tokens of a slot at these positions; the last one wants logits.
    fn batch(slot: u32, positions: std::ops::Range<u32>) -> Vec<BatchToken> {
        let token = |position| BatchToken {
            token: (position * 7 + slot) % 250,
            position,
            slot,
            wants_logits: position + 1 == positions.end,
        };
        positions.clone().map(token).collect()
    }

    /// Streams the states of a prompt's last chunk beside other sequences, and compares them with those of its end.
    fn check(architecture: Architecture, is_streamed: bool) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        tiny_gguf::write(&path, architecture, 1);
        let options = EngineOptions {
            model: Some(path.clone()),
            n_slots: Some(N_SLOTS),
            n_threads: Some(1),
            n_gpu_layers: Some(0),
            ..EngineOptions::default()
        };
        let gguf = Gguf::open(&path).unwrap();
        let model = load::model(&options, &gguf, &Placed::alone()).unwrap();
        let slots = |is_watched: bool| {
            let (mut context, states) = match is_watched {
                true => load::watched_context(&model, &options, None, 1_024, 512).unwrap(),
                false => (load::context(&model, &options, None, 1_024, 512).unwrap(), None),
            };
            let transfer = probe::probe(&mut context, &model, &gguf, N_SLOTS, None).unwrap();
            LlamaSlots::new(context, 512).with_states(true, states).with_transfer(Some(transfer), N_SLOTS)
        };
        let layout = KvLayout::clone(slots(false).kv_layout().unwrap());
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
        let mut tensors = vec![None; layout.states.len()];
        for part in &parts {
            part.check(&layout).unwrap();
            assert_eq!(part.position, 100);
            for (tensor, index) in part.tensors.iter().zip(part.first as usize..) {
                assert!(tensors[index].replace(tensor.clone()).is_none(), "{architecture:?}: {index} came twice");
            }
        }
        let tensors: Vec<_> = tensors.into_iter().flatten().collect();
        assert!(tensors == whole.tensors, "{architecture:?}: the states of the end, each once");
        assert_eq!(parts.len() == tensors.len(), is_streamed, "{architecture:?}: {} parts", parts.len());
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
            Architecture::GraniteHybrid,
            Architecture::Lfm2,
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
