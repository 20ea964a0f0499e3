//! Drafters that guess for several sequences in one pass, which takes time: a smaller model, or the model's own head.

use std::time::Duration;

use baton_schemas::Token;
use baton_schemas::draft::DrafterKind;

use super::super::context::ModelContext;
use super::draft_model::{DraftModel, FollowedSequence, WantedDraft};
use super::prediction_head::HeadDrafts;

pub(crate) enum BatchDrafter<C: ModelContext> {
    Model(DraftModel<C>),
    Head(HeadDrafts<C::Head>),
}

impl<C: ModelContext> BatchDrafter<C> {
    pub(crate) fn kind(&self) -> DrafterKind {
        match self {
            BatchDrafter::Model(_) => DrafterKind::DraftModel,
            BatchDrafter::Head(_) => DrafterKind::Mtp,
        }
    }

    /// The seconds of a pass, if a step of the model without drafts takes `step_seconds`.
    pub(crate) fn pass_seconds(&self, step_seconds: f64) -> f64 {
        match self {
            BatchDrafter::Model(model) => model.pass_seconds(step_seconds),
            BatchDrafter::Head(head) => head.pass_seconds(step_seconds),
        }
    }

    /// The most tokens that it can guess for a sequence now.
    pub(crate) fn most(&self, of: FollowedSequence<'_>) -> usize {
        match self {
            BatchDrafter::Model(model) => model.most(of),
            BatchDrafter::Head(head) => head.most(of),
        }
    }

    /// Seconds that the first guess for a sequence takes longer than a pass.
    pub(crate) fn catch_up_seconds(&self, of: FollowedSequence<'_>) -> f64 {
        match self {
            BatchDrafter::Model(model) => model.catch_up_seconds(of),
            BatchDrafter::Head(_) => 0.0,
        }
    }

    /// Lets a model compute tokens that it lacks, after a step that took `step`.
    pub(crate) fn catch_up(&mut self, sequences: &[FollowedSequence<'_>], step: Duration) {
        match self {
            BatchDrafter::Model(model) => model.catch_up(sequences, step),
            BatchDrafter::Head(_) => {}
        }
    }

    /// Guesses tokens for each sequence. A draft may be shorter than wanted.
    pub(crate) fn draft(&mut self, wanted: &mut [WantedDraft<'_>]) -> Vec<Vec<Token>> {
        match self {
            BatchDrafter::Model(model) => model.draft(wanted),
            BatchDrafter::Head(head) => head.draft(wanted),
        }
    }

    /// Nothing of a slot stays.
    pub(crate) fn forget(&mut self, slot: usize) {
        match self {
            BatchDrafter::Model(model) => model.forget(slot),
            BatchDrafter::Head(head) => head.forget(slot),
        }
    }
}
