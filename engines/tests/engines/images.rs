//! Images in prompts, with real models and projectors of random weights. Their embeddings are noise, but they change
//! the reply, and only where they should.

use std::io::Cursor;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use baton_engines::registry::{self, EngineOptions};
use baton_link::{Engine, SequenceStream};
use baton_model::limits::DEFAULT_SLOTS;
use baton_schemas::generate::{Conversation, Message, Sampling};
use baton_schemas::image::{Image, ImageShape, PromptImages, is_placeholder, runs};
use baton_schemas::{EngineError, MessageRole, SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;
use image::{ImageFormat, Rgb, RgbImage};
use tiny_gguf::projector::{self, N_ROWS, TinyProjector};
use tokio::sync::oneshot;

use crate::models;

/// The embedding sizes of SmolLM2-135M and of Gemma 3 270M.
const SMOL: usize = 576;
const GEMMA: usize = 640;

const GEMMA_TEMPLATE: &str = "<start_of_turn>user\n{{ messages[0].content }}<end_of_turn>\n<start_of_turn>model\n";

/// An engine with a projector that is written for its model.
fn with_projector(model: &Path, kind: TinyProjector, n_embd: usize) -> Arc<dyn Engine> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mmproj.gguf");
    projector::write(&path, kind, n_embd, 1);
    // The Gemma model is a base model without a chat template.
    let chat_template = (n_embd == GEMMA).then(|| GEMMA_TEMPLATE.to_owned());
    let config = EngineOptions { n_ctx: Some(1024), n_cells: Some(2048), chat_template, ..config(model, &path) };
    registry::open(config, None).unwrap()
}

fn config(model: &Path, projector: &Path) -> EngineOptions {
    EngineOptions { projector: Some(projector.to_owned()), ..models::of_llama(model) }
}

/// Squares of two colours.
fn picture(a: [u8; 3], b: [u8; 3]) -> Image {
    let picture = RgbImage::from_fn(64, 48, |x, y| Rgb(if (x / 8 + y / 8) % 2 == 0 { a } else { b }));
    let mut bytes = Cursor::new(Vec::new());
    picture.write_to(&mut bytes, ImageFormat::Png).unwrap();
    Image::new(bytes.into_inner(), "image")
}

fn red() -> Image {
    picture([255, 0, 0], [250, 240, 0])
}

fn blue() -> Image {
    picture([0, 0, 255], [0, 40, 10])
}

/// A user's message with these images before the question.
fn question(images: &[Image]) -> Conversation {
    let marks: String = images.iter().map(Image::mark).collect();
    let content = format!("Look: {marks}\nWhat do you see?");
    let messages = vec![Message::new(MessageRole::User, content)];
    Conversation { messages, images: images.to_vec(), ..Conversation::default() }
}

async fn request(engine: &dyn Engine, images: &[Image], max_tokens: u32) -> SequenceRequest {
    let prompt = engine.render(&question(images), Default::default()).await.unwrap();
    let projector = engine.info().await.unwrap().projector.unwrap();
    SequenceRequest {
        prompt,
        images: Some(PromptImages { projector, images: images.to_vec() }),
        sampling: Sampling { temperature: 0.0, repeatable: true, ..Sampling::default() },
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        ..SequenceRequest::default()
    }
}

/// The tokens of a stream, and how many tokens of its prompt were cached.
async fn said(mut events: SequenceStream) -> (Vec<Token>, usize) {
    let mut tokens = Vec::new();
    let mut cached = 0;
    while let Some(event) = events.next().await {
        match event.unwrap() {
            SequenceEvent::Started(found) => cached = found.n_cached as usize,
            SequenceEvent::Token(token) => tokens.push(token.id),
            SequenceEvent::PrefillBegun | SequenceEvent::Handoff(_) | SequenceEvent::Finished { .. } => {}
        }
    }
    (tokens, cached)
}

async fn answer(engine: &dyn Engine, images: &[Image]) -> (Vec<Token>, usize) {
    let request = request(engine, images, 24).await;
    said(engine.generate(request).await.unwrap()).await
}

/// The log-probability of the first token.
async fn sureness(engine: &dyn Engine, images: &[Image]) -> f32 {
    let request = SequenceRequest { top_logprobs: Some(0), ..request(engine, images, 1).await };
    let events: Vec<_> = engine.generate(request).await.unwrap().collect().await;
    let token = events.into_iter().find_map(|event| match event.unwrap() {
        SequenceEvent::Token(token) => token.logprobs,
        _ => None,
    });
    token.unwrap().chosen
}

async fn is_idle(engine: &dyn Engine) {
    let idle = async {
        while engine.load().await.map(|load| (load.active_slots, load.queued)).unwrap() != (0, 0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), idle).await.expect("a slot is leaked");
}

/// Checks that hold for every projector.
async fn sees(engine: &dyn Engine) {
    let prompt = engine.render(&question(&[red()]), Default::default()).await.unwrap();
    let run = runs(&prompt).remove(0);
    assert!(run.len() >= N_ROWS, "{run:?}");
    let (of_red, _) = answer(engine, &[red()]).await;
    let (of_blue, cached) = answer(engine, &[blue()]).await;
    assert!((1..=run.start).contains(&cached), "{cached} tokens of {run:?} were those of another image");
    // When repeated, the prompt is fully cached and the reply is the same, also if another slot was forked from it.
    assert_eq!(answer(engine, &[red()]).await, (of_red.clone(), prompt.len() - 1));
    assert_eq!(answer(engine, &[blue()]).await.0, of_blue);
    let (of_both, cached) = answer(engine, &[red(), blue()]).await;
    assert_eq!(cached, run.end, "the first image was cached");
    let (of_both_again, _) = answer(engine, &[red(), blue()]).await;
    assert_eq!(of_both, of_both_again);
    let (turned, cached) = answer(engine, &[blue(), red()]).await;
    assert_eq!((turned.len(), cached), (24, run.end), "the other image was cached, too");
    // Noise rarely changes the first words, but always their probability.
    let sure_of_red = sureness(engine, &[red()]).await;
    let sure_of_blue = sureness(engine, &[blue()]).await;
    assert!((sure_of_red - sure_of_blue).abs() > 1e-4, "the image makes no difference");
    let orders = [sureness(engine, &[red(), blue()]).await, sureness(engine, &[blue(), red()]).await];
    assert!((orders[0] - orders[1]).abs() > 1e-4, "the order of images makes no difference");
}

#[tokio::test]
async fn images_are_decoded_and_cached_by_their_content() {
    let Some(model) = models::smollm2() else { return };
    sees(&*with_projector(&model, TinyProjector::Mlp, SMOL)).await;
}

#[tokio::test]
async fn embeddings_that_attend_to_each_other_are_decoded_at_once() {
    let Some(model) = models::smollm2() else { return };
    sees(&*with_projector(&model, TinyProjector::Gemma3, SMOL)).await;
}

#[tokio::test]
async fn a_sliding_window_slides_over_images() {
    let Some(model) = models::gemma3() else { return };
    sees(&*with_projector(&model, TinyProjector::Gemma3, GEMMA)).await;
}

#[tokio::test]
async fn a_stream_continues_where_another_engine_left_it() {
    let Some(model) = models::smollm2() else { return };
    let whole = answer(&*with_projector(&model, TinyProjector::Mlp, SMOL), &[red()]).await.0;
    let other = with_projector(&model, TinyProjector::Mlp, SMOL);
    let mut request = request(&*other, &[red()], 24).await;
    request.generated = whole[..9].to_vec();
    assert_eq!(said(other.generate(request).await.unwrap()).await.0, whole[9..]);
}

#[tokio::test]
async fn a_text_is_the_same_while_images_are_decoded() {
    let Some(model) = models::smollm2() else { return };
    let engine = with_projector(&model, TinyProjector::Mlp, SMOL);
    let text = async |engine: &dyn Engine, begun: oneshot::Sender<()>| {
        let content = "Count from one to twenty, in digits.".to_owned();
        let messages = vec![Message::new(MessageRole::User, content)];
        let prompt =
            engine.render(&Conversation { messages, ..Conversation::default() }, Default::default()).await.unwrap();
        let sampling = Sampling { temperature: 0.0, repeatable: true, ..Sampling::default() };
        let request = SequenceRequest { prompt, sampling, max_tokens: Some(40), ..SequenceRequest::default() };
        let mut stream = engine.generate(request).await.unwrap();
        // The first event is `Started`, the second a token.
        let first: Vec<_> = stream.by_ref().take(2).collect().await;
        let _ = begun.send(());
        said(futures::stream::iter(first).chain(stream).boxed()).await.0
    };
    let alone = text(&*engine, oneshot::channel().0).await;
    let (begun, has_begun) = oneshot::channel();
    let meanwhile = {
        let engine = Arc::clone(&engine);
        tokio::spawn(async move { text(&*engine, begun).await })
    };
    // 39 tokens are still to come.
    has_begun.await.unwrap();
    for i in 0..4 {
        answer(&*engine, &[picture([i, 0, 0], [0, i, 0]), red()]).await;
    }
    assert_eq!(meanwhile.await.unwrap(), alone);
}

#[tokio::test]
async fn a_reader_that_leaves_frees_its_slot() {
    let Some(model) = models::smollm2() else { return };
    let engine = with_projector(&model, TinyProjector::Gemma3, SMOL);
    let of_red = answer(&*engine, &[red()]).await;
    for n_read in 0..3 {
        let mut left = Vec::new();
        for i in 0..8 {
            let request = request(&*engine, &[picture([i, 9, 0], [0, i, 7])], 500).await;
            left.push(engine.generate(request).await.unwrap());
        }
        // The others wait for a slot until these are finished or dropped.
        for stream in left.iter_mut().take(DEFAULT_SLOTS as usize) {
            for _ in 0..n_read {
                stream.next().await.unwrap().unwrap();
            }
        }
        drop(left);
        is_idle(&*engine).await;
    }
    // On a GPU, the cells that a text lies in change its last digits, and after some tokens the text.
    let n_compared = if models::has_gpu() { 8 } else { of_red.0.len() };
    assert_eq!(answer(&*engine, &[red()]).await.0[..n_compared], of_red.0[..n_compared]);
}

#[tokio::test]
async fn invalid_images_are_refused_and_affect_nothing_else() {
    let Some(model) = models::smollm2() else { return };
    let engine = with_projector(&model, TinyProjector::Mlp, SMOL);
    let refused = |outcome: Result<Vec<Token>, EngineError>, part: &str| match outcome {
        Err(error) => assert!(error.to_string().contains(part), "{error}"),
        Ok(tokens) => panic!("{part}: {} tokens", tokens.len()),
    };
    let broken = Image::new(red().bytes()[..60].to_vec(), "messages[0].content[1]");
    refused(
        engine.render(&question(&[broken]), Default::default()).await,
        "Invalid 'messages[0].content[1]': the image cannot be read",
    );
    // A mark without an image is an error, and so is an image without a mark.
    let mut twice = question(&[red()]);
    twice.messages[0].content += &red().mark();
    refused(engine.render(&twice, Default::default()).await, "2 of 1 images");
    let none = Conversation { messages: question(&[]).messages, images: vec![red()], ..Conversation::default() };
    refused(engine.render(&none, Default::default()).await, "0 of 1 images");
    let stray = Conversation { messages: question(&[red()]).messages, ..Conversation::default() };
    assert!(engine.render(&stray, Default::default()).await.unwrap().iter().all(|t| !is_placeholder(*t)));

    let whole = request(&*engine, &[red()], 4).await;
    let not_taken = async |request: SequenceRequest, part: &str| {
        let error = engine.generate(request).await.err().expect("a refusal").to_string();
        assert!(error.contains(part), "{error}");
    };
    not_taken(SequenceRequest { images: None, ..whole.clone() }, "not in the vocabulary").await;
    let of = |projector: &str, image| Some(PromptImages { projector: projector.into(), images: vec![image] });
    let ours = engine.info().await.unwrap().projector.unwrap();
    not_taken(SequenceRequest { images: of(&ours, blue()), ..whole.clone() }, "placeholders of no image").await;
    not_taken(SequenceRequest { images: of("other", red()), ..whole.clone() }, "another projector").await;
    // If the image cannot be read or has another size, only its sequence fails.
    let broken = Image::new(red().bytes()[..60].to_vec(), "f");
    for (image, n) in [(broken, 16), (red(), 17)] {
        let prompt = [&[1][..], &image.placeholders(&ImageShape::plain(n)), &[2]].concat();
        let wrong = SequenceRequest { prompt, images: of(&ours, image), ..whole.clone() };
        let events: Vec<_> = engine.generate(wrong).await.unwrap().collect().await;
        assert!(matches!(events.last(), Some(Err(EngineError::InvalidRequest { .. }))), "{events:?}");
    }
    is_idle(&*engine).await;
    assert_eq!(said(engine.generate(whole).await.unwrap()).await.0.len(), 4);
}

#[tokio::test]
async fn an_engine_does_not_start_with_a_wrong_projector() {
    let Some(model) = models::smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let refused = |projector: &Path, part: &str| {
        let config = config(&model, projector);
        let error = registry::open(config, None).err().expect("a refusal").to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{error}");
    };
    let of_another = folder.path().join("gemma.gguf");
    projector::write(&of_another, TinyProjector::Mlp, GEMMA, 1);
    refused(&of_another, "the projector of another model");
    refused(&model, "is not a projector");
    refused(&folder.path().join("missing.gguf"), "no model file at");
    let text = folder.path().join("text.gguf");
    std::fs::write(&text, "hello").unwrap();
    refused(&text, "is not a GGUF file");
    let without_projector = registry::open(models::of_llama(&model), None).unwrap();
    let error = without_projector.render(&question(&[red()]), Default::default()).await.unwrap_err();
    assert!(matches!(error, EngineError::Unsupported { .. }), "{error}");
}
