//! The HTTP surface over real sockets, in front of a backend that does what a test's script says.

mod access;
mod anthropic;
mod bodies;
mod chat;
mod completions;
mod connections;
mod embeddings;
mod errors;
mod floods;
mod golden;
mod keys;
mod llama_server;
mod ollama;
mod openapi;
mod page;
mod reply;
mod responses;
mod state;
mod test_server;
mod unread_body;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use baton_link::connections::ConnectionDeadlines;
use baton_reply::TokenLogprobs;
use baton_schemas::embed::{EmbedInput, EmbedRequest, EmbedTask, EmbedTimings, EmbeddingFacts, Pooling};
use baton_schemas::generate::{ChatPrompt, Input, Sampling};
use baton_schemas::node::{Memory, ModelFacts, NodeInfo, NodeLoad, Role, TokenizeRequest};
use baton_schemas::sampling_fields::SamplingFields;
use baton_schemas::sequence::{Alternative, CachedTokens, GeneratedToken, Logprobs, Timings};
use baton_schemas::tools::ToolCallDelta;
use baton_schemas::{FinishReason, GenerateRequest, Token};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use self::reply::{OpenReply, Reply};
use self::test_server::{
    Limits, TestServer, chat_body, chat_bytes, closed_config, eventually, impatient, start, start_limited, start_with,
    until,
};
use super::edge::server::{DEADLINES, Shutdown, serve_with};
use super::{AccessConfig, HostCheck, HttpBackend, HttpConfig, SharedAccess, api};
use crate::error::RequestError;
use crate::observe::history::HistorySample;
use crate::observe::readiness::Readiness;
use crate::observe::snapshot::EndpointState;
use crate::reply_event::{EventKind, ReplyEvent};
use crate::request::caller::Caller;
use crate::request::generate::Generation;
use crate::request::models::{self, ModelDescription, OfferedModel};
use crate::request::plan::explanation::Explanation;
use crate::targets::Embedded;

/// One thing a fake backend does.
#[derive(Clone)]
enum Act {
    /// Goes on when the test opens the gate.
    WaitFor(Latch),
    /// Waits like `WaitFor`, unless this is the prompt.
    WaitUnless(&'static str, Latch),
    Hang,
    Emit(ReplyEvent),
    Fail(RequestError),
    Panic,
}

/// Closed until the test opens it, so that a test decides what comes first on a machine of any speed.
#[derive(Clone, Default)]
struct Latch(CancellationToken);

impl Latch {
    fn open(&self) {
        self.0.cancel();
    }

    async fn passed(&self) {
        self.0.cancelled().await;
    }
}

/// Does the first list of acts before it accepts a request, the second one after.
#[derive(Default)]
struct Fake {
    before: Vec<Act>,
    after: Vec<Act>,
    readiness: Option<Readiness>,
    models_panic: bool,
    active_slots: u32,
    embed_request: Mutex<Option<EmbedRequest>>,
    requests: Mutex<Vec<(GenerateRequest, Caller)>>,
    replies: Mutex<Vec<(String, u16)>>,
    live: Arc<AtomicUsize>,
    /// Requests that hang forever.
    n_hanging: Arc<AtomicUsize>,
}

/// Counts a request as live until it is dropped, wherever it is.
struct Live(Arc<AtomicUsize>);

impl Live {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Live(count.clone())
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl HttpBackend for Fake {
    async fn generate(&self, request: GenerateRequest, caller: Caller) -> Result<Generation, RequestError> {
        let live = Live::new(&self.live);
        // As of a model with a default of its own.
        let sampling = Sampling { top_p: 0.25, ..request.sampling.clone() };
        let is_prompt = |act: &Act| match (act, &request.input) {
            (Act::WaitUnless(prompt, _), Input::Text(text)) => **text == **prompt,
            _ => false,
        };
        let passes = self.before.iter().any(is_prompt);
        self.requests.lock().unwrap().push((request, caller));
        for act in &self.before {
            match act {
                Act::WaitFor(gate) => gate.passed().await,
                Act::WaitUnless(..) if passes => {}
                Act::WaitUnless(_, gate) => gate.passed().await,
                Act::Hang => hang(&self.n_hanging).await,
                Act::Fail(error) => return Err(error.clone()),
                Act::Panic => panic!("secret panic words"),
                Act::Emit(_) => unreachable!("nothing is emitted before a request is accepted"),
            }
        }
        let acts = self.after.clone();
        let n_hanging = Arc::clone(&self.n_hanging);
        let events = Box::pin(async_stream::stream! {
            let _live = live;
            for act in acts {
                match act {
                    Act::WaitFor(gate) => gate.passed().await,
                    Act::WaitUnless(..) => unreachable!("prompts wait before they are accepted"),
                    Act::Hang => hang(&n_hanging).await,
                    Act::Emit(event) => yield Ok(event),
                    Act::Fail(error) => yield Err(error),
                    Act::Panic => panic!("secret panic words"),
                }
            }
        });
        Ok(Generation { n_prompt: 5, route: "direct test".into(), sampling, events })
    }

    async fn embed(&self, request: EmbedRequest, _: &Caller) -> Result<Embedded, RequestError> {
        let _live = Live::new(&self.live);
        models::find(self.models(), &request.model)?;
        for act in &self.before {
            match act {
                Act::Hang => hang(&self.n_hanging).await,
                Act::Fail(error) => return Err(error.clone()),
                Act::WaitFor(_) | Act::WaitUnless(..) | Act::Panic | Act::Emit(_) => {
                    unreachable!("not needed for vectors")
                }
            }
        }
        let timings = EmbedTimings { queue_ms: 0.5, compute_ms: 2.0 };
        // Enough to tell the inputs apart.
        let vector = |input: &EmbedInput| match (input, &request.task) {
            (EmbedInput::Text(text), EmbedTask::Embed) => vec![text.len() as f32, 0.5],
            (EmbedInput::Text(text), EmbedTask::Rerank { query }) => vec![text.len() as f32 - query.len() as f32],
            (EmbedInput::Tokens(tokens), _) => vec![tokens.len() as f32, -0.5],
        };
        let vectors: Vec<_> = request.inputs.iter().map(vector).collect();
        *self.embed_request.lock().unwrap() = Some(request);
        Ok(Embedded { n_tokens: 3 * vectors.len() as u32, vectors, timings })
    }

    async fn explain(&self, request: GenerateRequest, _: &Caller) -> Result<Explanation, RequestError> {
        Err(RequestError::ModelNotFound { model: request.model })
    }

    fn models(&self) -> Vec<OfferedModel> {
        assert!(!self.models_panic, "secret panic words");
        let since = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let model = |name: &str, at| OfferedModel {
            names: vec![name.into()],
            n_listed: 1,
            since: since(at),
            info: Some(info()),
            load_report: None,
            is_upstream: false,
        };
        let loading = OfferedModel { info: None, ..model("wei rd/ü", 3) };
        vec![
            OfferedModel { names: vec!["m".into(), "alias".into()], ..model("m", 1) },
            model("org/name:q4", 2),
            loading,
        ]
    }

    async fn describe(&self, model: Option<&str>, _: &Caller) -> Result<ModelDescription, RequestError> {
        let model = models::find(self.models(), model.unwrap_or("m"))?;
        let info = model.info.ok_or(RequestError::Unavailable { reason: "loading".into(), retry_after: SOON })?;
        let load = NodeLoad { active_slots: self.active_slots, ..NodeLoad::default() };
        let name = model.names[0].clone();
        let sampling = SamplingFields::default();
        Ok(ModelDescription { name, since: model.since, info, load, sampling, is_sleeping: false })
    }

    async fn tokenize(
        &self,
        model: Option<&str>,
        text: TokenizeRequest,
        caller: &Caller,
    ) -> Result<Vec<Token>, RequestError> {
        self.describe(model, caller).await?;
        let special = [text.add_special, text.parse_special].map(Token::from);
        Ok(text.text.bytes().map(Token::from).chain(special).collect())
    }

    fn n_ctx(&self, _: Option<&str>, _: &Caller) -> Option<u32> {
        Some(info().n_ctx)
    }

    async fn pieces(
        &self,
        model: Option<&str>,
        tokens: &[Token],
        caller: &Caller,
    ) -> Result<Vec<Vec<u8>>, RequestError> {
        self.describe(model, caller).await?;
        Ok(tokens.iter().map(|&token| vec![token as u8]).collect())
    }

    async fn detokenize(
        &self,
        model: Option<&str>,
        tokens: Vec<Token>,
        caller: &Caller,
    ) -> Result<String, RequestError> {
        self.describe(model, caller).await?;
        Ok(tokens.iter().map(|token| format!("<{token}>")).collect())
    }

    async fn count(&self, model: Option<&str>, chat: ChatPrompt, caller: &Caller) -> Result<u32, RequestError> {
        Ok(self.render(model, chat, caller).await?.len() as u32)
    }

    async fn render(&self, model: Option<&str>, chat: ChatPrompt, caller: &Caller) -> Result<String, RequestError> {
        self.describe(model, caller).await?;
        let tools = chat.tools.offered().iter().map(|tool| format!("tool: {}\n", tool.name));
        let messages = chat.conversation.messages.iter();
        Ok(tools.chain(messages.map(|message| format!("{}: {}\n", message.role.as_str(), message.content))).collect())
    }

    fn state(&self, with_addresses: bool) -> EndpointState {
        EndpointState { version: format!("addresses: {with_addresses}"), ..EndpointState::default() }
    }

    fn history(&self, after_ms: u64) -> Vec<HistorySample> {
        let sample = |at_ms| HistorySample { at_ms, ..HistorySample::default() };
        [1_000, 2_000].into_iter().filter(|at_ms| *at_ms > after_ms).map(sample).collect()
    }

    fn metrics(&self) -> String {
        "# EOF\n".to_owned()
    }

    fn replied(&self, route: &str, status: u16) {
        self.replies.lock().unwrap().push((route.to_owned(), status));
    }

    fn readiness(&self) -> Readiness {
        self.readiness.clone().unwrap_or(Readiness::Ok)
    }
}

/// Never returns.
async fn hang(n_hanging: &AtomicUsize) {
    n_hanging.fetch_add(1, Ordering::SeqCst);
    std::future::pending().await
}

/// What runs the fake's models.
fn info() -> Arc<NodeInfo> {
    Arc::new(NodeInfo {
        model: "Fake".into(),
        engine: "sim".into(),
        architecture: "llama".into(),
        n_ctx: 64,
        n_ctx_train: 128,
        n_vocab: 300,
        n_slots: 2,
        memory: Memory { model: 100, kv: 20 },
        has_chat_template: true,
        generates: true,
        embedding: Some(EmbeddingFacts { n_embd: 2, n_ctx: 64, pooling: Pooling::Mean, is_trained: false }),
        reranking: None,
        projector: None,
        devices: Vec::new(),
        workers: Vec::new(),
        role: Role::Both,
        fingerprint: None,
        kv: None,
        cache_types: None,
        no_handoff: None,
        takes_other_weights: false,
        reports_begin: false,
        hands_over_images: false,
        facts: ModelFacts { file_bytes: 90, chat_template: "{{ messages }}".into(), ..ModelFacts::default() },
        process: 0,
        version: String::new(),
    })
}

/// A backend that emits these events.
fn emits(events: impl IntoIterator<Item = ReplyEvent>) -> Fake {
    acts(events.into_iter().map(Act::Emit))
}

fn acts(acts: impl IntoIterator<Item = Act>) -> Fake {
    Fake { after: acts.into_iter().collect(), ..Fake::default() }
}

/// A backend that does these instead of accepting.
fn before(acts: impl IntoIterator<Item = Act>) -> Fake {
    Fake { before: acts.into_iter().collect(), ..Fake::default() }
}

/// A backend that says hello.
fn hello() -> Fake {
    emits([started(0), text(0, "Hel"), text(0, "lo"), finished(0)])
}

fn started(choice: u32) -> ReplyEvent {
    EventKind::Started(CachedTokens::in_slot(2)).of(choice)
}

fn text(choice: u32, text: &str) -> ReplyEvent {
    EventKind::Text { text: text.into(), tokens: vec![] }.of(choice)
}

fn text_with_logprobs(choice: u32, text: &str) -> ReplyEvent {
    let top = vec![Alternative { id: 1, bytes: text.into(), logprob: -0.5 }];
    let token = TokenLogprobs { id: Some(1), bytes: text.into(), logprobs: Logprobs { chosen: -0.5, rank: None, top } };
    EventKind::Text { text: text.into(), tokens: vec![token] }.of(choice)
}

/// A backend that thinks and calls a tool.
fn calling() -> Fake {
    let call = |call| EventKind::ToolCall { call }.of(0);
    let arguments = |fragment: &str| call(ToolCallDelta::Arguments { index: 0, fragment: fragment.into() });
    let EventKind::Finished { timings, .. } = finished(0).kind else { unreachable!() };
    emits([
        started(0),
        EventKind::Reasoning { text: "hm".into() }.of(0),
        call(ToolCallDelta::Begin { index: 0, id: "call_1".into(), name: "f".into() }),
        arguments("{\"a\": "),
        arguments("1}"),
        call(ToolCallDelta::End { index: 0 }),
        EventKind::Finished { reason: FinishReason::ToolCalls, stop: None, n_completion: 4, n_reasoning: 1, timings }
            .of(0),
    ])
}

fn finished(choice: u32) -> ReplyEvent {
    let timings =
        Timings { queue_ms: 0.0, prompt_n: 3, prompt_ms: 6.0, predicted_n: 4, predicted_ms: 8.0, ..Timings::default() };
    EventKind::Finished { reason: FinishReason::Stop, stop: None, n_completion: 4, n_reasoning: 0, timings }.of(choice)
}

const SOON: Duration = Duration::from_millis(30);

/// A condition that has not come by then never comes.
const DEADLINE: Duration = Duration::from_secs(20);
