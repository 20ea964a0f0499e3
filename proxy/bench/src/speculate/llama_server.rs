//! llama-server beside Baton: the same file, the same tokens, its own drafters.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use baton_proxy::serve::CommandFailure;
use baton_schemas::Token;
use baton_schemas::sequence::{DraftCounts, DraftTotals, Timings};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use super::args::SpeculateBenchArgs;
use super::guesser::Guesser;
use super::question::SpeculationQuestion;
use super::spoken::Spoken;

/// The longest start, and the longest reply.
const DEADLINE: Duration = Duration::from_secs(600);

/// The pause between two looks whether it answers.
const POLL: Duration = Duration::from_millis(200);

/// Tokens of each slot.
const N_CTX: u32 = 4_096;

/// A llama-server on a loopback port of its own. It ends when this is dropped.
pub(super) struct PeerServer {
    url: String,
    client: reqwest::Client,
    process: Child,
}

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

impl PeerServer {
    /// Starts the program and waits until it is ready.
    pub(super) async fn start(
        program: &Path,
        guesser: Guesser,
        args: &SpeculateBenchArgs,
        model: &Path,
        n_slots: u32,
    ) -> Result<PeerServer, CommandFailure> {
        // The port is free once the listener is dropped.
        let port = TcpListener::bind("127.0.0.1:0").await?.local_addr()?.port();
        let mut command = Command::new(program);
        command.arg("--model").arg(model).args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--parallel", &n_slots.to_string(), "--ctx-size", &(n_slots * N_CTX).to_string()]);
        command.args(["--kv-unified"]);
        if let Some(n) = args.threads {
            command.args(["--threads", &n.to_string(), "--threads-batch", &n.to_string()]);
        }
        match (guesser, &args.draft) {
            (Guesser::PromptLookup, _) => _ = command.args(["--spec-type", "ngram-simple"]),
            (Guesser::DraftModel, Some(draft)) => {
                command.args(["--spec-type", "draft-simple", "--model-draft"]).arg(draft);
            }
            _ => {}
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        let process = command.spawn().map_err(|error| CommandFailure(format!("{}: {error}", program.display())))?;
        let client = reqwest::Client::builder().timeout(DEADLINE).build()?;
        let mut server = PeerServer { url: format!("http://127.0.0.1:{port}"), client, process };
        server.wait_until_ready().await?;
        Ok(server)
    }

    async fn wait_until_ready(&mut self) -> Result<(), CommandFailure> {
        let began = Instant::now();
        while began.elapsed() < DEADLINE {
            if let Some(status) = self.process.try_wait()? {
                return Err(CommandFailure(format!("llama-server has ended: {status}")));
            }
            let health = self.client.get(format!("{}/health", self.url)).send().await;
            if health.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(());
            }
            sleep(POLL).await;
        }
        Err(CommandFailure("llama-server does not answer".into()))
    }

    /// The reply to a question. When its tokens came is not known.
    pub(super) async fn reply(&self, question: SpeculationQuestion) -> Result<Spoken, CommandFailure> {
        let body = body(&question);
        let answer = self.client.post(format!("{}/completion", self.url)).json(&body).send().await?;
        Ok(spoken(answer.error_for_status()?.json().await?))
    }
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
