//! Replies with a draft node are the same as without, and its candidates are counted.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use baton_engines::registry::EngineOptions;
use baton_link::Engine;
use baton_link::handoff::{KvPuller, PullPolicy};
use baton_model::options::Speculation;
use baton_schemas::draft::DrafterLoss;
use baton_schemas::generate::Sampling;
use baton_schemas::handoff::KvSource;
use baton_schemas::node::{Role, TokenizeRequest};
use baton_schemas::sequence::{DraftCounts, SequenceEvent, Timings};
use baton_schemas::{KeyTag, SequenceRequest, Token};
use futures::StreamExt;
use tiny_gguf::scripted::{Reply, Script, Tokenizer};

use crate::models;
use crate::peers::{self, KEY};

async fn engine(model: &Path, speculation: Speculation, puller: Option<Arc<dyn KvPuller>>) -> Arc<dyn Engine> {
    let options = EngineOptions {
        n_threads: Some(1),
        n_ctx: Some(512),
        speculation: Some(speculation),
        ..models::of_llama(model)
    };
    models::start(options, puller).await
}

/// Tokens of each scripted reply.
const N_REPLY: usize = 180;

/// Replies that rounding does not change: the model is certain of each token.
const N_SCRIPTS: u32 = 4;

fn write_model(file: &Path) {
    let reply = |n: u32| Reply::new(&format!("<|q{n}|>"), (0..N_REPLY).map(|i| format!("reply{n}word{i} ")));
    let script = Script {
        tokenizer: Tokenizer::default(),
        template: "{{ messages[0].content }}".into(),
        control: Vec::new(),
        user_defined: Vec::new(),
        bos: None,
        end: "<|end|>".into(),
        context_length: 1_024,
        replies: (0..N_SCRIPTS).map(reply).collect(),
    };
    script.write(file);
}

/// A prompt of its own, which ends with the token that chooses a reply.
async fn request(engine: &dyn Engine, n: u32, temperature: f32, url: Option<&str>) -> SequenceRequest {
    let text = format!("question {n}, {} <|q{}|>", n * n, n % N_SCRIPTS);
    let text = TokenizeRequest { text: text.into(), add_special: false, parse_special: true, key: KeyTag::NONE };
    let prompt = engine.tokenize(&text).await.unwrap();
    let sampling = Sampling { temperature, seed: u64::from(n), ..Sampling::default() };
    let draft_source = url.map(KvSource::at);
    SequenceRequest { prompt, sampling, max_tokens: Some(400), draft_source, ..Default::default() }
}

/// Reads a reply and pauses now and then. Meanwhile the engine pauses, too, and its draft node gets ahead of it: both compute the
/// same model, and would else be equally fast.
async fn read_slowly(engine: &dyn Engine, request: SequenceRequest) -> (Vec<Token>, Timings) {
    let mut events = engine.generate(request).await.unwrap();
    let mut tokens = Vec::new();
    while let Some(event) = events.next().await {
        match event.unwrap() {
            SequenceEvent::Token(token) => tokens.push(token.id),
            SequenceEvent::Finished { timings, .. } => return (tokens, timings),
            _ => {}
        }
        if tokens.len() % 50 == 1 {
            tokio::time::sleep(Duration::from_millis(60)).await;
        }
    }
    panic!("the stream was cut");
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_are_the_same_with_a_draft_node_alone_and_beside_others() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    write_model(&file);
    let plain = engine(&file, Speculation::Off, None).await;
    let node = peers::node(engine(&file, Speculation::Off, None).await, Role::Draft, KEY).await;
    let target = engine(&file, Speculation::Auto, Some(peers::puller(PullPolicy::default()))).await;
    let mut counts = DraftCounts::default();
    for round in 0..10 {
        let temperature = if round % 2 == 0 { 0.0 } else { 0.8 };
        let numbers = [4 * round, 4 * round + 1, 4 * round + 2, 4 * round + 3];
        let mut expected = Vec::new();
        for n in numbers {
            expected.push(peers::generate(&*plain, request(&*plain, n, temperature, None).await).await.tokens);
        }
        let ask = async |n: u32| {
            let request = request(&*target, n, temperature, Some(&node.url)).await;
            read_slowly(&*target, request).await
        };
        // One alone, the others together.
        let mut found = vec![ask(numbers[0]).await];
        found.extend(futures::future::join_all(numbers[1..].iter().map(|n| ask(*n))).await);
        for ((tokens, timings), expected) in found.iter().zip(&expected) {
            counts = counts.plus(timings.drafts.remote);
            // Beside other tests it may have no time to be ahead.
            assert!(matches!(timings.drafter_lost, None | Some(DrafterLoss::Late)), "{timings:?}");
            assert_eq!((tokens, tokens.len()), (expected, N_REPLY));
        }
    }
    println!("{counts:?}");
    assert!(counts.n_accepted > 0 && counts.n_accepted <= counts.n, "{counts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_another_role_drafts_nothing_and_costs_no_reply() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    write_model(&file);
    let plain = engine(&file, Speculation::Off, None).await;
    let target = engine(&file, Speculation::Auto, Some(peers::puller(PullPolicy::default()))).await;
    let expected = peers::generate(&*plain, request(&*plain, 1, 0.0, None).await).await.tokens;
    let other = peers::node(Arc::clone(&plain), Role::Decode, KEY).await;
    let request = request(&*plain, 1, 0.0, Some(&other.url)).await;
    let (tokens, timings) = read_slowly(&*target, request).await;
    assert_eq!((tokens, timings.drafts.remote.n), (expected, 0));
    assert_eq!(timings.drafter_lost, Some(DrafterLoss::Refused));
}
