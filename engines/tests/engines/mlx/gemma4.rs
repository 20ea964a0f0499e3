//! Gemma 4 on mlx and on llama.cpp: heads that differ between layers with a window and those without, layers that use the KV of
//! others, and V that is made of K.

use baton_link::handoff::canary;
use baton_model::gguf::Gguf;
use baton_schemas::kv::LayerRows;
use bytes::Bytes;
use tiny_gguf::Architecture;

use super::Model;
use super::beside_llama::{Other, check_hands_over, check_has_the_tokens, puller};
use crate::beside_llama::{divergence, prose, reply, tokens};
use crate::contract;
use crate::other_weights::computed;

const FORMS: [Architecture; 2] = [Architecture::Gemma4, Architecture::Gemma4Moe];

#[tokio::test]
async fn mlx_with_random_weights_of_gemma_4_keeps_the_contract() {
    let Some(model) = Model::tiny(Architecture::Gemma4) else { return };
    contract::check(model.start(None).await).await;
}

/// The prompt is longer than the window. The limit is the mean KL of a handoff between two engines that round alike.
#[tokio::test(flavor = "multi_thread")]
async fn random_weights_of_gemma_4_are_handed_over_to_llama_and_back() {
    for form in FORMS {
        let Some(model) = Model::tiny(form) else { return };
        let kl = check_hands_over(&model, Other::Llama, 200, 16).await;
        assert!(kl <= 1e-6, "{form:?}: {kl}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mlx_computes_what_llama_cpp_computes() {
    for form in FORMS {
        let Some(model) = Model::tiny(form) else { return };
        let (llama, mlx) = (Other::Llama.start(&model).await, model.start(puller()).await);
        let prompt = &tokens(&*llama, &prose(), false).await[..200];
        let (expected, found) = (reply(&*llama, prompt, 16, None).await.0, reply(&*mlx, prompt, 16, None).await.0);
        let (kl, n_compared) = divergence(&expected, &found);
        println!("{form:?}: mean KL {kl:.1e} over {n_compared} tokens");
        assert!(n_compared >= 4 && kl <= 1e-5, "{form:?}: {kl} over {n_compared} tokens");
    }
}

/// The folder's tokens are those of the GGUF file, whatever the text.
#[tokio::test(flavor = "multi_thread")]
async fn gemma_4_has_the_tokens_of_its_gguf_file() {
    let Some(model) = Model::tiny(Architecture::Gemma4) else { return };
    check_has_the_tokens(&*Other::Llama.start(&model).await, &*model.start(None).await).await;
}

/// Rows with two heads, or with K and V, exchanged on purpose are others, in each section.
#[tokio::test(flavor = "multi_thread")]
async fn rows_are_llama_cpps_and_exchanged_heads_or_tensors_are_not() {
    for form in FORMS {
        let Some(model) = Model::tiny(form) else { return };
        let (llama, mlx) = (Other::Llama.start(&model).await, model.start(puller()).await);
        let kv = llama.info().await.unwrap().kv.unwrap();
        let layers = Gguf::open(&model.gguf).unwrap().layer_numbers(&kv.layout);
        let expected = computed(&*llama, &kv.canary).await;
        let compared = |found: &_| canary::compare(&kv.layout, &layers, &expected, found).unwrap();
        let alike = compared(&computed(&*mlx, &kv.canary).await);
        println!("{form:?}: rows: {:.1e} at most", alike.worst());
        // llama.cpp rounds what GELU returns to f16, in each layer again.
        assert!(alike.worst() < 5e-3, "{form:?}: {alike:?}");
        // Layers without a window have heads of 128 values, those with one of 64. f16 takes two bytes.
        for (section, head_bytes) in [(0, 2 * 128), (1, 2 * 64)] {
            let changes: [&dyn Fn(&mut LayerRows); 2] = [&|rows| std::mem::swap(&mut rows.k, &mut rows.v), &|rows| {
                rows.k = exchange_heads(&rows.k, head_bytes)
            }];
            for (i, change) in changes.iter().enumerate() {
                // One head cannot be exchanged.
                let row_bytes = kv.layout.sections[section].layers[0].k.bytes();
                if i == 1 && row_bytes < 2 * head_bytes {
                    continue;
                }
                let mut found = computed(&*mlx, &kv.canary).await;
                found.chunks.iter_mut().for_each(|chunk| chunk.sections[section].layers.iter_mut().for_each(change));
                let exchanged = compared(&found).worst();
                assert!(exchanged > 0.5, "{form:?}, section {section}, change {i}: {exchanged}");
            }
        }
    }
}

/// Rows of two heads, with these exchanged.
fn exchange_heads(rows: &[u8], head_bytes: usize) -> Bytes {
    let exchanged = rows.chunks_exact(2 * head_bytes).flat_map(|row| [&row[head_bytes..], &row[..head_bytes]].concat());
    exchanged.collect::<Vec<u8>>().into()
}
