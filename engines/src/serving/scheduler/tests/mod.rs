//! The scheduler, step by step, with the real model: situations that no request can cause.

mod hybrid;
mod images;
mod rounding;
mod speculation;
mod storing;

use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use baton_model::gguf::Gguf;
use baton_model::options::Speculation;
use baton_schemas::image::{Image, PromptImages};
use baton_schemas::sequence::{GeneratedToken, SequenceEvent};
use baton_schemas::{EngineError, SequenceRequest, Token};
use llama_cpp_2::model::LlamaModel;
use tokio::sync::{mpsc, watch};

use super::super::images::ImageEncoder;
use super::super::jobs::{EngineLoad, Job, SchedulerMessage};
use super::super::step_budget::PrefillBudget;
use super::{NAN_WAIT, SchedulerLimits};
use crate::engine_options::EngineOptions;
use crate::llama::context::LlamaSlots;
use crate::llama::embed::Embedder;
use crate::llama::load::{self, ContextSizes};
use crate::llama::placed::Placed;
use crate::llama::projector::Projector;
use crate::llama::vocabulary::vocabulary;
use crate::serving::context::ModelContext;

/// A scheduler over llama.cpp.
type Scheduler<'m> = super::Scheduler<LlamaSlots<'m>, Embedder<'m>>;

pub(super) type Events = mpsc::Receiver<Result<SequenceEvent, EngineError>>;

const N_CELLS: u32 = 512;

/// Tokens that can be taken back of a hybrid model's states, if its context speculates.
const N_ROLLBACK: u32 = 4;

fn scheduler<'m>(model: &'m Arc<LlamaModel>, options: EngineOptions) -> Scheduler<'m> {
    scheduler_of(model, options, N_CELLS)
}

fn scheduler_of<'m>(model: &'m Arc<LlamaModel>, options: EngineOptions, n_cells: u32) -> Scheduler<'m> {
    let has_states = model.is_recurrent() || model.is_hybrid();
    let shared = Arc::new(EngineLoad { n_queued: AtomicUsize::new(0), load: watch::Sender::new(Default::default()) });
    let limits = SchedulerLimits {
        n_slots: options.slots() as usize,
        n_ctx: n_cells as usize,
        n_cells: n_cells as usize,
        budget: PrefillBudget::new(options.ubatch(), false, options.prefill_budget),
        sliding_window: None,
        has_states,
    };
    let n_rollback = match options.speculation_with_states() {
        Speculation::Auto if has_states => N_ROLLBACK,
        _ => 0,
    };
    let sizes = ContextSizes { n_cells, n_batch: options.ubatch() + options.slots(), n_rollback };
    let context = load::context(model, &options, None, sizes).unwrap();
    let slots = LlamaSlots::new(context, sizes.n_batch as usize).with_states(has_states, None);
    let slots = slots.with_rollback(n_rollback);
    let embedder = Embedder::new(model, options, None, 0, Arc::clone(&shared));
    super::Scheduler::new(slots, embedder, Arc::new(vocabulary(model)), limits, shared)
}

/// The real model or its first layers, loaded once for all tests, and a configuration whose rounding does not depend on the machine.
fn real_model() -> (Arc<LlamaModel>, EngineOptions) {
    static LOADED: LazyLock<(Arc<LlamaModel>, EngineOptions)> = LazyLock::new(|| {
        let file = std::env::var("BATON_TEST_CUT_MODEL").or_else(|_| std::env::var("BATON_TEST_MODEL"));
        loaded(file.expect("BATON_TEST_MODEL names a GGUF").as_ref())
    });
    LOADED.clone()
}

fn loaded(file: &Path) -> (Arc<LlamaModel>, EngineOptions) {
    loaded_with(EngineOptions { n_slots: Some(2), n_threads: Some(1), ..EngineOptions::of(file) })
}

fn loaded_with(options: EngineOptions) -> (Arc<LlamaModel>, EngineOptions) {
    let gguf = Gguf::open(options.path().unwrap()).unwrap();
    (Arc::new(load::model(&options, &gguf, &Placed::alone()).unwrap()), options)
}

/// A request for 24 greedy tokens with their log-probabilities.
fn request(prompt: Vec<Token>) -> SequenceRequest {
    let mut request = SequenceRequest { prompt, max_tokens: Some(24), ignore_eos: true, ..Default::default() };
    request.sampling.temperature = 0.0;
    request.top_logprobs = Some(1);
    request
}

fn submit(scheduler: &mut Scheduler<'_>, request: SequenceRequest) -> Events {
    let (events, receiver) = mpsc::channel(super::EVENT_WINDOW);
    let images = scheduler.context.projector().map_or_else(Vec::new, |projector| projector.find(&request).unwrap());
    let job = Job { request, events, accepted: Instant::now(), export: None, constrained: None, images, room: None };
    scheduler.shared.n_queued.fetch_add(1, super::Ordering::AcqRel);
    scheduler.take(SchedulerMessage::Job(Box::new(job)));
    receiver
}

/// The tokens that have arrived, and the error that ended the sequence, if there is one.
fn received(events: &mut Events) -> (Vec<GeneratedToken>, Option<EngineError>) {
    let mut tokens = Vec::new();
    while let Ok(event) = events.try_recv() {
        match event {
            Ok(SequenceEvent::Token(token)) => tokens.push(token),
            Ok(_) => {}
            Err(error) => return (tokens, Some(error)),
        }
    }
    (tokens, None)
}

fn turn(scheduler: &mut Scheduler<'_>) {
    scheduler.drop_cancelled();
    scheduler.give_way();
    scheduler.fill_slots();
    scheduler.store_idle();
    scheduler.restore_blocks();
    scheduler.prepare_images();
    scheduler.decode_next_image();
    scheduler.step();
}

#[test]
fn a_batch_that_is_refused_ends_only_the_sequence_at_fault() {
    let (model, options) = real_model();
    let mut scheduler = scheduler(&model, options);
    let mut good = submit(&mut scheduler, request((100..140).collect()));
    let mut bad = submit(&mut scheduler, request((300..340).collect()));
    for _ in 0..5 {
        turn(&mut scheduler);
    }
    let (before, none) = received(&mut good);
    assert!(none.is_none() && !before.is_empty() && before.len() < 24);
    assert!(!received(&mut bad).0.is_empty());

    // Three cells of the second sequence vanish, so that its next token does not follow its last.
    let at = (0..2).find(|&slot| scheduler.running[slot].as_ref().unwrap().tokens[0] == 300).unwrap();
    let n_left = scheduler.slots[at].kv.len() - 3;
    scheduler.context.cut(at, n_left).unwrap();
    for _ in 0..30 {
        turn(&mut scheduler);
    }
    let (after, error) = received(&mut good);
    assert!(error.is_none(), "{error:?}");
    assert_eq!(before.len() + after.len(), 24, "the other sequence goes on to its end");
    assert!(received(&mut bad).1.is_some(), "the faulty sequence gets an error");
    assert!(scheduler.running.iter().all(Option::is_none));

    // The slot of the faulty sequence works again, and so does the other slot.
    let mut again = submit(&mut scheduler, request((100..140).collect()));
    let mut anew = submit(&mut scheduler, request((300..340).collect()));
    for _ in 0..40 {
        turn(&mut scheduler);
    }
    assert_eq!(received(&mut again).0.len(), 24);
    let (tokens, error) = received(&mut anew);
    assert!(error.is_none() && tokens.len() == 24, "{error:?}");
}

#[test]
fn a_recurrent_model_whose_shared_batch_fails_ends_the_sequence_at_fault() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mamba.gguf");
    tiny_gguf::write(&file, tiny_gguf::Architecture::Mamba, 1);
    let (model, options) = loaded(&file);
    let submit_good = |scheduler: &mut Scheduler<'_>| submit(scheduler, request((100..140).collect()));
    let mut alone = scheduler(&model, options.clone());
    let mut expected = submit_good(&mut alone);
    for _ in 0..30 {
        turn(&mut alone);
    }
    let ids = |events: &mut Events| {
        let (tokens, error) = received(events);
        (tokens.iter().map(|token| token.id).collect::<Vec<_>>(), error)
    };

    // The last token of the prompt is decoded, together with those of the other sequence.
    const WRONG: Token = 7;
    let mut scheduler = scheduler(&model, options);
    scheduler.fails_at = Some(WRONG);
    let mut good = submit_good(&mut scheduler);
    let mut bad = submit(&mut scheduler, request((200..240).chain([WRONG]).collect()));
    for _ in 0..10 {
        if scheduler.running.iter().flatten().filter(|sequence| sequence.refused.is_some()).count() == 2 {
            break;
        }
        turn(&mut scheduler);
    }
    assert!(scheduler.slots.iter().all(|slot| slot.busy && slot.kv.is_empty()), "both have lost their state");
    turn(&mut scheduler);
    assert!(scheduler.slots.iter().all(|slot| !slot.kv.is_empty()), "both start again in the same step");
    for _ in 0..60 {
        turn(&mut scheduler);
    }
    assert!(matches!(ids(&mut bad), (tokens, Some(EngineError::Internal { .. })) if tokens.is_empty()));
    assert_eq!(ids(&mut good), ids(&mut expected), "the other sequence starts again and loses nothing");
    assert!(scheduler.running.iter().all(Option::is_none));
}

#[test]
fn while_freed_cells_may_hold_nan_a_sequence_waits_for_streams_but_not_for_ever() {
    let (model, options) = real_model();
    const N_TOKENS: u32 = 300;
    let mut scheduler = scheduler(&model, options);
    let long = SequenceRequest { max_tokens: Some(N_TOKENS), ..request((100..140).collect()) };
    let mut stream = submit(&mut scheduler, long);
    let new_tokens = |events: &mut Events| {
        let (tokens, error) = received(events);
        assert_eq!(error, None);
        tokens.len() as u32
    };
    let mut bad = submit(&mut scheduler, request((200..240).collect()));
    turn(&mut scheduler);
    let at = (0..2).find(|&slot| scheduler.running[slot].as_ref().unwrap().tokens[0] == 200).unwrap();
    scheduler.fail_not_finite(at);
    assert_eq!(received(&mut bad), (Vec::new(), Some(EngineError::NotFinite)));
    let mut next = submit(&mut scheduler, request((150..190).collect()));
    // The time begins anew, however slow this machine is.
    scheduler.nan_since = Some(Instant::now() + NAN_WAIT);
    for _ in 0..20 {
        turn(&mut scheduler);
        assert_eq!((scheduler.running.iter().flatten().count(), scheduler.waiting.len()), (1, 1));
    }
    let mut n_tokens = new_tokens(&mut stream);
    assert!(n_tokens > 0);
    scheduler.nan_since = scheduler.nan_since.map(|since| since - 2 * NAN_WAIT);
    for _ in 0..60 {
        turn(&mut scheduler);
        n_tokens += new_tokens(&mut stream);
    }
    assert_eq!(scheduler.nan_since, None, "the cache is overwritten");
    assert_eq!(new_tokens(&mut next), 24);
    assert!(n_tokens < N_TOKENS, "the stream still runs");
    for _ in 0..N_TOKENS {
        turn(&mut scheduler);
        n_tokens += new_tokens(&mut stream);
    }
    assert_eq!(n_tokens, N_TOKENS, "the stream goes on to its end");
}

#[test]
fn a_measurement_gives_way_and_leaves_no_trace_in_a_requests_numbers() {
    let (model, options) = real_model();
    let prompt: Vec<Token> = (100..140).collect();
    let logprobs = |events: &mut Events| {
        let (tokens, error) = received(events);
        assert!(error.is_none() && tokens.len() == 24, "{error:?}");
        tokens.into_iter().map(|token| (token.id, token.logprobs.unwrap().chosen.to_bits())).collect::<Vec<_>>()
    };
    let mut quiet = scheduler(&model, options.clone());
    let mut reply = submit(&mut quiet, request(prompt.clone()));
    for _ in 0..30 {
        turn(&mut quiet);
    }
    let expected = logprobs(&mut reply);

    let measurement = || SequenceRequest { ephemeral: true, gives_way: true, ..request((1_000..1_200).collect()) };
    // The request comes while the measurement waits, between its prompt and its first token, and while it decodes.
    for n_turns in [0, 1, 3] {
        let mut scheduler = scheduler(&model, options.clone());
        let mut measured = submit(&mut scheduler, measurement());
        for _ in 0..n_turns {
            turn(&mut scheduler);
        }
        let mut reply = submit(&mut scheduler, request(prompt.clone()));
        turn(&mut scheduler);
        assert_eq!(received(&mut measured).1, Some(EngineError::GaveWay), "after {n_turns} turns");
        // None starts beside a request, either.
        let mut another = submit(&mut scheduler, measurement());
        for _ in 0..30 {
            turn(&mut scheduler);
        }
        assert_eq!(received(&mut another).1, Some(EngineError::GaveWay));
        assert_eq!(logprobs(&mut reply), expected, "after {n_turns} turns");
        assert_eq!(scheduler.shared.n_queued.load(super::Ordering::Acquire), 0);
    }
}

#[test]
fn images_are_prepared_once_and_streams_go_on_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("llama.gguf");
    tiny_gguf::write(&file, tiny_gguf::Architecture::Llama, 1);
    let (model, mut options) = loaded(&file);
    let projector = folder.path().join("mmproj.gguf");
    tiny_gguf::projector::write(&projector, tiny_gguf::projector::TinyProjector::Mlp, 64, 1);
    options.projector = Some(projector);
    let projector = Projector::load(&options, &model).unwrap().unwrap();
    let picture = |shade| {
        let mut bytes = std::io::Cursor::new(Vec::new());
        let picture = image::RgbImage::from_pixel(64, 48, image::Rgb([shade; 3]));
        picture.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
        Image::new(bytes.into_inner(), "image")
    };
    let [rendered, other] = [picture(100), picture(200)];
    let shape = projector.shape(&rendered).unwrap();
    let about = |image: &Image| {
        let images = Some(PromptImages { projector: projector.id().to_owned(), images: vec![image.clone()] });
        let prompt = [&[100, 101][..], &image.placeholders(&shape), &[102]].concat();
        SequenceRequest { images, ..request(prompt) }
    };

    let mut scheduler = scheduler(&model, options);
    scheduler.context = scheduler.context.with_projector(Some(Arc::clone(&projector)));
    let preparing = futures::executor::block_on(projector.turn());
    // This image was prepared with its prompt, so that it needs nothing more.
    let mut first = submit(&mut scheduler, about(&rendered));
    // The projector scales an image of another prompt. Neither this image's sequence nor streams wait inside a turn.
    let scaling = projector.lock();
    let mut beside = submit(&mut scheduler, request((110..150).collect()));
    for _ in 0..30 {
        turn(&mut scheduler);
    }
    assert_eq!(received(&mut beside).0.len(), 24);
    assert_eq!(received(&mut first), (Vec::new(), None));
    drop(scaling);
    for _ in 0..30 {
        turn(&mut scheduler);
    }
    let (tokens, error) = received(&mut first);
    assert!(error.is_none() && tokens.len() == 24, "{error:?}");
    // The prompt of this image was rendered elsewhere. Others go on while it is prepared.
    let mut waiting = submit(&mut scheduler, about(&other));
    let mut streaming = submit(&mut scheduler, request((100..140).collect()));
    for _ in 0..30 {
        turn(&mut scheduler);
    }
    assert_eq!(received(&mut streaming).0.len(), 24);
    assert_eq!(received(&mut waiting), (Vec::new(), None));
    drop(preparing);
    let deadline = Instant::now() + std::time::Duration::from_secs(60);
    let mut n_tokens = 0;
    while n_tokens < 24 && Instant::now() < deadline {
        turn(&mut scheduler);
        n_tokens += received(&mut waiting).0.len();
    }
    assert_eq!(n_tokens, 24);
}
