//! Computes a batch: embeddings, layers, logits. The formulas are those of llama.cpp's `src/models/`, of the pinned version.
//!
//! Matrices are applied to the rows of all sequences of a batch together, attention to each sequence alone.

use std::ops::Range;
use std::sync::Arc;

use baton_schemas::kv::{KeyRotation, RopePairing};
use candle_core::quantized::QTensor;
use candle_core::{Device, Result, Tensor};
use candle_nn::ops::{rms_norm, silu, softmax_last_dim};
use candle_nn::rotary_emb::{rope, rope_i};

use super::cache::{LayerTensor, SlotCache};
use super::rotation::BatchAngles;
use super::shape::{ComputedFamily, ModelShape};
use super::weights::{Linear, Weights};
use crate::serving::LoadError;

/// A loaded model.
pub(super) struct Transformer {
    pub(super) shape: ModelShape,
    pub(super) device: Device,
    embedding: Arc<QTensor>,
    layers: Vec<Layer>,
    output_norm: Tensor,
    output: Linear,
    rotation: KeyRotation,
    /// For each layer, the section of the KV layout that it belongs to.
    section_of: Vec<usize>,
}

struct Layer {
    attention_norm: Tensor,
    q: Linear,
    k: Linear,
    v: Linear,
    /// Norms of each head, before the rotation.
    head_norms: Option<[Tensor; 2]>,
    out: Linear,
    /// Gemma's norm of the attention's output.
    attention_post_norm: Option<Tensor>,
    ffn_norm: Tensor,
    gate: Linear,
    up: Linear,
    down: Linear,
    /// Gemma's norm of the feed-forward network's output.
    ffn_post_norm: Option<Tensor>,
}

/// The consecutive rows of a batch that belong to one slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SlotRows {
    pub(super) slot: usize,
    pub(super) rows: Range<usize>,
    /// The position of the first row.
    pub(super) from: usize,
}

/// What the layers of one section need of a batch.
struct SectionInput {
    angles: BatchAngles,
    /// For each part of the batch.
    views: Vec<View>,
}

/// What the rows of one slot attend to.
struct View {
    part: SlotRows,
    positions: Range<usize>,
    window: Option<usize>,
    /// The mask of all rows. `None`: there is one row, which attends to all positions, or the rows are computed in blocks,
    /// each of which makes its own.
    mask: Option<Tensor>,
}

/// The most bytes of attention's scores that are computed at once, unless a single row has more.
const MAX_SCORES: usize = 64 << 20;

impl Transformer {
    /// Loads all weights. Blocking: reads the whole file.
    pub(super) fn load(
        shape: ModelShape,
        rotation: KeyRotation,
        mut weights: Weights<'_>,
        device: &Device,
    ) -> std::result::Result<Transformer, LoadError> {
        let embedding = weights.embedding(shape.n_vocab, shape.n_embd)?;
        let layers = (0..shape.n_layers).map(|layer| Layer::load(&shape, layer, &mut weights));
        let layers = layers.collect::<std::result::Result<_, LoadError>>()?;
        let output_norm = weights.norm("output_norm.weight", shape.n_embd)?;
        let output = weights.output(&embedding)?;
        weights.finish()?;
        let sections = shape.sections();
        let section = |layer| sections.iter().position(|layers| layers.contains(&layer)).unwrap_or(0);
        let section_of = (0..shape.n_layers).map(section).collect();
        let device = device.clone();
        Ok(Transformer { shape, device, embedding, layers, output_norm, output, rotation, section_of })
    }

    /// Computes rows of tokens, whose slots' caches get their KV. Returns the states after the last layer,
    /// `[n_rows][n_embd]`. The caches have room for the positions, and count them afterwards.
    pub(super) fn states(&self, tokens: &[u32], parts: &[SlotRows], caches: &mut [SlotCache]) -> Result<Tensor> {
        let positions: Vec<u32> =
            parts.iter().flat_map(|part| (part.from..part.from + part.rows.len()).map(|p| p as u32)).collect();
        let sections = (0..self.rotation.sections.len()).map(|section| self.section_input(section, &positions, parts));
        let sections = sections.collect::<Result<Vec<SectionInput>>>()?;
        let ids = Tensor::from_slice(tokens, tokens.len(), &Device::Cpu)?;
        let mut x = (self.embedding.embedding(&ids)?.to_device(&self.device)? * self.shape.embedding_scale)?;
        for (idx, layer) in self.layers.iter().enumerate() {
            let input = &sections[self.section_of[idx]];
            x = self.attend(idx, &x, input, caches)?;
            x = self.feed_forward(layer, &x)?;
        }
        for part in parts {
            caches[part.slot].extent.n = part.from + part.rows.len();
        }
        Ok(x)
    }

    /// The norms of the rows `wanted`: `[n_wanted][n_embd]`.
    pub(super) fn normed(&self, states: &Tensor, wanted: &[u32]) -> Result<Tensor> {
        let wanted = Tensor::from_slice(wanted, wanted.len(), &self.device)?;
        rms_norm(&states.index_select(&wanted, 0)?, &self.output_norm, self.shape.epsilon)
    }

    /// The logits of the rows `wanted`: `[n_wanted][n_vocab]`.
    pub(super) fn logits(&self, states: &Tensor, wanted: &[u32]) -> Result<Vec<f32>> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let mut logits = self.output.forward(&self.normed(states, wanted)?)?;
        if self.shape.logit_cap > 0.0 {
            logits = ((logits / self.shape.logit_cap)?.tanh()? * self.shape.logit_cap)?;
        }
        logits.flatten_all()?.to_vec1()
    }

    fn section_input(&self, section: usize, positions: &[u32], parts: &[SlotRows]) -> Result<SectionInput> {
        let rotation = self.rotation.sections[section].as_ref();
        let rotation = rotation.ok_or_else(|| candle_core::Error::Msg("a section without a rotation".into()))?;
        let layer = self.section_of.iter().position(|of| *of == section).unwrap_or(0);
        let window = self.shape.window.filter(|_| self.shape.is_windowed(layer)).map(|window| window.n_positions);
        let views = parts.iter().map(|part| self.view(part, window));
        Ok(SectionInput {
            angles: BatchAngles::of(rotation, positions, &self.device)?,
            views: views.collect::<Result<_>>()?,
        })
    }

    fn view(&self, part: &SlotRows, window: Option<usize>) -> Result<View> {
        let n_rows = part.rows.len();
        let end = part.from + n_rows;
        let seen = first_seen(part.from, window)..end;
        let is_one_block = n_rows > 1 && n_rows <= self.block(seen.len());
        let mask = is_one_block.then(|| self.mask(part.from..end, &seen, window)).transpose()?;
        Ok(View { part: part.clone(), positions: seen, window, mask })
    }

    /// The rows whose scores are computed at once.
    fn block(&self, n_positions: usize) -> usize {
        (MAX_SCORES / (4 * self.shape.n_heads * n_positions)).max(1)
    }

    /// 0 or -infinity for each row and position, `[n_rows][n_positions]`.
    fn mask(&self, rows: Range<usize>, seen: &Range<usize>, window: Option<usize>) -> Result<Tensor> {
        let dims = (rows.len(), seen.len());
        let mask: Vec<f32> = rows
            .flat_map(|row| {
                let attends = first_seen(row, window)..row + 1;
                seen.clone().map(move |p| if attends.contains(&p) { 0.0 } else { f32::NEG_INFINITY })
            })
            .collect();
        Tensor::from_vec(mask, dims, &self.device)
    }

    /// Adds attention to the rows `x`, `[n_rows][n_embd]`.
    fn attend(&self, idx: usize, x: &Tensor, input: &SectionInput, caches: &[SlotCache]) -> Result<Tensor> {
        let layer = &self.layers[idx];
        let [of_k, of_v] = LayerTensor::of(idx);
        let ModelShape { n_heads, n_kv_heads, head_size, epsilon, .. } = self.shape;
        let n_rows = x.dim(0)?;
        let normed = rms_norm(x, &layer.attention_norm, epsilon)?;
        let q = layer.q.forward(&normed)?.reshape((n_rows, n_heads, head_size))?;
        let k = layer.k.forward(&normed)?.reshape((n_rows, n_kv_heads, head_size))?;
        let v = layer.v.forward(&normed)?.reshape((n_rows, n_kv_heads, head_size))?;
        let (q, k) = match &layer.head_norms {
            Some([norm_q, norm_k]) => (rms_norm(&q, norm_q, epsilon)?, rms_norm(&k, norm_k, epsilon)?),
            None => (q, k),
        };
        let q = (self.rotate(&q, &input.angles)? * self.shape.attention_scale)?;
        let k = self.rotate(&k, &input.angles)?;
        let v = v.transpose(0, 1)?;
        let mut attended = Vec::with_capacity(input.views.len());
        for View { part, positions, window, mask } in &input.views {
            let rows = |x: &Tensor| x.narrow(1, part.rows.start, part.rows.len());
            let cache = &caches[part.slot];
            cache.write(of_k, part.from, &rows(&k)?)?;
            cache.write(of_v, part.from, &rows(&v)?)?;
            let (k, v) = (cache.read(of_k, positions)?, cache.read(of_v, positions)?);
            let (q, n_rows) = (rows(&q)?, part.rows.len());
            let block = self.block(positions.len());
            for start in (0..n_rows).step_by(block) {
                let n = block.min(n_rows - start);
                let from = part.from + start;
                let mask = match mask {
                    Some(mask) => Some(mask.clone()),
                    None if n_rows == 1 => None,
                    None => Some(self.mask(from..from + n, positions, *window)?),
                };
                attended.push(self.attention(&q.narrow(1, start, n)?.contiguous()?, &k, &v, mask.as_ref())?);
            }
        }
        let attended = if let [one] = &attended[..] { one.clone() } else { Tensor::cat(&attended, 0)? };
        let out = layer.out.forward(&attended)?;
        x + normed_if(out, layer.attention_post_norm.as_ref(), epsilon)?
    }

    /// Attention of rows of one sequence. `q` is `[n_heads][n_rows][head_size]`, `k` and `v` are
    /// `[n_kv_heads][n_positions][head_size]`. Returns `[n_rows][n_heads * head_size]`.
    fn attention(&self, q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let ModelShape { n_heads, n_kv_heads, head_size, .. } = self.shape;
        let (n_rows, n_positions) = (q.dim(1)?, k.dim(1)?);
        let n_shared = n_heads / n_kv_heads;
        // The heads that share a KV head are rows of one product.
        let q = q.reshape((n_kv_heads, n_shared * n_rows, head_size))?;
        let mut scores = q.matmul(&k.t()?)?;
        if let Some(mask) = mask {
            let grouped = scores.reshape((n_kv_heads * n_shared, n_rows, n_positions))?;
            scores = grouped.broadcast_add(mask)?.reshape((n_kv_heads, n_shared * n_rows, n_positions))?;
        }
        let attended = softmax_last_dim(&scores)?.matmul(v)?;
        let by_row = attended.reshape((n_heads, n_rows, head_size))?.transpose(0, 1)?;
        by_row.contiguous()?.reshape((n_rows, n_heads * head_size))
    }

    /// Rotates `[n_rows][n_heads][head_size]`. Returns `[n_heads][n_rows][head_size]`.
    fn rotate(&self, x: &Tensor, angles: &BatchAngles) -> Result<Tensor> {
        let x = x.transpose(0, 1)?.contiguous()?.unsqueeze(0)?;
        let rotated = match self.shape.pairing() {
            RopePairing::Interleaved => rope_i(&x, &angles.cos, &angles.sin)?,
            _ => rope(&x, &angles.cos, &angles.sin)?,
        };
        rotated.squeeze(0)
    }

    /// Adds the feed-forward network to the rows.
    fn feed_forward(&self, layer: &Layer, x: &Tensor) -> Result<Tensor> {
        let epsilon = self.shape.epsilon;
        let normed = rms_norm(x, &layer.ffn_norm, epsilon)?;
        let gate = layer.gate.forward(&normed)?;
        let gate = match self.shape.family {
            // ggml's GELU is the approximation by tanh, too.
            ComputedFamily::Gemma3 => gate.gelu()?,
            ComputedFamily::Llama | ComputedFamily::Qwen2 | ComputedFamily::Qwen3 => silu(&gate)?,
        };
        let out = layer.down.forward(&(gate * layer.up.forward(&normed)?)?)?;
        x + normed_if(out, layer.ffn_post_norm.as_ref(), epsilon)?
    }
}

/// The first position that a row's position attends to.
fn first_seen(position: usize, window: Option<usize>) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

fn normed_if(x: Tensor, norm: Option<&Tensor>, epsilon: f32) -> Result<Tensor> {
    match norm {
        Some(norm) => rms_norm(&x, norm, epsilon),
        None => Ok(x),
    }
}

impl Layer {
    fn load(shape: &ModelShape, layer: usize, weights: &mut Weights<'_>) -> std::result::Result<Layer, LoadError> {
        let ModelShape { n_embd, n_heads, n_kv_heads, head_size, .. } = *shape;
        let name = |part: &str| format!("blk.{layer}.{part}");
        let n_ff = weights.n_rows(&name("ffn_gate.weight"))?;
        let [n_q, n_kv] = [n_heads * head_size, n_kv_heads * head_size];
        let head_norms = match shape.family {
            ComputedFamily::Qwen3 | ComputedFamily::Gemma3 => Some([
                weights.norm(&name("attn_q_norm.weight"), head_size)?,
                weights.norm(&name("attn_k_norm.weight"), head_size)?,
            ]),
            ComputedFamily::Llama | ComputedFamily::Qwen2 => None,
        };
        let mut post_norm = |part: &str| match shape.family {
            ComputedFamily::Gemma3 => weights.norm(&name(part), n_embd).map(Some),
            ComputedFamily::Llama | ComputedFamily::Qwen2 | ComputedFamily::Qwen3 => Ok(None),
        };
        let attention_post_norm = post_norm("post_attention_norm.weight")?;
        let ffn_post_norm = post_norm("post_ffw_norm.weight")?;
        Ok(Layer {
            attention_norm: weights.norm(&name("attn_norm.weight"), n_embd)?,
            q: weights.linear(&name("attn_q"), n_embd, n_q)?,
            k: weights.linear(&name("attn_k"), n_embd, n_kv)?,
            v: weights.linear(&name("attn_v"), n_embd, n_kv)?,
            head_norms,
            out: weights.linear(&name("attn_output"), n_q, n_embd)?,
            attention_post_norm,
            ffn_norm: weights.norm(&name("ffn_norm.weight"), n_embd)?,
            gate: weights.linear(&name("ffn_gate"), n_embd, n_ff)?,
            up: weights.linear(&name("ffn_up"), n_embd, n_ff)?,
            down: weights.linear(&name("ffn_down"), n_ff, n_embd)?,
            ffn_post_norm,
        })
    }
}
