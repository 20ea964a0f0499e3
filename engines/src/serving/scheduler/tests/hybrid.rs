//! Hybrid and recurrent models: what they compute again, and that their replies are those of an engine that computes all.

use std::sync::Arc;

use baton_model::gguf::Gguf;
use baton_model::options::Speculation;
use baton_schemas::image::{Image, PromptImages};
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{SequenceRequest, Token};
use llama_cpp_2::model::LlamaModel;
use tiny_gguf::Architecture;

use super::super::Speculating;
use super::super::agent_trace::AgentTrace;
use super::storing::storing;
use super::{Events, Scheduler, loaded, request, scheduler_of, submit, turn};
use crate::engine_options::EngineOptions;
use crate::llama::probe;
use crate::llama::projector::Projector;
use crate::serving::images::ImageEncoder;

const N_CELLS: u32 = 8_192;

const MODELS: [Architecture; 4] =
    [Architecture::Qwen35, Architecture::NemotronH, Architecture::Lfm2, Architecture::Mamba2];

/// A reply's tokens with the bits of their log-probabilities.
type Reply = Vec<(Token, u32)>;

fn ids(reply: &Reply) -> Vec<Token> {
    reply.iter().map(|(token, _)| *token).collect()
}

struct Reused {
    n_cached: usize,
    /// Prompt tokens that were computed.
    n_computed: usize,
    reply: Reply,
}

struct Subject {
    model: Arc<LlamaModel>,
    options: EngineOptions,
    trace: AgentTrace,
    folder: tempfile::TempDir,
}

impl Subject {
    fn new(architecture: Architecture) -> Subject {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tiny.gguf");
        tiny_gguf::write(&file, architecture, 1);
        let (model, options) = loaded(&file);
        let vocabulary = crate::llama::vocabulary::vocabulary(&model);
        let mut control = vocabulary.control();
        let begin = control.next().unwrap();
        let control = [begin, control.next().unwrap_or(begin)];
        let trace = AgentTrace {
            n_system: 300,
            n_instruction: 40,
            n_tool_result: 100,
            n_reasoning: 30,
            n_call: 20,
            n_text: 250,
            control,
        };
        Subject { model, options, trace, folder }
    }

    fn scheduler(&self) -> Scheduler<'_> {
        let mut scheduler = scheduler_of(&self.model, self.options.clone(), N_CELLS);
        let (gguf, n_slots) = (Gguf::open(self.options.path().unwrap()).unwrap(), self.options.slots());
        let transfer = probe::probe(&mut scheduler.context.context, &self.model, &gguf, n_slots, None).unwrap();
        scheduler.context = scheduler.context.with_transfer(Some(transfer), n_slots);
        scheduler.with_checkpoints(u64::MAX)
    }

    /// The same, which moves idle conversations out of the cache.
    fn storing(&self) -> Scheduler<'_> {
        let scheduler = storing(&self.model, self.options.clone(), N_CELLS, usize::MAX);
        scheduler.with_checkpoints(u64::MAX)
    }

    /// The reply of a fresh engine, whose steps also end at `ends`: a batch's shape changes the rounding.
    fn alone(&self, prompt: &[Token], ends: &[usize]) -> Reply {
        let mut scheduler = self.scheduler();
        let mut events = submit(&mut scheduler, request(prompt.to_vec()));
        scheduler.fill_slots();
        let slot = scheduler.running.iter().position(Option::is_some).unwrap();
        ends.iter().for_each(|end| scheduler.add_mark(slot, *end));
        rest_of(&mut scheduler, &mut events).reply
    }

    /// Text that is no control token.
    fn text(&self, seed: u32, n: usize) -> Vec<Token> {
        let [begin, end] = self.trace.control;
        let text = self.trace.text(seed, n).into_iter();
        text.map(|token| if token == begin || token == end { 100 } else { token }).collect()
    }
}

fn ask(scheduler: &mut Scheduler<'_>, prompt: &[Token], n_reply: usize) -> Reused {
    ask_predicting(scheduler, prompt, n_reply, &[])
}

/// The same for a client that predicts the reply.
fn ask_predicting(scheduler: &mut Scheduler<'_>, prompt: &[Token], n_reply: usize, predicted: &[Token]) -> Reused {
    let max_tokens = Some(n_reply as u32);
    let request = SequenceRequest { max_tokens, predicted: predicted.to_vec(), ..request(prompt.to_vec()) };
    let mut events = submit(scheduler, request);
    rest_of(scheduler, &mut events)
}

fn rest_of(scheduler: &mut Scheduler<'_>, events: &mut Events) -> Reused {
    let (mut n_cached, mut reply) = (0, Vec::new());
    for _ in 0..1_000 {
        turn(scheduler);
        while let Ok(event) = events.try_recv() {
            match event.unwrap() {
                SequenceEvent::Started(cached) => n_cached = cached.n_cached as usize,
                SequenceEvent::Token(token) => reply.push((token.id, token.logprobs.unwrap().chosen.to_bits())),
                SequenceEvent::PrefillBegun | SequenceEvent::Handoff(_) => {}
                SequenceEvent::Finished { timings, .. } => {
                    return Reused { n_cached, n_computed: timings.prompt_n as usize, reply };
                }
            }
        }
    }
    panic!("the reply did not end");
}

#[test]
fn the_same_prompt_asked_again_computes_one_token_of_a_hybrid_model() {
    for architecture in MODELS {
        let subject = Subject::new(architecture);
        let mut scheduler = subject.scheduler();
        let prompt = subject.text(1, 803);
        let first = ask(&mut scheduler, &prompt, 24);
        let again = ask(&mut scheduler, &prompt, 24);
        assert_eq!((first.n_cached, again.n_cached, again.n_computed), (0, 802, 1), "{architecture:?}");
        assert!(first.reply == again.reply && again.reply == subject.alone(&prompt, &[]), "{architecture:?}");
    }
}

#[test]
fn a_branch_of_a_hybrid_model_is_computed_from_where_it_leaves() {
    for architecture in MODELS {
        let mut subject = Subject::new(architecture);
        // Beside another conversation, the cells of this one lie in another order, which changes the rounding.
        subject.options.n_slots = Some(1);
        let mut scheduler = subject.scheduler();
        let branch = |seed| [subject.text(1, 700), subject.text(seed, 103)].concat();
        let n_cached = [2, 3, 4].map(|seed| ask(&mut scheduler, &branch(seed), 8).n_cached);
        let n_common = [3, 4].map(|seed| branch(2).iter().zip(&branch(seed)).take_while(|(a, b)| a == b).count());
        assert_eq!((n_cached[1], n_common[0]), (0, n_common[1]), "{architecture:?}");
        assert_eq!(n_cached[2], n_common[1], "{architecture:?}");
        let last = ask(&mut scheduler, &branch(5), 24);
        assert_eq!(last.n_computed, 803 - n_common[1], "{architecture:?}");
        assert!(last.reply == subject.alone(&branch(5), &[n_common[1]]), "{architecture:?}");
    }
}

#[test]
fn a_second_turn_of_a_hybrid_model_computes_what_follows_its_last_checkpoint() {
    for architecture in MODELS {
        let subject = Subject::new(architecture);
        let first = [subject.text(1, 900), subject.trace.said(2, 60)].concat();
        let a = AgentTrace::n_before_reply(&first);
        let mut reply = ids(&subject.alone(&first, &[]));
        let second_turn = |said: &[Token], n_expected: usize, what| {
            let mut scheduler = subject.scheduler();
            ask(&mut scheduler, &first, 24);
            let second = [said, &subject.trace.said(3, 20)].concat();
            let turn = ask(&mut scheduler, &second, 24);
            assert_eq!(
                (turn.n_cached, turn.n_computed),
                (n_expected, second.len() - n_expected),
                "{architecture:?} {what}"
            );
            (turn.reply, second)
        };
        let check = |(reply, second): (Reply, Vec<Token>), ends: &[usize]| {
            assert!(reply == subject.alone(&second, ends), "{architecture:?}");
        };
        // The reply's tokens were decoded one by one, so only the tokens are equal.
        let (as_it_was, second) = second_turn(&[&first[..], &reply].concat(), first.len() + 23, "as it was");
        assert_eq!(ids(&as_it_was), ids(&subject.alone(&second, &[])), "{architecture:?}");
        let begin = subject.trace.control[0];
        check(second_turn(&[&first[..a], &[begin, 4], &reply[12..]].concat(), a, "without its reasoning"), &[a]);
        reply[2] = (reply[2] + 1) % 200;
        let b = first.len() - 1;
        check(second_turn(&[&first[..], &reply].concat(), b, "tokenized in another way"), &[a, b]);
    }
}

#[test]
fn an_idle_conversation_of_a_hybrid_model_leaves_the_cache_and_comes_back_unchanged() {
    for architecture in [Architecture::Qwen35, Architecture::NemotronH, Architecture::Lfm2] {
        let subject = Subject::new(architecture);
        let first = [subject.text(1, 300), subject.trace.said(2, 60)].concat();
        let mut kept = subject.scheduler();
        let said = ids(&ask(&mut kept, &first, 24).reply);
        let second = [&first[..], &said, &subject.trace.said(3, 20)].concat();
        let expected = ask(&mut kept, &second, 24);
        let mut scheduler = subject.storing();
        ask(&mut scheduler, &first, 24);
        // So slow a prefill leaves time for all copies, however busy the machine is.
        scheduler.prefill_tps = 1e-3;
        ask(&mut scheduler, &subject.text(7, 200), 24);
        assert!(scheduler.slots.iter().filter(|slot| !slot.kv.is_empty()).count() == 1, "{architecture:?}");
        let turn = ask(&mut scheduler, &second, 24);
        assert_eq!((turn.n_cached, turn.n_computed), (expected.n_cached, expected.n_computed), "{architecture:?}");
        assert!(turn.reply == expected.reply, "{architecture:?}");
    }
}

/// Refused guesses are taken back before states are kept, parked, shared and returned to.
#[test]
fn conversations_of_a_speculating_hybrid_model_go_on_as_without_guesses() {
    for architecture in [Architecture::Qwen35, Architecture::NemotronH, Architecture::Lfm2] {
        let mut subject = Subject::new(architecture);
        let first = [subject.text(1, 300), subject.trace.said(2, 60)].concat();
        let (said, second, expected) = {
            let mut plain = subject.scheduler();
            let said = ids(&ask(&mut plain, &first, 24).reply);
            let second = [&first[..], &said, &subject.trace.said(3, 20)].concat();
            let expected = ids(&ask(&mut plain, &second, 24).reply);
            (said, second, expected)
        };
        subject.options.speculation = Some(Speculation::Auto);
        // The last guesses of each reply are refused.
        let wrong = |reply: &[Token]| [&reply[..20], &[(reply[20] + 1) % 200; 4]].concat();
        for parks in [false, true] {
            let scheduler = if parks { subject.storing() } else { subject.scheduler() };
            let mut scheduler = scheduler.with_speculation(Some(Speculating::fixed(3)));
            // So slow a prefill leaves time for all copies, however busy the machine is.
            scheduler.prefill_tps = 1e-3;
            assert_eq!(ids(&ask_predicting(&mut scheduler, &first, 24, &wrong(&said)).reply), said, "{architecture:?}");
            scheduler.prefill_tps = 1e-3;
            ask(&mut scheduler, &subject.text(7, 200), 24);
            scheduler.prefill_tps = 1e-3;
            for _ in 0..2 {
                let turn = ask_predicting(&mut scheduler, &second, 24, &wrong(&expected));
                assert_eq!(ids(&turn.reply), expected, "{architecture:?}, parks: {parks}");
                assert!(turn.n_cached > first.len(), "{architecture:?}, parks: {parks}: {}", turn.n_cached);
            }
        }
    }
}

#[test]
fn the_text_before_an_image_is_computed_once_for_several_images() {
    let mut subject = Subject::new(Architecture::Lfm2);
    let file = subject.folder.path().join("mmproj.gguf");
    tiny_gguf::projector::write(&file, tiny_gguf::projector::TinyProjector::Mlp, 64, 1);
    subject.options.projector = Some(file);
    let projector = Projector::load(&subject.options, &subject.model).unwrap().unwrap();
    let mut scheduler = subject.scheduler();
    scheduler.context = scheduler.context.with_projector(Some(Arc::clone(&projector)));
    let n_cached = [100, 200].map(|shade| {
        let mut bytes = std::io::Cursor::new(Vec::new());
        let picture = image::RgbImage::from_pixel(64, 48, image::Rgb([shade; 3]));
        picture.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
        let image = Image::new(bytes.into_inner(), "image");
        let placeholders = image.placeholders(&projector.shape(&image).unwrap());
        let prompt = [&subject.text(1, 200)[..], &placeholders, &subject.text(2, 20)].concat();
        let images = Some(PromptImages { projector: projector.id().to_owned(), images: vec![image] });
        let mut events = submit(&mut scheduler, SequenceRequest { images, ..request(prompt) });
        rest_of(&mut scheduler, &mut events).n_cached
    });
    assert_eq!(n_cached, [0, 200]);
}

/// The other models of [`MODELS`] compute as many tokens, too.
#[test]
fn forty_turns_of_an_agent_compute_no_more_on_a_hybrid_model_than_on_another() {
    let n_computed = |architecture| {
        let subject = Subject::new(architecture);
        let mut scheduler = subject.scheduler();
        let mut n_computed = 0;
        let (n_new, n_whole) = subject.trace.run(40, |prompt, n_reply| {
            let turn = ask(&mut scheduler, prompt, n_reply);
            n_computed += turn.n_computed;
            ids(&turn.reply)
        });
        println!("{architecture:?}: {n_computed} of {n_whole} prompt tokens computed, {n_new} of them are new");
        n_computed
    };
    let dense = n_computed(Architecture::Llama);
    let hybrid = n_computed(Architecture::Qwen35);
    assert!(hybrid <= dense + 40 * 4, "{hybrid} tokens, and {dense} without states");
}
