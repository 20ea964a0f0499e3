//! `[[upstream]]`: other servers that speak text.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use baton_link::transport::Transport;
use baton_upstream::{ModelAlias, ModelCapability, UpstreamDeadlines, UpstreamField, UpstreamKind, UpstreamSettings};
use schemars::JsonSchema;
use serde::Deserialize;

use super::adoption::UpstreamAlias;
use super::error::{ConfigError, ConfigProblem};
use super::node_address::node_url;
use super::text_file::read_text;
use crate::model_name;

/// Replies that an upstream generates at once, unless it says otherwise.
const DEFAULT_MAX_CONCURRENT: usize = 8;

/// A number that is larger is mistyped.
const MAX_MAX_CONCURRENT: u32 = 10_000;

/// Tokens of context: Ollama's own default is smaller than most conversations with tools.
const MIN_NUM_CTX: u32 = 64;
const MAX_NUM_CTX: u32 = 100_000_000;

/// Seconds that may be configured as a deadline.
const MIN_SECONDS: f64 = 0.1;
const MAX_SECONDS: u32 = 86_400;

const DEFAULT_CONNECT: f64 = 5.0;

/// A long prompt on a slow machine, and a model that has to be loaded first.
const DEFAULT_FIRST: f64 = 600.0;

/// A token takes seconds at most.
const DEFAULT_IDLE: f64 = 60.0;

/// A key has some hundred characters.
const MAX_KEY_FILE_BYTES: u64 = 64 << 10;

/// Upstreams, and models of one.
const MAX_UPSTREAMS: usize = 64;
const MAX_MODELS: usize = 1_000;

/// One of `[[upstream]]` as written.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RawUpstream {
    /// Its name in `x-baton-route`, logs and metrics.
    pub name: String,
    /// Which server it is.
    pub kind: String,
    /// The base URL of its API.
    pub url: String,
    /// Its API key.
    #[schemars(extend("x-secret" = true))]
    pub key: Option<String>,
    /// The environment variable that has the key. Some people write the key itself here.
    #[schemars(extend("x-secret" = true))]
    pub key_env: Option<String>,
    /// The file that has the key.
    #[schemars(extend("x-secret" = true))]
    pub key_file: Option<PathBuf>,
    /// Headers of each request.
    #[schemars(extend("x-secret" = true))]
    pub headers: BTreeMap<String, String>,
    /// Its models: our name and its own.
    pub models: BTreeMap<String, String>,
    /// True if they are the same models as those that this endpoint's nodes serve under these names: a request goes to
    /// whichever is predicted to be done first.
    pub same_models: Option<bool>,
    /// The capabilities of its models; they replace what its list says.
    pub capabilities: Option<Vec<String>>,
    /// Fields to send, instead of those that its kind takes by default.
    pub fields: Option<Vec<String>>,
    /// Replies at once.
    #[schemars(range(min = 1, max = MAX_MAX_CONCURRENT))]
    pub max_concurrent: Option<usize>,
    /// Tokens of context (Ollama).
    #[schemars(range(min = MIN_NUM_CTX, max = MAX_NUM_CTX))]
    pub num_ctx: Option<u32>,
    /// New tokens where the client names no limit.
    #[schemars(range(min = 1))]
    pub default_max_tokens: Option<u32>,
    /// True if its models see images, false if they get none. Unset: as it says of each model.
    pub images: Option<bool>,
    /// True if it may fetch images for clients.
    pub image_urls: Option<bool>,
    /// True if a reply may be cancelled.
    pub abort: Option<bool>,
    /// vLLM servers that compute prompts for this one.
    pub prefill: Vec<String>,
    /// Seconds for a connection.
    #[schemars(range(min = MIN_SECONDS, max = MAX_SECONDS))]
    pub connect_seconds: Option<f64>,
    /// Seconds until the first piece of a reply.
    #[schemars(range(min = MIN_SECONDS, max = MAX_SECONDS))]
    pub first_seconds: Option<f64>,
    /// Seconds between two signs of life.
    #[schemars(range(min = MIN_SECONDS, max = MAX_SECONDS))]
    pub idle_seconds: Option<f64>,
}

impl RawUpstream {
    fn kind(&self) -> Option<UpstreamKind> {
        UpstreamKind::parse(&self.kind)
    }
}

/// Every mistake in the upstreams, which are reached over `transport`.
pub(super) fn problems(upstreams: &[RawUpstream], transport: &Transport) -> Vec<ConfigProblem> {
    let mut found = Vec::new();
    for (i, upstream) in upstreams.iter().enumerate() {
        let mut problem = |field: &str, message: String| {
            let key = format!("upstream[{i}].{field}");
            found.push(ConfigProblem { flag: key.clone(), key, message });
        };
        if i >= MAX_UPSTREAMS {
            problem("name", format!("is one upstream too many: there may be {MAX_UPSTREAMS}"));
            break;
        }
        let is_name = |name: &str| {
            (1..=64).contains(&name.len()) && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        if !is_name(&upstream.name) {
            problem("name", "must be 1 to 64 letters, digits, '-', '_' or '.'".into());
        } else if upstreams[..i].iter().any(|other| other.name == upstream.name) {
            problem("name", "must not be another upstream's name too".into());
        }
        let kinds = UpstreamKind::ALL.map(UpstreamKind::as_str).join(", ");
        if upstream.kind().is_none() {
            problem("kind", format!("must be one of {kinds}, not {:?}", upstream.kind));
        }
        for (field, urls) in [("url", std::slice::from_ref(&upstream.url)), ("prefill", &upstream.prefill[..])] {
            if urls.iter().any(|url| !is_url(url)) {
                // Do not repeat it: it may hold a password.
                problem(field, "must be a URL like http://127.0.0.1:11434, without a user or a query".into());
                continue;
            }
            for error in urls.iter().filter_map(|url| transport.check(&node_url(url)).err()) {
                problem(field, format!("is refused: {error}"));
            }
        }
        if !upstream.prefill.is_empty() && !upstream.kind().is_some_and(UpstreamKind::takes_prefill_servers) {
            problem("prefill", "is for upstreams of kind vllm alone".into());
        }
        if [upstream.key.is_some(), upstream.key_env.is_some(), upstream.key_file.is_some()]
            .iter()
            .filter(|k| **k)
            .count()
            > 1
        {
            problem("key", "may be given once: as key, key_env or key_file".into());
        } else if let Err((field, message)) = key(upstream) {
            problem(field, message);
        }
        for (name, value) in &upstream.headers {
            let is_header = http::HeaderName::try_from(name).is_ok() && http::HeaderValue::try_from(value).is_ok();
            if !is_header || is_ours(name) {
                problem("headers", format!("has an entry {name:?} that is not a header, or that Baton itself sets"));
            }
        }
        model_problems(upstream).into_iter().for_each(|(field, message)| problem(field, message));
        if let Some(kind) = upstream.kind() {
            if let Some(unknown) = upstream.fields.iter().flatten().find(|name| field(kind, name).is_none()) {
                let known: Vec<&str> = kind.known_fields().iter().map(|field| field.as_str()).collect();
                problem("fields", format!("has {unknown:?}; there are {}", known.join(", ")));
            }
            if let Some(message) = image_urls_problem(upstream, kind) {
                problem("image_urls", message);
            }
            if upstream.num_ctx.is_some() && !kind.takes_num_ctx() {
                problem(
                    "num_ctx",
                    "is for upstreams of kind ollama alone: others have the context they were started with".into(),
                );
            }
        }
    }
    found
}

/// The reason why an upstream gets no URLs of images.
fn image_urls_problem(upstream: &RawUpstream, kind: UpstreamKind) -> Option<String> {
    upstream.image_urls.filter(|is_allowed| *is_allowed)?;
    match upstream.images {
        _ if !kind.fetches_images() => Some(format!("cannot be true: {} fetches no images", kind.as_str())),
        Some(false) => Some("cannot be true while images is false".to_owned()),
        _ => None,
    }
}

/// Every mistake in what is said of its models, with its field.
fn model_problems(upstream: &RawUpstream) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    let is_empty = |(ours, theirs): (&String, &String)| ours.trim().is_empty() || theirs.trim().is_empty();
    if upstream.models.len() > MAX_MODELS || upstream.models.iter().any(is_empty) {
        found.push(("models", format!("must be at most {MAX_MODELS} names, none of them empty")));
    }
    let ours: Vec<&String> = upstream.models.keys().collect();
    if ours.iter().enumerate().any(|(i, name)| ours[..i].iter().any(|other| model_name::are_same(other, name))) {
        found.push(("models", "has a name twice: case and ':latest' make no difference".into()));
    }
    if upstream.same_models == Some(true) && upstream.models.is_empty() {
        found.push(("same_models", "needs a table of models: it says which names mean the same model".into()));
    }
    let mut capabilities = upstream.capabilities.iter().flatten();
    if let Some(unknown) = capabilities.find(|word| ModelCapability::parse(word).is_none()) {
        let known = ModelCapability::ALL.map(ModelCapability::as_str).join(", ");
        found.push(("capabilities", format!("has {unknown:?}; there are {known}")));
    }
    found
}

/// Returns true for headers that Baton itself sets.
fn is_ours(name: &str) -> bool {
    ["host", "content-length", "content-type", "transfer-encoding", "connection", "x-request-id"]
        .iter()
        .any(|ours| name.eq_ignore_ascii_case(ours))
}

fn is_url(text: &str) -> bool {
    reqwest::Url::parse(&node_url(text)).is_ok_and(|url| {
        let is_plain = url.username().is_empty() && url.password().is_none();
        matches!(url.scheme(), "http" | "https") && url.has_host() && is_plain && url.query().is_none()
    })
}

/// The upstreams, checked. Errors: a key that cannot be read.
pub(super) fn checked(
    upstreams: &[RawUpstream],
    aliases: &[UpstreamAlias],
) -> Result<Vec<UpstreamSettings>, ConfigError> {
    let with_aliases = |raw: &RawUpstream| {
        Ok(UpstreamSettings { aliases: UpstreamAlias::of_upstream(aliases, &raw.name), ..settings(raw)? })
    };
    upstreams.iter().map(with_aliases).collect()
}

/// The field with this name, if this kind of upstream can take it.
fn field(kind: UpstreamKind, name: &str) -> Option<UpstreamField> {
    kind.known_fields().iter().copied().find(|field| field.as_str() == name)
}

/// An upstream of which only this is known.
pub fn plain_upstream(name: String, kind: UpstreamKind, url: &str) -> UpstreamSettings {
    UpstreamSettings {
        name,
        kind,
        url: node_url(url),
        key: None,
        headers: Vec::new(),
        models: Vec::new(),
        aliases: Vec::new(),
        is_adopted: false,
        hidden: Vec::new(),
        fields: kind.default_fields().iter().copied().collect(),
        max_concurrent: DEFAULT_MAX_CONCURRENT,
        num_ctx: None,
        default_max_tokens: None,
        capabilities: None,
        same_models: false,
        images: None,
        image_urls: false,
        abort: true,
        prefill: Vec::new(),
        deadlines: UpstreamDeadlines {
            connect: Duration::from_secs_f64(DEFAULT_CONNECT),
            first: Duration::from_secs_f64(DEFAULT_FIRST),
            idle: Duration::from_secs_f64(DEFAULT_IDLE),
        },
    }
}

fn settings(raw: &RawUpstream) -> Result<UpstreamSettings, ConfigError> {
    let kind = raw.kind().ok_or_else(|| ConfigError::Later(format!("upstream {} has an unknown kind", raw.name)))?;
    let alias = |ours: &String, theirs: &String| ModelAlias { ours: ours.clone(), theirs: theirs.clone() };
    let seconds = |seconds: Option<f64>, default: Duration| seconds.map_or(default, Duration::from_secs_f64);
    let fields: Option<BTreeSet<UpstreamField>> =
        raw.fields.as_ref().map(|names| names.iter().filter_map(|name| field(kind, name)).collect());
    let default = plain_upstream(raw.name.clone(), kind, &raw.url);
    Ok(UpstreamSettings {
        key: key(raw)
            .map_err(|(field, what)| ConfigError::Later(format!("{field} of upstream {} {what}", raw.name)))?,
        headers: raw.headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
        models: raw.models.iter().map(|(ours, theirs)| alias(ours, theirs)).collect(),
        fields: fields.unwrap_or(default.fields),
        capabilities: raw
            .capabilities
            .as_ref()
            .map(|words| words.iter().filter_map(|word| ModelCapability::parse(word)).collect()),
        same_models: raw.same_models.unwrap_or(default.same_models),
        max_concurrent: raw.max_concurrent.unwrap_or(default.max_concurrent),
        num_ctx: raw.num_ctx,
        default_max_tokens: raw.default_max_tokens,
        images: raw.images,
        image_urls: raw.image_urls.unwrap_or(default.image_urls),
        abort: raw.abort.unwrap_or(default.abort),
        prefill: raw.prefill.iter().map(|url| node_url(url)).collect(),
        deadlines: UpstreamDeadlines {
            connect: seconds(raw.connect_seconds, default.deadlines.connect),
            first: seconds(raw.first_seconds, default.deadlines.first),
            idle: seconds(raw.idle_seconds, default.deadlines.idle),
        },
        ..default
    })
}

/// Reads the key. Errors: the wrong field and the problem, without the key.
fn key(raw: &RawUpstream) -> Result<Option<String>, (&'static str, String)> {
    let (field, key) = match (&raw.key, &raw.key_env, &raw.key_file) {
        (Some(key), ..) => ("key", key.clone()),
        (None, Some(variable), _) => {
            // Do not repeat it: some people write the key itself here.
            let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
            if variable.is_empty() || !variable.chars().all(is_name) {
                return Err(("key_env", "must be a variable's name in capitals, like OPENAI_API_KEY".to_owned()));
            }
            let key = std::env::var(variable);
            ("key_env", key.map_err(|_| ("key_env", format!("names the variable {variable}, which is not set")))?)
        }
        (None, None, Some(path)) => {
            let unreadable = |error| ("key_file", format!("cannot be read: {}: {error}", path.display()));
            ("key_file", read_text(path, MAX_KEY_FILE_BYTES).map_err(unreadable)?)
        }
        (None, None, None) => return Ok(None),
    };
    let key = key.trim();
    if key.is_empty() || !key.chars().all(|c| c.is_ascii_graphic()) {
        return Err((field, "holds a key that is empty, or has characters that no key has".to_owned()));
    }
    Ok(Some(key.to_owned()))
}
