//! Asks an address which server answers there, and which models it lists. It sends no key and no prompt.

use std::time::Duration;

use baton_link::transport::{ShortBodyError, Transport, short_body};
use baton_schemas::ollama::OllamaCapability;
use baton_schemas::printable::printable_within;
use baton_upstream::UpstreamKind;
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::instance::{INSTANCE_HEADER, instance};
use crate::serve::CommandFailure;

/// A server on this machine or in its network accepts a connection in less.
const CONNECT: Duration = Duration::from_secs(1);

/// The deadline of an answer. A server that computes may be slow.
const ANSWER: Duration = Duration::from_secs(3);

/// A list of some thousand models.
const MAX_BYTES: usize = 4 << 20;

/// The most models of a server that are kept, and that are asked for what they can do.
const MAX_MODELS: usize = 2_000;
const MAX_DESCRIBED: usize = 64;

/// Bytes of a model's name.
const MAX_NAME_BYTES: usize = 512;

/// The programs that are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum ServerProgram {
    /// Ollama.
    Ollama,
    /// LM Studio.
    LmStudio,
    /// llama.cpp's server.
    LlamaServer,
    /// vLLM.
    Vllm,
    /// Another Baton.
    Baton,
    /// Any other that lists models as OpenAI does, such as mlx_lm.server.
    Openai,
}

impl ServerProgram {
    /// The name of its upstream, if no other has it.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    pub(super) fn kind(self) -> UpstreamKind {
        match self {
            ServerProgram::Ollama => UpstreamKind::Ollama,
            ServerProgram::LmStudio | ServerProgram::Openai => UpstreamKind::OpenAi,
            ServerProgram::LlamaServer | ServerProgram::Baton => UpstreamKind::LlamaServer,
            ServerProgram::Vllm => UpstreamKind::Vllm,
        }
    }
}

/// A model that a server lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundModel {
    /// The server's name for it.
    pub name: String,
    /// Its capabilities, as far as the server lists them.
    pub capabilities: Vec<OllamaCapability>,
}

/// A server that can be adopted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerFound {
    /// The program.
    pub program: ServerProgram,
    /// The models that it serves itself.
    pub models: Vec<FoundModel>,
}

/// The result of asking an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// Nobody accepts a connection, or answers in time.
    Nobody,
    /// Somebody answers, and cannot now: with a passing error, or with a reply that does not come whole in time.
    Failing,
    /// This endpoint.
    Own,
    /// A server that answers only to a key.
    NeedsKey,
    /// A server that breaks off its one reply when it gets another request: it needs a configuration.
    BreaksOff,
    /// Something else.
    Unknown,
    /// A server.
    Server(ServerFound),
}

/// A server cannot answer now.
struct CannotNow;

/// A client of servers that are not known yet.
pub(super) struct Prober(Client);

/// The owner of a model in a list, which differs between programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
enum ModelOwner {
    #[serde(rename = "baton")]
    Baton,
    /// A model that another Baton has from its own upstreams.
    #[serde(rename = "upstream")]
    Upstream,
    #[serde(rename = "llamacpp")]
    LlamaServer,
    #[serde(rename = "vllm")]
    Vllm,
    /// llama-cpp-python.
    #[serde(rename = "me")]
    LlamaCppPython,
    #[default]
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct OwnedModels {
    data: Vec<OwnedModel>,
}

#[derive(Deserialize)]
struct OwnedModel {
    id: String,
    #[serde(default)]
    owned_by: Option<ModelOwner>,
}

#[derive(Deserialize)]
struct LmStudioEntries {
    data: Vec<LmStudioEntry>,
}

#[derive(Deserialize)]
struct LmStudioEntry {
    id: String,
    #[serde(rename = "type")]
    kind: LmStudioType,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum LmStudioType {
    Llm,
    Vlm,
    Embeddings,
    #[serde(other)]
    Other,
}

impl LmStudioType {
    fn capabilities(self) -> Vec<OllamaCapability> {
        match self {
            LmStudioType::Llm => vec![OllamaCapability::Completion],
            LmStudioType::Vlm => vec![OllamaCapability::Completion, OllamaCapability::Vision],
            LmStudioType::Embeddings => vec![OllamaCapability::Embedding],
            LmStudioType::Other => Vec::new(),
        }
    }
}

#[derive(Deserialize)]
struct OllamaVersion {
    #[expect(dead_code, reason = "that it is there shows the program")]
    version: String,
}

#[derive(Deserialize)]
struct ShownCapabilities {
    #[serde(default)]
    capabilities: Vec<Value>,
}

impl Prober {
    pub(super) fn new(transport: &Transport) -> Result<Prober, CommandFailure> {
        let client = transport.client().connect_timeout(CONNECT).timeout(ANSWER).build();
        client.map(Prober).map_err(|error| CommandFailure(format!("servers cannot be looked for: {error}")))
    }

    /// Asks `base`, a URL without a path, what is there.
    pub(super) async fn ask(&self, base: &str) -> ProbeOutcome {
        let Ok(reply) = self.0.get(format!("{base}/v1/models")).send().await else { return ProbeOutcome::Nobody };
        let other = reply.headers().get(INSTANCE_HEADER).map(|value| value.as_bytes() == instance().as_bytes());
        match (other, reply.status()) {
            (Some(true), _) => return ProbeOutcome::Own,
            (_, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => return ProbeOutcome::NeedsKey,
            // A server that loads its model, or a gateway whose server is busy.
            (_, status) if status.is_server_error() || is_passing(status) => return ProbeOutcome::Failing,
            (_, status) if !status.is_success() => return ProbeOutcome::Unknown,
            _ => {}
        }
        let data = match read(reply).await {
            Ok(Some(OwnedModels { data })) => data,
            Ok(None) => return ProbeOutcome::Unknown,
            Err(CannotNow) => return ProbeOutcome::Failing,
        };
        let owners: Vec<ModelOwner> = data.iter().map(|entry| entry.owned_by.unwrap_or_default()).collect();
        let program = match owners.first() {
            _ if other.is_some() => Some(ServerProgram::Baton),
            Some(ModelOwner::Vllm) => Some(ServerProgram::Vllm),
            Some(ModelOwner::LlamaServer) => Some(ServerProgram::LlamaServer),
            _ => None,
        };
        let breaks_off = owners.first() == Some(&ModelOwner::LlamaCppPython);
        let is_own = |owner: ModelOwner| program != Some(ServerProgram::Baton) || owner == ModelOwner::Baton;
        let own = data.into_iter().zip(owners).filter(|(_, owner)| is_own(*owner));
        let models = own.map(|(entry, _)| FoundModel { name: entry.id, capabilities: Vec::new() });
        let found = match program {
            Some(program) => ServerFound { program, models: models.collect() },
            // Taken for another program, a server that is busy for a moment would lose its name.
            None => match self.of_other_program(base, models.collect()).await {
                Ok(found) => found,
                Err(CannotNow) => return ProbeOutcome::Failing,
            },
        };
        if breaks_off && found.program == ServerProgram::Openai {
            return ProbeOutcome::BreaksOff;
        }
        ProbeOutcome::Server(bounded(found))
    }

    /// Tells Ollama and LM Studio from others by calls that only they have.
    async fn of_other_program(&self, base: &str, models: Vec<FoundModel>) -> Result<ServerFound, CannotNow> {
        let of_lm_studio = self.get::<LmStudioEntries>(&format!("{base}/api/v0/models")).await?;
        if let Some(LmStudioEntries { data }) = of_lm_studio {
            let model = |entry: LmStudioEntry| FoundModel { name: entry.id, capabilities: entry.kind.capabilities() };
            return Ok(ServerFound { program: ServerProgram::LmStudio, models: data.into_iter().map(model).collect() });
        }
        let is_ollama = self.get::<OllamaVersion>(&format!("{base}/api/version")).await?.is_some();
        let program = if is_ollama { ServerProgram::Ollama } else { ServerProgram::Openai };
        Ok(ServerFound { program, models })
    }

    /// Asks Ollama and Baton what each model can do. For a person who looks; an endpoint needs it not.
    pub(super) async fn describe(&self, base: &str, found: &mut ServerFound) {
        if !matches!(found.program, ServerProgram::Ollama | ServerProgram::Baton) {
            return;
        }
        for model in found.models.iter_mut().take(MAX_DESCRIBED) {
            let shown = self.0.post(format!("{base}/api/show")).json(&json!({ "model": model.name }));
            if let Ok(Some(ShownCapabilities { capabilities })) = answered(shown).await {
                model.capabilities = OllamaCapability::listed(capabilities.iter());
            }
        }
    }

    async fn get<T: DeserializeOwned>(&self, url: &str) -> Result<Option<T>, CannotNow> {
        answered(self.0.get(url)).await
    }
}

/// The answer to a call that not every server has. `None`: it has not.
async fn answered<T: DeserializeOwned>(request: RequestBuilder) -> Result<Option<T>, CannotNow> {
    let reply = match request.send().await {
        Ok(reply) => reply,
        Err(error) if error.is_timeout() || error.is_connect() => return Err(CannotNow),
        // Some servers close the connection at a path that they do not have.
        Err(_) => return Ok(None),
    };
    match reply.status() {
        status if status.is_success() => read(reply).await,
        status if is_passing(status) => Err(CannotNow),
        // Some servers answer 500 or 501 to a path that they do not have.
        _ => Ok(None),
    }
}

/// Reads a reply of JSON. `None`: it is none, or too long. Errors: it does not come whole.
async fn read<T: DeserializeOwned>(reply: Response) -> Result<Option<T>, CannotNow> {
    match short_body(reply, MAX_BYTES).await {
        Ok(body) => Ok(serde_json::from_slice(&body).ok()),
        Err(ShortBodyError::TooLong(_)) => Ok(None),
        Err(ShortBodyError::Lost(_)) => Err(CannotNow),
    }
}

/// Returns true for statuses that say nothing about the call.
fn is_passing(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::REQUEST_TIMEOUT
            | StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT
    )
}

fn bounded(mut found: ServerFound) -> ServerFound {
    let is_name =
        |name: &str| (1..=MAX_NAME_BYTES).contains(&name.len()) && printable_within(name, MAX_NAME_BYTES) == name;
    found.models.retain(|model| is_name(&model.name));
    found.models.truncate(MAX_MODELS);
    found
}
