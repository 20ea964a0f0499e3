//! The weights of a scripted model: one layer. Its attention copies the code of the anchor, the last token that stands in
//! one place only, to where the output weights can read it.
//!
//! Values of a token's row, and after attention:
//!
//! | from | content |
//! |---|---|
//! | 0 | a constant |
//! | 1, 2 | whether the token can be an anchor |
//! | 3.. | which shared token follows, if one does |
//! | 32 | the token's code |
//! | 96 | the anchor's code |
//!
//! The output weights of a token are the codes of the states that it follows. A shared token has many, which would sum up
//! to noise; so where it follows an anchor, the anchor's row says so itself.

use std::collections::{BTreeMap, BTreeSet};

use super::chain::{Chain, State};
use super::code::{N_CODE, product, signs};
use crate::{Draft, Precision, Tensor};

const CONSTANT: usize = 0;
const IS_ANCHOR: usize = 1;
const IS_SHARED: usize = 2;
const FOLLOWED_BY: usize = 3;
const CODE: usize = 32;
const ANCHOR: usize = CODE + N_CODE;
const N_EMBD: usize = ANCHOR + N_CODE;
const N_FF: usize = 32;
const HEAD_DIM: usize = N_CODE;

/// Shared tokens that can follow an anchor, besides none.
const MAX_FOLLOWERS: usize = CODE - FOLLOWED_BY - 1;

/// The value of a flag. All rows have three, so all have the same length, and norms scale them alike.
const FLAG: f32 = 8.0;

/// The rows' root mean squares, by which norms divide.
fn rms(n_codes: usize) -> f32 {
    ((3.0 * FLAG * FLAG + (n_codes * N_CODE) as f32) / N_EMBD as f32).sqrt()
}

/// Scores of the output, before [`SCALE`]: of the next token, and of the end of the text. Other tokens score 32 at most
/// after an anchor, and 80 after a shared token, which they may follow elsewhere; shared tokens are checked.
const NEXT: f32 = (2 * N_CODE) as f32;
const END: f32 = 92.0;

/// By how much the right token must lead.
const MARGIN: f32 = 12.0;

/// Makes the logits of the right token and of all others differ by 18 or more.
const SCALE: f32 = 1.5;

/// RoPE turns pair i of a head by 10000^(-i/32) for each position. Pairs that turn fast prefer near tokens: these give
/// scores that fall strictly for six positions, and stay lower after that.
const NEAR_PAIRS: std::ops::Range<usize> = 1..21;
const NEAR: f32 = 18.0;

/// Pairs that turn slowly prefer anchors at any distance. One of these outweighs the nearness of six positions.
const ANCHOR_PAIRS: std::ops::Range<usize> = 28..32;
const ANCHOR_BONUS: f32 = 30.0;

pub(super) fn add(draft: &mut Draft, chain: &Chain, end: usize) {
    draft.numbers(&[
        ("embedding_length", N_EMBD as u32),
        ("block_count", 1),
        ("feed_forward_length", N_FF as u32),
        ("attention.head_count", 1),
        ("attention.head_count_kv", 1),
        ("attention.key_length", HEAD_DIM as u32),
        ("attention.value_length", HEAD_DIM as u32),
        ("rope.dimension_count", HEAD_DIM as u32),
    ]);
    draft.set("llama.attention.layer_norm_rms_epsilon", crate::file::Value::F32(1e-6));
    let followers = followers(chain);
    let rows = output_rows(chain, &followers, end);
    check(chain, &followers, &rows);

    let n_vocab = chain.tokens.len();
    let embeddings: Vec<f32> = (0..n_vocab).flat_map(|token| row(chain, &followers, token)).collect();
    put(draft, "token_embd.weight", &[N_EMBD, n_vocab], embeddings);
    draft.ones("output_norm.weight", N_EMBD);
    let output: Vec<f32> = rows.concat().into_iter().map(|weight| weight * SCALE * rms(2)).collect();
    put(draft, "output.weight", &[N_EMBD, n_vocab], output);
    draft.ones("blk.0.attn_norm.weight", N_EMBD);
    draft.ones("blk.0.ffn_norm.weight", N_EMBD);

    // The attention's input is divided by the rows' root mean square.
    let flag = FLAG / rms(1);
    let pairs = |pairs: std::ops::Range<usize>, from: usize, value: f32| {
        pairs.map(move |pair| (2 * pair, from, value / flag)).collect::<Vec<_>>()
    };
    let near = pairs(NEAR_PAIRS, CONSTANT, NEAR);
    let query = [near.clone(), pairs(ANCHOR_PAIRS, CONSTANT, ANCHOR_BONUS)].concat();
    let key = [near, pairs(ANCHOR_PAIRS, IS_ANCHOR, ANCHOR_BONUS)].concat();
    let value: Vec<_> = (0..N_CODE).map(|sign| (sign, CODE + sign, rms(1))).collect();
    let output: Vec<_> = (0..N_CODE).map(|sign| (ANCHOR + sign, sign, 1.0)).collect();
    sparse(draft, "blk.0.attn_q.weight", [N_EMBD, HEAD_DIM], &query);
    sparse(draft, "blk.0.attn_k.weight", [N_EMBD, HEAD_DIM], &key);
    sparse(draft, "blk.0.attn_v.weight", [N_EMBD, HEAD_DIM], &value);
    sparse(draft, "blk.0.attn_output.weight", [HEAD_DIM, N_EMBD], &output);
    sparse(draft, "blk.0.ffn_gate.weight", [N_EMBD, N_FF], &[]);
    sparse(draft, "blk.0.ffn_up.weight", [N_EMBD, N_FF], &[]);
    sparse(draft, "blk.0.ffn_down.weight", [N_FF, N_EMBD], &[]);
}

/// The flags of the shared tokens that follow anchors.
fn followers(chain: &Chain) -> BTreeMap<usize, usize> {
    let mut flags = BTreeMap::new();
    for (state, next) in &chain.next {
        if state.last == state.anchor && chain.shared.contains(next) {
            let flag = FOLLOWED_BY + 1 + flags.len();
            flags.entry(*next).or_insert(flag);
        }
    }
    assert!(flags.len() <= MAX_FOLLOWERS, "more than {MAX_FOLLOWERS} different control tokens follow text");
    flags
}

/// A token's row.
fn row(chain: &Chain, followers: &BTreeMap<usize, usize>, token: usize) -> [f32; N_EMBD] {
    let next = chain.next.get(&State { last: token, anchor: token });
    let follower = next.and_then(|next| followers.get(next)).copied();
    let mut row = [0.0; N_EMBD];
    row[CONSTANT] = FLAG;
    row[if chain.shared.contains(&token) { IS_SHARED } else { IS_ANCHOR }] = FLAG;
    row[follower.unwrap_or(FOLLOWED_BY)] = FLAG;
    row[CODE..ANCHOR].copy_from_slice(&signs(token));
    row
}

fn output_rows(chain: &Chain, followers: &BTreeMap<usize, usize>, end: usize) -> Vec<[f32; N_EMBD]> {
    let mut rows = vec![[0.0; N_EMBD]; chain.tokens.len()];
    rows[end][CONSTANT] = END / FLAG;
    // The last tokens whose codes are in a token's row.
    let mut last_tokens: BTreeSet<(usize, usize)> = BTreeSet::new();
    for (state, next) in &chain.next {
        let row = &mut rows[*next];
        let mut add = |at: usize, token: usize| {
            row[at..at + N_CODE].iter_mut().zip(signs(token)).for_each(|(weight, sign)| *weight += sign);
        };
        match followers.get(next) {
            Some(&flag) if state.last == state.anchor => row[flag] = NEXT / FLAG,
            _ => {
                add(ANCHOR, state.anchor);
                if last_tokens.insert((*next, state.last)) {
                    add(CODE, state.last);
                }
            }
        }
    }
    rows
}

/// Panics if the sums of several states' codes, which only shared tokens have, give a wrong next token.
fn check(chain: &Chain, followers: &BTreeMap<usize, usize>, rows: &[[f32; N_EMBD]]) {
    let half = |weights: &[f32], token: usize| product(weights.try_into().unwrap(), &signs(token));
    let score = |state: State, token: usize| {
        let weights = &rows[token];
        let last = row(chain, followers, state.last);
        let flags: f32 = weights[..CODE].iter().zip(&last).map(|(weight, value)| weight * value).sum();
        flags + half(&weights[CODE..ANCHOR], state.last) + half(&weights[ANCHOR..], state.anchor)
    };
    let next = chain.next.iter().map(|(state, next)| (*state, Some(*next)));
    for (state, next) in next.chain(chain.ends.iter().map(|state| (*state, None))) {
        let best = next.map_or(END, |next| score(state, next));
        let others = chain.shared.iter().filter(|token| Some(**token) != next).map(|token| score(state, *token));
        let other = others.fold(f32::MIN, f32::max);
        assert!(
            best - other >= MARGIN && best - END >= if next.is_some() { MARGIN } else { 0.0 },
            "the token after {state:?} scores {best}, another one {other}: the script repeats too many control tokens"
        );
    }
}

/// A weight with these values: output, input, value.
fn sparse(draft: &mut Draft, name: &str, dims: [usize; 2], values: &[(usize, usize, f32)]) {
    let mut weights = vec![0.0; dims[0] * dims[1]];
    values.iter().for_each(|(output, input, value)| weights[output * dims[0] + input] = *value);
    put(draft, name, &dims, weights);
}

fn put(draft: &mut Draft, name: &str, dims: &[usize], values: Vec<f32>) {
    let tensor = Tensor { dims: dims.to_vec(), values, precision: Precision::F16 };
    draft.file.tensors.push((name.to_owned(), tensor));
}
