//! `baton-bench calibrate-codec`: measures how exactly each channel of K and each layer of a model has to be kept, and writes
//! the profile beside the model.
//!
//! - A channel of K matters as much as what queries multiply it with ([`key_energy`]). Its step is the smaller the more
//!   it does.
//! - A layer's K or V matters as much as predictions change when it alone is coded coarsely. For a given number of bits
//!   the divergence is least when the steps of tensors are inversely proportional to the root of what each contributes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_engines::codec_profile;
use baton_engines::llama::key_energy::{self, NoEnergy};
use baton_engines::llama::reference::Reference;
use baton_engines::llama::trial::{KvTrial, PromptKv};
use baton_engines::registry::EngineOptions;
use baton_fetch as models;
use baton_model::gguf::Gguf;
use baton_proxy::serve::{CommandFailure, model_files};
use baton_schemas::Token;
use baton_schemas::kv::{
    Chunk, Codec, CodecLoss, CodecProfile, KvLayout, MAX_PROFILE_BYTES, TensorProfile, channel_variances,
};
use clap::Args;

use super::divergence;
use super::subject::{self, CodecSums};

/// Ordinary text of many kinds, which no benchmark uses.
const TEXT: &str = include_str!("calibration.txt");

/// Tokens of a prompt, and after it those whose predictions are compared.
const N_PROMPT: usize = 512;
const N_NEXT: usize = 48;

/// Tokens of the KV cache: for a prompt and what comes after it.
const CELLS: u32 = 2_048;

/// Times the step of `kvq`: coarse enough that one tensor's errors show. The encoder limits the step of a few tensors.
const COARSE: f64 = 8.0;

/// Times the step of `kvq`. A step this fine changes predictions only through rounding in later layers, which any change
/// of a layer causes.
const FINE: f64 = 0.01;

/// The range of a tensor's weight. Measured divergences scatter.
const WEIGHTS: std::ops::RangeInclusive<f64> = 0.33..=3.0;

/// The least share of the mean divergence that every tensor counts.
const LEAST: f64 = 0.1;

/// Options of `baton-bench calibrate-codec`.
#[derive(Args)]
pub(crate) struct CalibrateArgs {
    /// .gguf file or catalogue name
    model: String,
    /// Prompts to measure with
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=16))]
    prompts: u32,
    /// Compute threads; by default one per core
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=512))]
    threads: Option<u32>,
    /// The profile's file; by default the model's name and `.kv-profile.json`, where nodes look for it
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// A prompt and the text's own tokens after it.
struct Prompt {
    tokens: Vec<Token>,
    next: Vec<Token>,
    /// The prompt's KV.
    plain: PromptKv,
    /// The predictions for `next`.
    expected: Vec<Vec<f32>>,
}

/// Measures a model and writes its profile.
#[allow(clippy::print_stdout, reason = "the figures are the command's result")]
pub(crate) async fn run(args: CalibrateArgs) -> Result<(), CommandFailure> {
    let path = models::pull(&args.model, &model_files::pull_options()?).await?;
    let out = args.out.unwrap_or_else(|| codec_profile::path(&path));
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(".".as_ref());
    // Fail on a wrong path before minutes of work.
    drop(temporary(folder)?);
    if out.is_dir() {
        return Err(CommandFailure(format!("{} is a folder", out.display())));
    }
    let options =
        EngineOptions { n_slots: Some(1), n_threads: args.threads, n_ubatch: Some(512), ..EngineOptions::of(&path) };
    let n_prompts = args.prompts as usize;
    let profile = tokio::task::spawn_blocking(move || measure(options, n_prompts)).await??;
    for CodecLoss { codec, mean_kl, ratio } in &profile.losses {
        println!("{:<10} {ratio:.2} times smaller, mean KL {mean_kl:.1e}", codec.as_str());
    }
    let text = serde_json::to_vec(&profile)?;
    if text.len() as u64 > MAX_PROFILE_BYTES {
        let n = text.len();
        return Err(CommandFailure(format!("the profile takes {n} bytes, and a node reads {MAX_PROFILE_BYTES}")));
    }
    let file = temporary(folder)?;
    std::fs::write(file.path(), text)?;
    file.persist(&out).map_err(|error| error.error)?;
    println!("written to {}", out.display());
    Ok(())
}

/// A file that others may read: a node may run as another user.
fn temporary(folder: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644));
    builder.tempfile_in(folder)
}

fn measure(options: EngineOptions, n_prompts: usize) -> Result<CodecProfile, CommandFailure> {
    let gguf = Gguf::open(options.path()?)?;
    let weights = gguf.fingerprint(&[])?.weights;
    let model = Reference::load(options)?;
    let mut trial = KvTrial::new(&model, CELLS)?;
    Codec::Kvq.check(trial.layout())?;
    let prompts = prompts(&model, &mut trial, n_prompts)?;
    eprintln!("{n_prompts} prompts of {N_PROMPT} tokens are computed");
    let mut tensors = weighed(&model, &trial, &prompts)?;
    add_divergences(&mut trial, &prompts, &mut tensors, weights)?;
    let profile = CodecProfile { weights, tensors: profiles(&tensors), losses: Vec::new() };
    profile.check(trial.layout())?;
    let losses = losses(&mut trial, &prompts, &Arc::new(profile.clone()))?;
    Ok(CodecProfile { losses, ..profile })
}

fn prompts(model: &Reference, trial: &mut KvTrial<'_>, n_prompts: usize) -> Result<Vec<Prompt>, CommandFailure> {
    let text = model.tokenize(TEXT);
    let beginning = model.beginning();
    let prompt = |i: usize| {
        let text = text.iter().cycle().skip(i * text.len() / n_prompts);
        let mut tokens: Vec<Token> = beginning.iter().chain(text).copied().take(N_PROMPT + N_NEXT).collect();
        let next = tokens.split_off(N_PROMPT);
        let plain = trial.prefill(&tokens, N_PROMPT)?;
        let expected = trial.logits(&plain, &next)?;
        Ok(Prompt { tokens, next, plain, expected })
    };
    (0..n_prompts).map(prompt).collect()
}

/// The spread of every tensor, and the energies of K's channels.
fn weighed(model: &Reference, trial: &KvTrial<'_>, prompts: &[Prompt]) -> Result<Vec<Weighed>, CommandFailure> {
    let (layout, rotation) = (trial.layout(), trial.rotation());
    let mut keys = match rotation {
        Some(rotation) => {
            // More than the window of any windowed layer and a batch, so that its cache is smaller than the other.
            let window = layout.sections.iter().filter_map(|section| section.window).max().unwrap_or(0);
            let n_cells = window.saturating_add(CELLS).next_multiple_of(256);
            let tokens: Vec<Vec<Token>> = prompts.iter().map(|prompt| prompt.tokens.clone()).collect();
            match key_energy::measure(model.options(), n_cells, &tokens, layout, rotation) {
                Ok(energies) => energies,
                Err(NoEnergy::Load(error)) => return Err(error.into()),
                Err(reason) => {
                    eprintln!("every channel of K counts alike, because {reason}");
                    Vec::new()
                }
            }
        }
        None => Vec::new(),
    }
    .into_iter();
    let mut variances: Vec<Vec<f64>> = layout.tensors().map(|rows| vec![0.0; rows.n_values as usize]).collect();
    for chunk in prompts.iter().flat_map(|prompt| &prompt.plain.chunks) {
        for (sums, measured) in variances.iter_mut().zip(channel_variances(layout, rotation, chunk)) {
            let sums = sums.iter_mut().zip(measured);
            sums.for_each(|(sum, variance)| *sum += f64::from(variance) / prompts.len() as f64);
        }
    }
    let layers = layout.sections.iter().flat_map(|section| &section.layers);
    let is_key = layers.flat_map(|layer| [Some(true), layer.v.map(|_| false)].into_iter().flatten());
    let weighed = |(is_key, variances): (bool, &Vec<f64>)| {
        let energy = if is_key { keys.next() } else { None };
        Weighed::new(variances, energy.as_deref())
    };
    Ok(is_key.zip(&variances).map(weighed).collect())
}

/// Measures what a coarse step of each tensor does to predictions, beyond what a fine one in its layer does.
fn add_divergences(
    trial: &mut KvTrial<'_>,
    prompts: &[Prompt],
    tensors: &mut [Weighed],
    weights: [u8; 32],
) -> Result<(), CommandFailure> {
    let layout = trial.layout().clone();
    let profile = |times: f64| {
        let steps = tensors.iter().map(|tensor| tensor.profile(times));
        Arc::new(CodecProfile { weights, tensors: steps.collect(), losses: Vec::new() })
    };
    let (coarse, fine) = (profile(COARSE), profile(FINE));
    for (n, prompt) in prompts.iter().enumerate() {
        let coded = |trial: &KvTrial<'_>, profile| {
            subject::through(Codec::Kvq, trial, Some(profile), &prompt.tokens, &prompt.plain)
        };
        let (coarse, fine) = (coded(trial, &coarse)?.kv, coded(trial, &fine)?.kv);
        let mut divergence = |coded: &PromptKv, index: usize| {
            let chunks = prompt.plain.chunks.iter().zip(&coded.chunks);
            let chunks = chunks.map(|(plain, coded)| with_tensor(plain, coded, &layout, index)).collect();
            let kv = PromptKv { chunks, state: prompt.plain.state.clone() };
            let found = trial.logits(&kv, &prompt.next)?;
            let divergence = mean_kl(&prompt.expected, &found);
            finite(divergence, "with one tensor coded")?;
            Ok::<_, CommandFailure>(divergence)
        };
        let mut index = 0;
        for layer in layout.sections.iter().flat_map(|section| &section.layers) {
            let of_fine = divergence(&fine, index)?;
            for _ in 0..1 + usize::from(layer.v.is_some()) {
                eprint!("\rprompt {} of {}, tensor {} of {} ", n + 1, prompts.len(), index + 1, tensors.len());
                tensors[index].divergence += (divergence(&coarse, index)? - of_fine) / prompts.len() as f64;
                index += 1;
            }
        }
    }
    eprintln!();
    Ok(())
}

/// A chunk with the rows of one tensor from another.
fn with_tensor(chunk: &Chunk, other: &Chunk, layout: &KvLayout, index: usize) -> Chunk {
    let mut chunk = chunk.clone();
    let layers = chunk.sections.iter_mut().flat_map(|section| &mut section.layers);
    let others = other.sections.iter().flat_map(|section| &section.layers);
    let shapes = layout.sections.iter().flat_map(|section| &section.layers);
    let tensors = layers.zip(others).zip(shapes).flat_map(|((rows, other), shape)| {
        let v = shape.v.map(|_| (&mut rows.v, &other.v));
        [Some((&mut rows.k, &other.k)), v].into_iter().flatten()
    });
    if let Some((rows, other)) = tensors.into_iter().nth(index) {
        rows.clone_from(other);
    }
    chunk
}

/// What every lossy codec does to predictions with the profile.
fn losses(
    trial: &mut KvTrial<'_>,
    prompts: &[Prompt],
    profile: &Arc<CodecProfile>,
) -> Result<Vec<CodecLoss>, CommandFailure> {
    let mut losses = Vec::new();
    for codec in Codec::ALL.into_iter().filter(|codec| codec.is_lossy()) {
        if !subject::fits(codec, trial.layout()) {
            continue;
        }
        let mut tally = CodecSums::default();
        for prompt in prompts {
            let passed = subject::through(codec, trial, Some(profile), &prompt.tokens, &prompt.plain)?;
            let found = trial.logits(&passed.kv, &prompt.next)?;
            tally.add(&passed, &divergence::all(&prompt.expected, &found));
        }
        finite(tally.mean_kl(), codec.as_str())?;
        losses.push(CodecLoss { codec, mean_kl: tally.mean_kl(), ratio: tally.ratio() });
    }
    Ok(losses)
}

fn finite(divergence: f64, after: &str) -> Result<(), CommandFailure> {
    match divergence.is_finite() {
        true => Ok(()),
        false => Err(CommandFailure(format!("no profile can be made: the model's predictions {after} are not finite"))),
    }
}

fn mean_kl(expected: &[Vec<f32>], found: &[Vec<f32>]) -> f64 {
    let divergences = divergence::all(expected, found);
    divergences.iter().map(|divergence| divergence.kl).sum::<f64>() / divergences.len().max(1) as f64
}

/// A tensor's measurements.
#[derive(Debug, Clone)]
struct Weighed {
    /// The spread of its values, each channel weighted by its energy.
    weighted_rms: f64,
    /// The root of each channel's energy; empty for V.
    roots: Vec<f64>,
    /// Mean KL when it is coded coarsely, less that when it is coded finely.
    divergence: f64,
}

impl Weighed {
    fn new(variances: &[f64], energies: Option<&[f32]>) -> Weighed {
        let roots: Vec<f64> = energies.unwrap_or_default().iter().map(|energy| f64::from(*energy).sqrt()).collect();
        let energy = |channel: usize| roots.get(channel).map_or(1.0, |root| root * root);
        let weighted: f64 = variances.iter().enumerate().map(|(channel, variance)| variance * energy(channel)).sum();
        Weighed { weighted_rms: (weighted / variances.len().max(1) as f64).sqrt(), roots, divergence: 0.0 }
    }

    /// Its steps, `times` as large as if all tensors mattered alike.
    fn profile(&self, times: f64) -> TensorProfile {
        // The step of a channel is the tensor's weighted one divided by the root of its energy.
        let typical = geometric_mean(self.roots.iter().copied());
        let eighths = |root: &f64| (128.0 - 8.0 * (root / typical).log2()).round().clamp(0.0, 255.0) as u8;
        let step = (times * self.weighted_rms / typical) as f32;
        TensorProfile { step: step.max(f32::MIN_POSITIVE), channel_steps: self.roots.iter().map(eighths).collect() }
    }
}

/// 1 if there are no values.
fn geometric_mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len().max(1) as f64;
    (values.map(f64::ln).sum::<f64>() / n).exp()
}

/// The steps of all tensors.
fn profiles(tensors: &[Weighed]) -> Vec<TensorProfile> {
    let contributions = || tensors.iter().map(|tensor| tensor.divergence.max(0.0));
    let mean = contributions().sum::<f64>() / tensors.len().max(1) as f64;
    // If nothing changes predictions, every tensor is as good as any other.
    let least = if mean > 0.0 { LEAST * mean } else { 1.0 };
    let weights = || contributions().map(|contribution| 1.0 / (contribution + least).sqrt());
    let typical = geometric_mean(weights());
    let limited = weights().map(|weight| (weight / typical).clamp(*WEIGHTS.start(), *WEIGHTS.end()));
    tensors.iter().zip(limited).map(|(tensor, weight)| tensor.profile(weight)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_energy_and_divergence() {
        let key = Weighed { divergence: 0.04, ..Weighed::new(&[1.0, 1.0], Some(&[4.0, 1.0])) };
        let value = Weighed { divergence: 0.01, ..Weighed::new(&[1.0, 1.0], None) };
        let profiles = profiles(&[key.clone(), value]);
        // Twice the root of the energy: half the step, which is an octave.
        assert_eq!(profiles[0].channel_steps, [124, 132]);
        assert!(profiles[1].channel_steps.is_empty());
        // The product of the weights is 1, and four times the divergence gives about half the step.
        let weights = [profiles[0].step / (2.5f32.sqrt() / 2f32.sqrt()), profiles[1].step];
        assert!((weights[0] * weights[1] - 1.0).abs() < 1e-3, "{weights:?}");
        assert!((0.45..0.65).contains(&(weights[0] / weights[1])), "{weights:?}");
        // A tensor of zeros still has a step.
        let nothing = Weighed::new(&[0.0], None);
        assert!(super::profiles(&[nothing, key])[0].step > 0.0);
    }
}
