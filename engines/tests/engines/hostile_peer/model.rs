//! With a real model: KV that came before the damage is used, and other streams are not affected.

use std::sync::Arc;

use baton_engines::registry::EngineOptions;
use baton_link::Engine;
use baton_link::handoff::PullPolicy;
use baton_schemas::Token;
use baton_schemas::handoff::HandoffFailure;
use baton_schemas::node::{Role, TokenizeRequest};

use crate::models;
use crate::peers::fake::{FakeNode, say};
use crate::peers::{KEY, generate, node, puller, request};

fn config() -> Option<EngineOptions> {
    let model = models::whole_smollm2()?;
    let base = models::of_llama(model);
    Some(EngineOptions { n_threads: Some(1), n_ctx: Some(2_048), n_slots: Some(2), n_ubatch: Some(64), ..base })
}

async fn prompt(engine: &dyn Engine, n: usize) -> Vec<Token> {
    let text = "The keeper of the lighthouse counted ships, stars and years. ".repeat(n / 8 + 1);
    let request =
        TokenizeRequest { text: text.into(), add_special: true, parse_special: false, key: Default::default() };
    let mut tokens = engine.tokenize(&request).await.unwrap();
    assert!(tokens.len() >= n);
    tokens.truncate(n);
    tokens
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_costs_neither_the_reply_nor_another_stream() {
    const N_PROMPT: usize = 300;
    let Some(config) = config() else { return };
    let real = node(models::start(config.clone(), None).await, Role::Prefill, KEY).await;
    let alone = models::start(config.clone(), None).await;
    let prompt = prompt(alone.as_ref(), N_PROMPT).await;
    // It begins differently, so that neither finds the other's KV.
    let other_prompt = &prompt[1..21];
    let expected = generate(alone.as_ref(), request(&prompt, 16, None)).await.tokens;
    let expected_other = generate(alone.as_ref(), request(other_prompt, 48, None)).await.tokens;

    // From here on the prefill node has cached the prompt, and replies at once even on a busy machine.
    let decoder = models::start(config.clone(), Some(puller(PullPolicy::default()))).await;
    let whole = generate(decoder.as_ref(), request(&prompt, 16, Some(&real.url))).await;
    assert_eq!((whole.handoff.unwrap().failure, &whole.tokens), (None, &expected));

    // The place of the damage in tenths of the stream, and whether it is a cut or a flipped bit.
    for (tenths, is_cut) in [(0, true), (5, true), (9, true), (6, false)] {
        let address = real.address.clone();
        let fake = FakeNode::start(move |call, stream| {
            let address = address.clone();
            async move {
                let mut recording = call.relay(&address).await;
                if call.is_pull() {
                    let at = recording.payload[recording.payload.len() * tenths / 10];
                    match is_cut {
                        true => recording.raw.truncate(at),
                        false => recording.raw[at] ^= 1,
                    }
                }
                say(stream, recording.raw).await;
            }
        })
        .await;
        let decoder = models::start(config.clone(), Some(puller(PullPolicy::default()))).await;
        let other = {
            let decoder = Arc::clone(&decoder);
            let request = request(other_prompt, 48, None);
            tokio::spawn(async move { generate(decoder.as_ref(), request).await.tokens })
        };
        let reply = generate(decoder.as_ref(), request(&prompt, 16, Some(&fake.url))).await;
        let handoff = reply.handoff.expect("a handoff was tried");
        println!("{tenths} tenths, cut {is_cut}: {handoff:?}");
        let failure = if is_cut { HandoffFailure::PrefillLost } else { HandoffFailure::FrameRejected };
        assert_eq!(handoff.failure, Some(failure));
        assert!((handoff.n_tokens as usize) < N_PROMPT - 1);
        assert!(handoff.n_tokens as usize >= (N_PROMPT * tenths / 10).saturating_sub(64), "valid frames are kept");
        assert_eq!((handoff.n_tokens + reply.timings.prompt_n) as usize, N_PROMPT, "missing KV is computed");
        assert_eq!(reply.tokens, expected, "{tenths} tenths, cut {is_cut}");
        assert_eq!(other.await.unwrap(), expected_other, "the other stream, {tenths} tenths, cut {is_cut}");
    }
}
