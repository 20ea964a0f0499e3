//! Facts from far back. A mean divergence hides whether a model still finds what a long prompt says once. So it is asked: three
//! facts a prompt, near its start, its middle and its end, in prose and in code.

use baton_engines::llama::reference::Reference;
use baton_proxy::serve::CommandFailure;
use baton_schemas::Token;
use serde::Serialize;

use super::subject::Subject;
use super::tried::{PROMPT_STRIDE, TriedModel};

/// Tokens of the prompts.
pub(super) const LENGTHS: [usize; 4] = [2_000, 3_000, 4_500, 6_000];

/// Where the facts of a prompt are.
const PLACES: [f64; 3] = [0.1, 0.5, 0.9];

/// Tokens of a question and its answer, at most.
pub(super) const MAX_QUESTION: usize = 128;

const NAMES: [&str; 12] = [
    "Kestrel", "Marlow", "Juniper", "Falcon", "Willow", "Amber", "Cedar", "Harbor", "Meadow", "Raven", "Summit",
    "Timber",
];

/// The answers of one subject.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Recall {
    pub(super) name: String,
    /// Of all questions.
    pub(super) n_answered: usize,
    /// Questions that are answered from the KV as it is, and not from this.
    pub(super) n_lost: usize,
}

/// All questions of a model.
#[derive(Debug, Clone, Serialize)]
pub(super) struct RecallFigures {
    pub(super) n_questions: usize,
    /// Answered from the KV as it is.
    pub(super) n_answered: usize,
    pub(super) subjects: Vec<Recall>,
}

/// What a prompt says once.
struct Fact {
    /// In the prompt.
    stated: String,
    /// After it.
    question: String,
    answer: String,
}

/// Fact number `n` of all prompts. Every other prompt has code.
fn fact(n: usize, is_code: bool) -> Fact {
    let name = NAMES[n % NAMES.len()];
    // A number of four digits that text does not suggest.
    let answer = (1_000 + (n as u64 * 7_919 + 4_241) % 9_000).to_string();
    if is_code {
        let constant = format!("{}_PORT", name.to_uppercase());
        Fact {
            stated: format!("\n\npub const {constant}: u16 = {answer};\n\n"),
            question: format!("\n\n#[test]\nfn the_port_is_as_agreed() {{\n    // pub const {constant}: u16 ="),
            answer: format!(" {answer};"),
        }
    } else {
        Fact {
            stated: format!("\n\nRemember this: the number of {name}'s locker is {answer}.\n\n"),
            question: format!(
                "\n\nQuestion: What is the number of {name}'s locker?\nAnswer: The number of {name}'s locker is"
            ),
            answer: format!(" {answer}."),
        }
    }
}

/// Asks about `n_prompts` prompts, from the KV as it is and from that of every subject.
pub(super) fn ask(
    model: &Reference,
    tried: &mut TriedModel<'_>,
    n_prompts: usize,
    n_chunk: usize,
) -> Result<RecallFigures, CommandFailure> {
    let subjects = Subject::all(tried.trial.layout(), tried.profile.is_some());
    let mut recalls: Vec<Recall> =
        subjects.iter().map(|subject| Recall { name: subject.name(), n_answered: 0, n_lost: 0 }).collect();
    let mut report = RecallFigures { n_questions: 0, n_answered: 0, subjects: Vec::new() };
    for n in 0..n_prompts {
        let length = LENGTHS[n % LENGTHS.len()];
        eprintln!("recall: prompt {} of {n_prompts}, {length} tokens", n + 1);
        let facts: Vec<Fact> = (0..PLACES.len()).map(|i| fact(PLACES.len() * n + i, n % 2 == 1)).collect();
        let stated: Vec<Vec<Token>> = facts.iter().map(|fact| model.tokenize(&fact.stated)).collect();
        let n_text = length - tried.beginning.len();
        let prompt = [&tried.beginning[..], &with_facts(&tried.text, PROMPT_STRIDE * n, n_text, &stated)].concat();
        let plain = tried.trial.prefill(&prompt, n_chunk)?;
        let questions: Vec<(Vec<Token>, usize)> = facts.iter().map(|fact| question(model, fact)).collect();
        let mut known = Vec::new();
        for (tokens, n_answer) in &questions {
            known.push(is_answered(&tried.trial.logits(&plain, tokens)?, tokens, *n_answer));
        }
        report.n_questions += known.len();
        report.n_answered += known.iter().filter(|known| **known).count();
        for (subject, recall) in subjects.iter().zip(&mut recalls) {
            let passed = subject.pass(tried, &prompt, &plain)?;
            for ((tokens, n_answer), known) in questions.iter().zip(&known) {
                let is_answered = is_answered(&tried.trial.logits(&passed.kv, tokens)?, tokens, *n_answer);
                recall.n_answered += usize::from(is_answered);
                recall.n_lost += usize::from(*known && !is_answered);
            }
        }
    }
    Ok(RecallFigures { subjects: recalls, ..report })
}

/// `length` tokens of text with the facts in it.
fn with_facts(text: &[Token], skipped: usize, length: usize, facts: &[Vec<Token>]) -> Vec<Token> {
    let n_facts: usize = facts.iter().map(Vec::len).sum();
    let n_text = length.saturating_sub(n_facts);
    let text: Vec<Token> = text.iter().copied().cycle().skip(skipped).take(n_text).collect();
    let mut prompt = Vec::with_capacity(length);
    let mut from = 0;
    for (fact, place) in facts.iter().zip(PLACES) {
        let to = (place * n_text as f64) as usize;
        prompt.extend_from_slice(&text[from..to]);
        prompt.extend_from_slice(fact);
        from = to;
    }
    prompt.extend_from_slice(&text[from..]);
    prompt
}

/// A question with its answer, and how many tokens the answer has.
fn question(model: &Reference, fact: &Fact) -> (Vec<Token>, usize) {
    let without = model.tokenize(&fact.question);
    let mut tokens = model.tokenize(&(fact.question.clone() + &fact.answer));
    tokens.truncate(MAX_QUESTION);
    let n_same = without.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
    let n_answer = tokens.len() - n_same;
    (tokens, n_answer)
}

/// Returns true if each token of the answer is the likeliest after those before it.
fn is_answered(logits: &[Vec<f32>], tokens: &[Token], n_answer: usize) -> bool {
    let first = tokens.len() - n_answer;
    first > 0
        && n_answer > 0
        && (first..tokens.len()).all(|i| {
            let likeliest = logits[i - 1].iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            likeliest.is_some_and(|(token, _)| token == tokens[i] as usize)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_stand_at_their_places() {
        let text: Vec<Token> = (0..50).collect();
        let facts = [vec![900, 901], vec![902], vec![903]];
        let prompt = with_facts(&text, 3, 104, &facts);
        assert_eq!(prompt.len(), 104);
        let at = |token| prompt.iter().position(|found| *found == token).unwrap();
        assert_eq!([at(900), at(902), at(903)], [10, 52, 93]);
        assert_eq!(prompt[..3], [3, 4, 5]);
    }

    #[test]
    fn every_token_of_an_answer_counts() {
        let logits = |likeliest: usize| (0..4).map(|i| f32::from(u8::from(i == likeliest))).collect::<Vec<f32>>();
        let tokens = [1, 2, 3];
        assert!(is_answered(&[logits(2), logits(3), logits(0)], &tokens, 2));
        assert!(!is_answered(&[logits(2), logits(1), logits(0)], &tokens, 2));
        assert!(!is_answered(&[logits(1), logits(3), logits(0)], &tokens, 2));
        assert!(!is_answered(&[logits(2), logits(3), logits(0)], &tokens, 0), "no answer");
    }
}
