//! llama-server beside Baton: the same file, the same tokens, its own drafters.

use std::ffi::OsString;
use std::path::Path;

use baton_proxy::serve::CommandFailure;
use baton_schemas::Token;
use baton_schemas::sequence::{DraftCounts, DraftTotals, Timings};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::args::SpeculateBenchArgs;
use super::guesser::Guesser;
use super::question::SpeculationQuestion;
use super::spoken::Spoken;
use crate::llama_server::{PeerServer, PeerServerOptions};

/// Tokens of each slot.
const N_CTX: u32 = 4_096;

/// What its `/completion` answers, as far as it is read.
#[derive(Debug, Deserialize)]
struct CompletionReply {
    tokens: Vec<Token>,
    timings: CompletionTimings,
}

#[derive(Debug, Deserialize)]
struct CompletionTimings {
    predicted_n: u32,
    predicted_ms: f64,
    #[serde(default)]
    draft_n: u32,
    #[serde(default)]
    draft_n_accepted: u32,
}

/// Starts the program with a drafter.
pub(super) async fn start(
    program: &Path,
    guesser: Guesser,
    args: &SpeculateBenchArgs,
    model: &Path,
    n_slots: u32,
) -> Result<PeerServer, CommandFailure> {
    let options = PeerServerOptions { program, model, n_slots, n_ctx: n_slots * N_CTX, threads: args.threads };
    let drafter: Vec<OsString> = match (guesser, &args.draft) {
        (Guesser::PromptLookup, _) => vec!["--spec-type".into(), "ngram-simple".into()],
        (Guesser::Head, _) => vec!["--spec-type".into(), "draft-mtp".into()],
        (Guesser::DraftModel, Some(draft)) => {
            vec!["--spec-type".into(), "draft-simple".into(), "--model-draft".into(), draft.into()]
        }
        _ => Vec::new(),
    };
    PeerServer::start(options, drafter).await
}

/// The reply to a question. When its tokens came is not known.
pub(super) async fn reply(server: &PeerServer, question: SpeculationQuestion) -> Result<Spoken, CommandFailure> {
    Ok(spoken(server.post("/completion", &body(&question)).await?.json().await?))
}

/// The body of `POST /completion` for a question.
fn body(question: &SpeculationQuestion) -> Value {
    let request = &question.request;
    let mut body = Map::new();
    body.extend([
        ("prompt".to_owned(), json!(request.prompt)),
        ("n_predict".to_owned(), json!(request.max_tokens)),
        ("temperature".to_owned(), json!(request.sampling.temperature)),
        ("seed".to_owned(), json!(request.sampling.seed)),
        ("ignore_eos".to_owned(), json!(request.ignore_eos)),
        ("cache_prompt".to_owned(), json!(false)),
        ("return_tokens".to_owned(), json!(true)),
    ]);
    body.extend(question.schema.clone().map(|schema| ("json_schema".to_owned(), schema)));
    Value::Object(body)
}

fn spoken(reply: CompletionReply) -> Spoken {
    let CompletionTimings { predicted_n, predicted_ms, draft_n: n, draft_n_accepted: n_accepted } = reply.timings;
    let drafts = DraftTotals { lookup: DraftCounts { n, n_accepted }, ..DraftTotals::default() };
    let timings = Timings { predicted_n, predicted_ms, drafts, ..Timings::default() };
    Spoken { tokens: reply.tokens, arrived: Vec::new(), timings }
}

#[cfg(test)]
mod tests {
    use baton_schemas::SequenceRequest;

    use super::*;

    #[test]
    fn a_question_is_asked_with_the_same_tokens_and_its_reply_is_counted() {
        let request = SequenceRequest { prompt: vec![3, 4], max_tokens: Some(9), ..SequenceRequest::default() };
        let body = body(&SpeculationQuestion { request, schema: Some(json!({"type": "object"})) });
        assert_eq!((&body["prompt"], &body["n_predict"]), (&json!([3, 4]), &json!(9)));
        assert_eq!((&body["json_schema"]["type"], &body["cache_prompt"]), (&json!("object"), &json!(false)));
        let answer = json!({
            "content": "x", "tokens": [5, 6, 7], "stop": true,
            "timings": {"prompt_n": 2, "predicted_n": 3, "predicted_ms": 20.0, "draft_n": 4, "draft_n_accepted": 1},
        });
        let spoken = spoken(serde_json::from_value(answer).unwrap());
        assert_eq!((spoken.tokens.len(), spoken.tps(), spoken.timings.drafts.all().n_accepted), (3, 100.0, 1));
    }
}
