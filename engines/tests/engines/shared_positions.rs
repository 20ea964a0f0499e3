//! Images of models with M-RoPE, of each family's projector with random weights: the reply is the same whether one engine
//! computes the prompt, another one hands it over, or it was parked. The logits are compared with llama.cpp's own run in
//! `engines/src/llama/shared_position_tests.rs`.

use std::io::Cursor;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_engines::registry::EngineOptions;
use baton_link::Engine;
use baton_link::handoff::PullPolicy;
use baton_schemas::generate::{Conversation, Message};
use baton_schemas::handoff::{HandoffFailure, KvSource};
use baton_schemas::image::{Image, ImageShape, PromptImages, runs};
use baton_schemas::node::Role;
use baton_schemas::{MessageRole, SequenceRequest};
use image::{ImageFormat, Rgb, RgbImage};
use tiny_gguf::Architecture;
use tiny_gguf::projector::{self, TinyProjector};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::peers::{Reply, TestNode};
use crate::{models, peers};

/// A model for each family's projector.
const FAMILIES: [(Architecture, TinyProjector); 5] = [
    (Architecture::Qwen2Vl, TinyProjector::Qwen2Vl),
    (Architecture::Qwen2Vl, TinyProjector::Qwen25Vl),
    (Architecture::Qwen3Vl, TinyProjector::Qwen3Vl),
    (Architecture::Qwen35, TinyProjector::Qwen35),
    (Architecture::Qwen3VlMoe, TinyProjector::Qwen3Vl),
];

const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";

/// The tokens of a prompt that an engine computes itself after a pull: the head of the reply, and the last one.
const MOST_COMPUTED: u32 = 16;

struct Family {
    options: EngineOptions,
    kind: TinyProjector,
    _folder: tempfile::TempDir,
}

impl Family {
    fn new((architecture, kind): (Architecture, TinyProjector), n_slots: u32) -> Family {
        let folder = tempfile::tempdir().unwrap();
        let [path, eyes] = ["tiny.gguf", "mmproj.gguf"].map(|name| folder.path().join(name));
        let deepstack = [("n_deepstack_layers", 1)];
        let numbers = if kind == TinyProjector::Qwen3Vl { &deepstack[..] } else { &[] };
        tiny_gguf::write_with(&path, architecture, 1, numbers);
        projector::write(&eyes, kind, 64, 1);
        let options = EngineOptions {
            projector: Some(eyes),
            chat_template: Some(TEMPLATE.to_owned()),
            n_threads: Some(1),
            n_ctx: Some(2_048),
            n_slots: Some(n_slots),
            ..models::of_llama(path)
        };
        Family { options, kind, _folder: folder }
    }
}

/// A picture of these colours, wider than high.
fn picture(red: u8, width: u32) -> Image {
    let picture = RgbImage::from_fn(width, 90, |x, y| Rgb([red, (x * 3) as u8, (y * 4) as u8]));
    let mut bytes = Cursor::new(Vec::new());
    picture.write_to(&mut bytes, ImageFormat::Png).unwrap();
    Image::new(bytes.into_inner(), "image")
}

/// The request for a greedy reply about these images, in turns of a conversation: an image, and a text.
async fn about(engine: &dyn Engine, turns: &[(&Image, &str)], source: Option<&TestNode>) -> SequenceRequest {
    let message = |(image, text): &(&Image, &str)| {
        Message::new(MessageRole::User, format!("Look closely, and then say: {}{text}", image.mark()))
    };
    let images: Vec<Image> = turns.iter().map(|(image, _)| (*image).clone()).collect();
    let messages = turns.iter().map(message).collect();
    let conversation = Conversation { messages, images: images.clone(), ..Conversation::default() };
    let prompt = engine.render(&conversation, Default::default()).await.unwrap();
    for run in runs(&prompt) {
        let shared = ImageShape::of(&prompt[run]).shared.expect("its tokens share a position");
        assert!(shared.n_positions < shared.tokens.len(), "{shared:?}");
    }
    let projector = engine.info().await.unwrap().projector.unwrap();
    let request = peers::request(&prompt, 24, source.map(|node| node.url.as_str()));
    SequenceRequest { images: Some(PromptImages { projector, images }), ignore_eos: true, ..request }
}

const LONG: &str = "What do you see in this picture, and what is behind the hills that it shows on its left side?";

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_with_images_is_handed_over() {
    for family in FAMILIES {
        let Family { options, kind, _folder } = &Family::new(family, 2);
        let prefill = models::start(options.clone(), None).await;
        let info = prefill.info().await.unwrap();
        assert!(info.hands_over_images && info.kv.is_some(), "{kind:?}");
        let node = peers::node(Arc::clone(&prefill), Role::Prefill, peers::KEY).await;
        let alone = models::start(options.clone(), None).await;
        let decoder = models::start(options.clone(), Some(peers::puller(PullPolicy::default()))).await;
        let (first, second) = (picture(200, 160), picture(20, 240));
        let mut turns = vec![(&first, LONG)];
        for n_turns in 1..=2 {
            let expected = peers::generate(&*alone, about(&*alone, &turns, None).await).await;
            assert!(expected.timings.prompt_n > MOST_COMPUTED, "{kind:?}");
            let request = about(&*decoder, &turns, Some(&node)).await;
            let (n_prompt, prompt) = (request.prompt.len() as u32, request.prompt.clone());
            let reply: Reply = peers::generate(&*decoder, request).await;
            let handoff = reply.handoff.expect("a handoff");
            assert_eq!(handoff.failure, None, "{kind:?} {n_turns}");
            assert!(handoff.n_computed > 0 && reply.timings.prompt_n <= MOST_COMPUTED, "{kind:?} {handoff:?}");
            assert_eq!(reply.tokens, expected.tokens, "{kind:?} {n_turns}: {n_prompt} tokens");
            // Asked again, nothing is pulled: images are cached by their content.
            let again = peers::generate(&*decoder, about(&*decoder, &turns, Some(&node)).await).await;
            assert!(again.handoff.is_none_or(|handoff| handoff.n_tokens < runs(&prompt)[0].len() as u32), "{kind:?}");
            assert_eq!(again.tokens, expected.tokens, "{kind:?}: asked again");
            turns.push((&second, "And here?"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_node_without_the_projector_does_not_hand_over_is_computed() {
    let Family { options, .. } = &Family::new(FAMILIES[0], 2);
    let blind = models::start(EngineOptions { projector: None, ..options.clone() }, None).await;
    assert!(!blind.info().await.unwrap().hands_over_images);
    let node = peers::node(Arc::clone(&blind), Role::Prefill, peers::KEY).await;
    let alone = models::start(options.clone(), None).await;
    let decoder = models::start(options.clone(), Some(peers::puller(PullPolicy::default()))).await;
    let image = picture(9, 160);
    let expected = peers::generate(&*alone, about(&*alone, &[(&image, LONG)], None).await).await;
    let reply = peers::generate(&*decoder, about(&*decoder, &[(&image, LONG)], Some(&node)).await).await;
    assert_eq!(reply.handoff.and_then(|handoff| handoff.failure), Some(HandoffFailure::PrefillRefused));
    assert_eq!(reply.tokens, expected.tokens);
}

/// The URL of a link to a node, which breaks once so many bytes have come from there.
async fn breaking(node: &TestNode, n_bytes: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (address, left) = (node.address.clone(), Arc::new(AtomicUsize::new(n_bytes)));
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (address, left) = (address.clone(), Arc::clone(&left));
            tokio::spawn(async move {
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_node, mut to_node) = TcpStream::connect(&address).await.unwrap().into_split();
                let asked = tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_node).await });
                let mut buffer = vec![0; 1_024];
                loop {
                    let n = from_node.read(&mut buffer).await.unwrap_or(0);
                    let passes = left.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(n));
                    if n == 0 || passes.is_err() || to_client.write_all(&buffer[..n]).await.is_err() {
                        break;
                    }
                }
                asked.abort();
            });
        }
    });
    url
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_of_which_a_part_has_come_is_computed_whole() {
    for family in [FAMILIES[0], FAMILIES[3]] {
        let Family { options, kind, _folder } = &Family::new(family, 2);
        // A frame has 64 positions at most, and the image twice as many.
        let options = &EngineOptions { n_ubatch: Some(64), ..options.clone() };
        let node = peers::node(models::start(options.clone(), None).await, Role::Prefill, peers::KEY).await;
        let alone = models::start(options.clone(), None).await;
        let image = picture(200, 1_200);
        let request = about(&*alone, &[(&image, LONG)], None).await;
        assert!(runs(&request.prompt)[0].len() > 128, "{kind:?}");
        let expected = peers::generate(&*alone, request).await.tokens;
        let pull = async |url: String| {
            let decoder = models::start(options.clone(), Some(peers::puller(PullPolicy::default()))).await;
            let request = about(&*decoder, &[(&image, LONG)], None).await;
            let kv_source = Some(KvSource::at(&url));
            let reply = peers::generate(&*decoder, SequenceRequest { kv_source, ..request }).await;
            assert_eq!(reply.tokens, expected, "{kind:?}: {:?}", reply.handoff);
            reply.handoff.unwrap()
        };
        let whole = pull(node.url.clone()).await;
        assert_eq!(whole.failure, None, "{kind:?}");
        let mut n_came = Vec::new();
        for eighths in 2..8 {
            let handoff = pull(breaking(&node, whole.n_bytes as usize * eighths / 8).await).await;
            assert!(handoff.failure.is_some() && handoff.n_tokens < whole.n_tokens, "{kind:?} {eighths}: {handoff:?}");
            n_came.push(handoff.n_tokens);
        }
        assert!(kind == &TinyProjector::Qwen35 || n_came.iter().any(|n| *n > 0), "{kind:?}: {n_came:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_about_an_image_outlives_its_slot() {
    for family in FAMILIES {
        let Family { options, kind, _folder } = &Family::new(family, 1);
        let engine = models::start(options.clone(), None).await;
        let (ours, theirs) = (picture(200, 160), picture(20, 240));
        let ask = async |image: &Image| peers::generate(&*engine, about(&*engine, &[(image, LONG)], None).await).await;
        let expected = ask(&ours).await;
        assert!(expected.timings.prompt_n > MOST_COMPUTED, "{kind:?}");
        // The only slot is another's now.
        assert!(ask(&theirs).await.timings.prompt_n > MOST_COMPUTED, "{kind:?}");
        let again = ask(&ours).await;
        assert!(again.timings.prompt_n <= MOST_COMPUTED, "{kind:?}: {:?}", again.timings);
        assert_eq!(again.tokens, expected.tokens, "{kind:?}");
    }
}
