//! The cost of a pass of a model's own head, beside a step of the model. `baton-bench speculate` shows it.

use std::time::Instant;

use baton_model::gguf::Gguf;

use super::backend::NAME;
use super::context::LlamaSlots;
use super::head::LlamaHead;
use super::load::{self, ContextSizes};
use super::placed::Placed;
use crate::engine_options::EngineOptions;
use crate::serving::LoadError;
use crate::serving::context::{BatchToken, ComputeError, ModelContext, PredictionHead};

/// Cells of both caches.
const N_CELLS: u32 = 512;

/// The medians of steps and passes with one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadCost {
    pub step_seconds: f64,
    pub pass_seconds: f64,
}

/// Computes so many steps, each followed by a pass. `None`: no head guesses with these options.
pub fn head_cost(options: &EngineOptions, n: u32) -> Result<Option<HeadCost>, LoadError> {
    let gguf = Gguf::open(options.path()?)?;
    let Some(found) = load::head(options, &gguf) else { return Ok(None) };
    let model = load::model(options, &gguf, &Placed::alone())?;
    let sizes = ContextSizes { n_cells: N_CELLS, n_batch: options.ubatch(), n_rollback: 0 };
    let context = load::context(&model, options, None, sizes)?;
    let mut slots = LlamaSlots::new(context, 1).with_states(load::has_states(&model), None);
    let Some(mut head) = LlamaHead::create(&model, options, N_CELLS, found)? else { return Ok(None) };
    let hidden = vec![0.5; head.n_values()];
    let (mut steps, mut passes) = (Vec::new(), Vec::new());
    for position in 0..n.clamp(1, N_CELLS) {
        let row = BatchToken { token: position % 64 + 1, position, slot: 0, wants_logits: true };
        let timed = |seconds: &mut Vec<f64>, compute: &mut dyn FnMut() -> Result<(), ComputeError>| {
            let began = Instant::now();
            let computed = compute();
            seconds.push(began.elapsed().as_secs_f64());
            computed.map_err(|error| LoadError::Refused { library: NAME, why: error.to_string() })
        };
        timed(&mut steps, &mut || slots.compute(&[row]).map(|()| read(slots.logits(0))))?;
        timed(&mut passes, &mut || head.compute(&[row], &hidden).map(|()| read(head.logits(0))))?;
    }
    Ok(Some(HeadCost { step_seconds: median(steps), pass_seconds: median(passes) }))
}

/// Logits are computed when they are read.
fn read(logits: &[f32]) {
    std::hint::black_box(logits.first());
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
