//! Decodes images, each in a step of its own.

use std::time::Instant;

use baton_schemas::EngineError;

use super::super::context::ModelContext;
use super::super::images::{ImageFailure, ImageRun, Preparation};
use super::super::vectors::Vectors;
use super::Scheduler;

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// Decodes the next image of the sequence that started first. Each turn of the loop decodes at most one, so that
    /// streams continue between two images. Such a step takes longer than others, because it includes the encoder.
    pub(super) fn decode_next_image(&mut self) {
        let due = (0..self.slots.len()).filter(|&slot| self.can_step(slot) && self.to_next_image(slot) == Some(0));
        let Some(slot) = due.min_by_key(|&slot| self.slots[slot].started) else { return };
        let Some(run) = self.next_image(slot).cloned() else { return };
        if !self.make_room(run.at.len()) {
            // A running sequence went back to the queue; the next turn tries again.
            return;
        }
        let Some(preparation) = self.preparations[slot].clone() else { return };
        match preparation.outcome() {
            Some(Ok(())) => {}
            Some(Err(error)) => return self.refuse(slot, error),
            None => return,
        }
        self.keep_marked(slot);
        let began = Instant::now();
        match self.context.decode_image(slot, &run, &preparation) {
            Ok(()) => {
                self.image_decoded(slot, &run);
                tracing::debug!(slot, n_tokens = run.at.len(), took = ?began.elapsed(), "an image was decoded");
            }
            // The next turn tries again.
            Err(ImageFailure::Busy) => {}
            // The first time, cells were freed for it. So the second time it is the projector that fails, and no other
            // sequence must lose its cells.
            Err(ImageFailure::NoCells) if self.running[slot].as_ref().is_some_and(|sequence| sequence.lacked_cells) => {
                self.refuse(slot, EngineError::internal("the projector could not see an image"));
            }
            Err(ImageFailure::NoCells) => {
                self.restore(slot);
                if let Some(sequence) = &mut self.running[slot] {
                    sequence.lacked_cells = true;
                }
                self.give_up_cells();
            }
            Err(ImageFailure::Failed(error)) => self.refuse(slot, error),
        }
    }

    /// Begins to prepare the next image of each sequence in a slot, so that at most one of each is in memory.
    pub(super) fn prepare_images(&mut self) {
        if !self.context.sees_images() {
            return;
        }
        for slot in 0..self.slots.len() {
            let Some(run) = self.next_image(slot).cloned() else { continue };
            // The pulled KV may include the image.
            if self.running[slot].as_ref().is_none_or(|sequence| sequence.import.is_some()) {
                continue;
            }
            if self.preparations[slot].as_ref().is_none_or(|preparation| preparation.start() != run.at.start) {
                self.preparations[slot] = self.context.prepare_image(&run);
            }
        }
    }

    /// Returns true if a slot's sequence can only go on with an image that cannot be decoded yet.
    pub(super) fn awaits_image(&self, slot: usize) -> bool {
        let is_prepared = |image: &ImageRun| {
            let preparation = self.preparations[slot].as_ref();
            preparation.is_some_and(|p| p.start() == image.at.start && p.outcome().is_some())
        };
        self.context.sees_images()
            && self.to_next_image(slot) == Some(0)
            && (!self.next_image(slot).is_some_and(is_prepared) || self.context.image_is_busy())
    }

    /// The number of tokens before the next image of a slot's sequence, if it has one.
    pub(super) fn to_next_image(&self, slot: usize) -> Option<usize> {
        self.next_image(slot).map(|run| run.at.start - self.slots[slot].kv.len())
    }

    fn next_image(&self, slot: usize) -> Option<&ImageRun> {
        let n_kv = self.slots[slot].kv.len();
        self.running[slot].as_ref()?.images.iter().find(|run| run.at.start >= n_kv)
    }

    /// Notes that the cache now holds an image.
    fn image_decoded(&mut self, slot: usize, run: &ImageRun) {
        let Some(sequence) = &mut self.running[slot] else { return };
        self.slots[slot].kv.extend_from_slice(&sequence.tokens[run.at.clone()]);
        self.preparations[slot] = None;
        sequence.lacked_cells = false;
        if sequence.first_token.is_none() {
            sequence.n_computed += run.at.len() as u32;
        }
    }

    /// Ends a sequence whose image cannot be decoded. The KV before the image stays cached.
    fn refuse(&mut self, slot: usize, error: EngineError) {
        tracing::warn!(slot, %error, "an image cannot be decoded; its sequence fails");
        self.restore(slot);
        if let Some(mut sequence) = self.release(slot) {
            sequence.send(Err(error));
        }
    }
}
