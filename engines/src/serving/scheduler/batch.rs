//! A step's batch: its rows, and what is noted once they are computed.

use std::time::Instant;

use super::super::context::{BatchToken, ModelContext};
use super::super::prompt_scores::NotFinite;
use super::super::sequence::Sequence;
use super::super::vectors::Vectors;
use super::speculating::MASKS_WAIT;
use super::{BatchPart, Scheduler};

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// Lays out the rows of the parts, each with those of its draft behind it.
    pub(super) fn fill_batch(&mut self, parts: &mut [BatchPart]) {
        self.batch.clear();
        for part in parts {
            let Some(sequence) = &self.running[part.slot] else { continue };
            let from = self.slots[part.slot].kv.len();
            part.first_at = self.batch.len();
            let wants_logits = part.logits_at.is_some() || sequence.scores.is_some();
            let tokens = sequence.tokens.iter().enumerate().skip(from).take(part.n_tokens);
            self.batch.extend(tokens.map(|(position, &token)| BatchToken {
                token,
                position: position as u32,
                slot: part.slot as u32,
                wants_logits,
            }));
            if part.logits_at.is_some() {
                part.logits_at = Some(self.batch.len() - 1);
            }
            let positions = from + part.n_tokens..;
            self.batch.extend(positions.zip(&part.draft).map(|(position, &token)| BatchToken {
                token,
                position: position as u32,
                slot: part.slot as u32,
                wants_logits: true,
            }));
        }
    }

    /// Takes what a step has computed: draws tokens, and learns what the step cost.
    pub(super) fn take_computed(&mut self, parts: &[BatchPart], began: Instant) {
        if self.speculating.is_some() && parts.iter().any(|part| part.logits_at.is_some()) {
            // Some devices have only queued the work.
            self.context.synchronize();
        }
        self.commit(parts);
        parts.iter().for_each(|part| self.score_prompt(part));
        let took = began.elapsed();
        self.account(parts, took);
        let masks_until = Instant::now() + MASKS_WAIT;
        let n_right: Vec<usize> = parts.iter().map(|part| self.sample_part(part, parts.len(), masks_until)).collect();
        for part in parts {
            self.running[part.slot].iter_mut().for_each(Sequence::send_drawn);
        }
        self.note_hidden(parts);
        self.learn_rates(parts, n_right.iter().sum(), took + self.drafting_time());
        self.learn_costs(parts, took, &n_right);
        self.catch_up(parts, took);
    }

    /// Keeps the log-probabilities of the prompt's tokens that a step's logits predict, if the sequence reports them.
    fn score_prompt(&mut self, part: &BatchPart) {
        let Some(sequence) = &mut self.running[part.slot] else { return };
        let Some(scores) = &mut sequence.scores else { return };
        let first = self.slots[part.slot].kv.len() - part.n_tokens;
        for (at, idx) in (part.first_at..).zip(first + 1..first + 1 + part.n_tokens) {
            let Some(&id) = sequence.tokens.get(idx) else { break };
            let logits = self.context.logits(at);
            if let Err(NotFinite) = scores.score(idx, id, logits, &self.vocabulary) {
                return self.fail_not_finite(part.slot);
            }
        }
        sequence.send_scored();
    }

    /// Records in the slots the tokens whose KV the step computed.
    fn commit(&mut self, parts: &[BatchPart]) {
        for part in parts {
            let Some(sequence) = &mut self.running[part.slot] else { continue };
            let kv = &mut self.slots[part.slot].kv;
            let from = kv.len();
            kv.extend_from_slice(&sequence.tokens[from..from + part.n_tokens]);
            if sequence.first_token.is_none() {
                sequence.n_computed += part.n_tokens as u32;
            }
            sequence.refused.take_if(|refused| refused.end <= kv.len());
            if kv.len() + 1 >= sequence.tokens.len() {
                sequence.prefilled.get_or_insert_with(Instant::now);
            }
        }
    }
}
