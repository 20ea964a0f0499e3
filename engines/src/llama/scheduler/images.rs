//! Images, each a step of its own between the others.

use std::time::Instant;

use baton_schemas::EngineError;

use super::super::projector::{ImageRun, Unseen};
use super::{Scheduler, seq_id};

impl Scheduler<'_> {
    /// Has the next image seen whose turn it is in its sequence: one in a turn of the loop, so that streams get on
    /// between two. They wait for it as for any step, which its encoder makes longer than others.
    pub(super) fn see_image(&mut self) {
        let due = (0..self.slots.len()).filter(|&slot| self.can_step(slot) && self.to_next_image(slot) == Some(0));
        let Some(slot) = due.min_by_key(|&slot| self.slots[slot].started) else { return };
        let Some(run) = self.next_image(slot).cloned() else { return };
        if !self.make_room(run.at.len()) {
            // A running sequence went back to the queue; the next turn looks anew.
            return;
        }
        let Some(projector) = self.projector.clone() else {
            return self.refuse(slot, EngineError::internal("an image without a projector"));
        };
        let began = Instant::now();
        match projector.see(&run, &mut self.context, seq_id(slot)) {
            Ok(()) => {
                self.seen(slot, &run);
                tracing::debug!(slot, n_tokens = run.at.len(), took = ?began.elapsed(), "an image was seen");
            }
            // Room was made for it, so a second time it is the projector that fails: others lose nothing to that.
            Err(Unseen::NoCells) if self.running[slot].as_ref().is_some_and(|sequence| sequence.was_unseen) => {
                self.refuse(slot, EngineError::internal("llama.cpp could not see an image"));
            }
            Err(Unseen::NoCells) => {
                self.restore(slot);
                if let Some(sequence) = &mut self.running[slot] {
                    sequence.was_unseen = true;
                }
                self.give_up_cells();
            }
            Err(Unseen::Failed(error)) => self.refuse(slot, error),
        }
    }

    /// Tokens that a slot's sequence has to compute before its next image, if it has one.
    pub(super) fn to_next_image(&self, slot: usize) -> Option<usize> {
        self.next_image(slot).map(|run| run.at.start - self.slots[slot].kv.len())
    }

    fn next_image(&self, slot: usize) -> Option<&ImageRun> {
        let n_kv = self.slots[slot].kv.len();
        self.running[slot].as_ref()?.images.iter().find(|run| run.at.start >= n_kv)
    }

    /// Notes that the cache now holds an image.
    fn seen(&mut self, slot: usize, run: &ImageRun) {
        let Some(sequence) = &mut self.running[slot] else { return };
        self.slots[slot].kv.extend_from_slice(&sequence.tokens[run.at.clone()]);
        sequence.was_unseen = false;
        if sequence.first_token.is_none() {
            sequence.n_computed += run.at.len() as u32;
        }
    }

    /// Ends a sequence whose image cannot be seen. What is before the image stays.
    fn refuse(&mut self, slot: usize, error: EngineError) {
        tracing::warn!(slot, %error, "an image could not be seen");
        self.restore(slot);
        if let Some(sequence) = self.release(slot) {
            sequence.send(Err(error));
        }
    }
}
