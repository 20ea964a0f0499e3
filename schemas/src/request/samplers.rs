//! llama-server's `samplers`: which samplers apply, and in which order.

use serde::de::SeqAccess;

use super::invalid::quoted;
use super::read::{Read, Reading, ValueProblem, each_item};
use crate::sampling_fields::SamplingFields;

/// A sampler of this server, in the order in which they apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum LlamaSampler {
    Penalties,
    TopK,
    TopP,
    MinP,
    Temperature,
}

/// llama-server's names, its letters, and what they are here. Those without a sampler here are off unless another field
/// switches them on, which is refused by that field's name.
const NAMES: [(&str, char, Option<LlamaSampler>); 10] = [
    ("penalties", 'e', Some(LlamaSampler::Penalties)),
    ("dry", 'd', None),
    ("top_n_sigma", 's', None),
    ("top_k", 'k', Some(LlamaSampler::TopK)),
    ("typ_p", 'y', None),
    ("typical_p", 'y', None),
    ("top_p", 'p', Some(LlamaSampler::TopP)),
    ("min_p", 'm', Some(LlamaSampler::MinP)),
    ("xtc", 'x', None),
    ("temperature", 't', Some(LlamaSampler::Temperature)),
];

/// The samplers that apply, in this server's order. Penalties apply always: llama-server's own lists omit them.
#[derive(Debug, Default)]
pub(crate) struct Samplers(Vec<LlamaSampler>);

impl Samplers {
    /// Switches off the samplers that the list leaves out.
    pub(crate) fn leave_out_others(self, chosen: &mut SamplingFields) {
        let has = |sampler| self.0.contains(&sampler);
        chosen.top_k = if has(LlamaSampler::TopK) { chosen.top_k } else { Some(0) };
        chosen.top_p = if has(LlamaSampler::TopP) { chosen.top_p } else { Some(1.0) };
        chosen.min_p = if has(LlamaSampler::MinP) { chosen.min_p } else { Some(0.0) };
        chosen.temperature = if has(LlamaSampler::Temperature) { chosen.temperature } else { Some(1.0) };
    }

    fn push(&mut self, sampler: Option<LlamaSampler>) -> Result<(), ValueProblem> {
        let Some(sampler) = sampler else { return Ok(()) };
        if self.0.last().is_some_and(|last| *last >= sampler) {
            let order = "must have each sampler once, in the order penalties, top_k, top_p, min_p, temperature";
            return Err(ValueProblem::value(order));
        }
        self.0.push(sampler);
        Ok(())
    }
}

fn unknown(name: &str) -> ValueProblem {
    ValueProblem::value(format!("has an unknown sampler, {}", quoted(name)))
}

impl Read for Samplers {
    const EXPECTED: &'static str = "an array of samplers' names";

    fn string(letters: &str) -> Reading<Self> {
        let mut samplers = Samplers::default();
        for letter in letters.chars() {
            let named = NAMES.iter().find(|(_, known, _)| *known == letter);
            let (.., sampler) = named.ok_or_else(|| unknown(letter.encode_utf8(&mut [0; 4])))?;
            samplers.push(*sampler)?;
        }
        Ok(samplers)
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        let mut samplers = Ok(Samplers::default());
        each_item(items, |name: Reading<String>| {
            let Ok(read) = &mut samplers else { return };
            let pushed = name.and_then(|name| {
                let named = NAMES.iter().find(|(known, ..)| *known == name);
                read.push(named.ok_or_else(|| unknown(&name))?.2)
            });
            if let Err(problem) = pushed {
                samplers = Err(problem);
            }
        })?;
        Ok(samplers)
    }
}
