//! Reads an upstream's error: its status and its envelope, in every known form.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, SystemTime};

use baton_schemas::EngineError;
use baton_schemas::json_values::count_values;
use http::HeaderMap;
use http::header::RETRY_AFTER;
use serde_json::Value;

use crate::reply::foreign::{Count, tree};
use crate::{UpstreamError, UpstreamFailure};

/// Characters of an upstream's message that are passed on.
const MAX_MESSAGE_CHARS: usize = 1_000;

/// The most values of an error that is read.
const MAX_VALUES: usize = 10_000;

/// Faulty fields whose errors are passed on.
const MAX_FIELDS: usize = 3;

/// The longest wait that a header may ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(600);

/// The error of a reply of `route` whose status is no success. `body` may hold anything.
pub(crate) fn of_status(status: u16, headers: &HeaderMap, body: &[u8], route: &'static str) -> UpstreamError {
    let envelope = Envelope::read(body);
    let detail = || format!("HTTP {status}: {}", envelope.message);
    match status {
        300..400 => UpstreamError::failed(
            UpstreamFailure::Redirected,
            format_args!("HTTP {status}: redirects are not followed"),
        ),
        // The key is wrong or out of credit: the client cannot change that.
        401..=403 => UpstreamError::failed(UpstreamFailure::Unauthorized, detail()),
        405 => UpstreamError::NoRoute { route },
        404 if envelope.is_about_route => UpstreamError::NoRoute { route },
        // The model is configured here, so the upstream lacks it.
        404 => UpstreamError::failed(UpstreamFailure::ModelMissing, detail()),
        408 | 502 | 504 => UpstreamError::failed(UpstreamFailure::GatewayError, detail()),
        429 | 503 => UpstreamError::Busy { retry_after: retry_after(headers) },
        400..=499 => UpstreamError::Refused(envelope.refusal()),
        // The upstream supports this for no request, and is healthy.
        501 => UpstreamError::Refused(EngineError::Unsupported { feature: envelope.message }),
        // Some servers report an overflow as a failure of their own.
        _ if envelope.is_overflow => UpstreamError::Refused(envelope.refusal()),
        _ => UpstreamError::failed(UpstreamFailure::ServerError, detail()),
    }
}

/// The error that an event of a stream reports.
pub(crate) fn in_stream(event: &[u8]) -> UpstreamError {
    let envelope = Envelope::read(event);
    match envelope.code {
        Some(429 | 503) => UpstreamError::Busy { retry_after: None },
        Some(400..500) => UpstreamError::Refused(envelope.refusal()),
        _ if envelope.is_overflow => UpstreamError::Refused(envelope.refusal()),
        _ => UpstreamError::failed(UpstreamFailure::ServerError, envelope.message),
    }
}

/// The common content of these forms: `{"error":{…}}`, `{"error":"…"}`, `{"object":"error","message":…}`,
/// `{"detail":"…"}`, `{"detail":[{"loc":["body","n"],"msg":"…"}]}`.
struct Envelope {
    message: String,
    code: Option<u32>,
    /// The request does not fit the context.
    is_overflow: bool,
    /// Behind a 404: the route is missing, and not the model.
    is_about_route: bool,
    /// Tokens of the prompt and of the context, if the upstream reports both.
    counts: Option<(u32, u32)>,
}

impl Envelope {
    fn read(body: &[u8]) -> Envelope {
        // A tree takes many times the memory of its text.
        let is_small = count_values(body) <= MAX_VALUES;
        let json = is_small.then(|| tree(body).ok()).flatten();
        let json: Value = json.unwrap_or_default();
        let error = json.get("error").filter(|error| !error.is_null()).unwrap_or(&json);
        let words = error.as_str().or_else(|| error.get("message")?.as_str()).or_else(|| error.get("detail")?.as_str());
        let of_fields = || error.get("detail").and_then(field_errors);
        let message = words.map(str::to_owned).or_else(of_fields);
        let message = without_places(message.as_deref().unwrap_or("the upstream gives no reason"));
        // Next to `error` if that is only a message.
        let field = |name: &str| error.get(name).or_else(|| json.get(name));
        let count = |name: &str| Count::of(field(name));
        let counts = count("n_prompt_tokens").zip(count("n_ctx"));
        let is = |name: &str, word: &str| field(name).and_then(Value::as_str) == Some(word);
        let is_named = is("code", "context_length_exceeded") || is("type", "exceed_context_size_error");
        Envelope {
            message: message.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_MESSAGE_CHARS).collect(),
            code: count("code"),
            is_about_route: words.is_none_or(says_no_route),
            is_overflow: is_named || counts.is_some() || says_overflow(&message),
            counts,
        }
    }

    fn refusal(self) -> EngineError {
        match self.counts {
            Some((n_prompt, n_ctx)) => EngineError::ContextOverflow { n_prompt, n_ctx },
            None if self.is_overflow => EngineError::ContextExceeded { message: self.message },
            None => EngineError::invalid(self.message),
        }
    }
}

/// The first faulty fields in an error of a server built with FastAPI: each field's path and what is wrong with it. Its
/// value is left out: it may be the prompt.
fn field_errors(detail: &Value) -> Option<String> {
    let errors = detail.as_array()?.iter().take(MAX_FIELDS).filter_map(|field| {
        let place = field.get("loc").and_then(Value::as_array).into_iter().flatten().filter(|part| *part != "body");
        let place = place.map(|part| part.as_str().map_or_else(|| part.to_string(), str::to_owned));
        Some(format!("{}: {}", place.collect::<Vec<_>>().join("."), field.get("msg")?.as_str()?))
    });
    Some(errors.collect::<Vec<_>>().join("; ")).filter(|errors| !errors.is_empty())
}

/// An upstream's message without addresses, paths and keys: it goes to clients.
fn without_places(message: &str) -> String {
    let ends = |c: char| c.is_whitespace() || "\"'`(){}<>,;=".contains(c);
    let pieces = message.split_inclusive(ends).map(|piece| {
        let word = piece.trim_end_matches(ends).trim_end_matches(['.', ':']);
        if is_place(word) { format!("…{}", &piece[word.len()..]) } else { piece.to_owned() }
    });
    pieces.collect()
}

fn is_place(word: &str) -> bool {
    let is_route = ["/v1/", "/api/"].iter().any(|route| word.starts_with(route)) && !word.contains("..");
    let is_path = word.strip_prefix('/').is_some_and(|rest| rest.contains('/'))
        || ["~/", "\\\\"].iter().any(|start| word.starts_with(start))
        || [":\\", ":/"].iter().any(|inside| word.contains(inside));
    let is_host = |host: &str| host.contains('.') && !host.starts_with('.') && host.parse::<f64>().is_err();
    let is_server = word.rsplit_once(':').is_some_and(|(host, port)| is_host(host) && port.parse::<u16>().is_ok());
    let is_address = word.parse::<IpAddr>().is_ok() || word.parse::<SocketAddr>().is_ok() || is_server;
    let parts = || word.split([':', '/', '[', ']', '@', '|']);
    let has_secret = parts()
        .any(|part| part.parse::<Ipv4Addr>().is_ok() || KEY_PREFIXES.iter().any(|prefix| part.starts_with(prefix)));
    (is_path && !is_route) || is_address || has_secret
}

/// Prefixes of well-known providers' keys.
const KEY_PREFIXES: [&str; 5] = ["sk-", "gsk_", "hf_", "AIza", "xai-"];

/// Returns true if the message says that a prompt does not fit. Ollama ("the input length exceeds the context length")
/// and vLLM ("This model's maximum context length is …") have no code for it. So their words decide here, at the edge:
/// all other code reads [`Envelope::is_overflow`].
fn says_overflow(message: &str) -> bool {
    let message = message.to_lowercase();
    let names_context =
        ["context length", "context size", "context window"].iter().any(|words| message.contains(words));
    names_context && ["exceed", "maximum", "too long", "too large"].iter().any(|words| message.contains(words))
}

/// Returns true if the message of a 404 says that there is no such route: FastAPI's ("Not Found"), llama-server's ("File Not
/// Found"), Go's and OpenAI's. Those for a missing model name the model. As with an overflow, the words decide at the edge.
fn says_no_route(message: &str) -> bool {
    let message = message.trim().trim_end_matches('.').to_lowercase();
    ["not found", "file not found", "page not found", "404 page not found", "route not found"]
        .contains(&message.as_str())
        || message.starts_with("invalid url")
}

/// The time to wait, which the header gives in seconds or as a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let milliseconds = headers.get("retry-after-ms").and_then(|value| value.to_str().ok()?.trim().parse().ok());
    if let Some(ms) = milliseconds {
        return Some(Duration::from_millis(ms).min(MAX_RETRY_AFTER));
    }
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let after = match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok()?,
        Err(_) => {
            let at = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text).ok()?;
            SystemTime::from(at).duration_since(SystemTime::now()).unwrap_or_default()
        }
    };
    Some(after.min(MAX_RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(status: u16, body: &str) -> UpstreamError {
        of_status(status, &HeaderMap::new(), body.as_bytes(), "embeddings")
    }

    #[test]
    fn every_envelope_is_understood() {
        for body in [r#"{"error":{"message":"no"}}"#, r#"{"error":"no"}"#, r#"{"message":"no"}"#, r#"{"detail":"no"}"#]
        {
            assert_eq!(of(400, body), UpstreamError::Refused(EngineError::invalid("no")), "{body}");
        }
        for body in ["", "<html>", "[]", r#"{"error":null}"#, r#"{"error":{"message":5}}"#] {
            assert!(matches!(of(422, body), UpstreamError::Refused(EngineError::InvalidRequest { .. })), "{body}");
        }
        let overflow = r#"{"error":{"message":"long","n_prompt_tokens":9,"n_ctx":8}}"#;
        let refused = UpstreamError::Refused(EngineError::ContextOverflow { n_prompt: 9, n_ctx: 8 });
        assert_eq!(of(400, overflow), refused);
        // Ollama's envelope, from another endpoint.
        let separate = r#"{"error":"long","code":"context_length_exceeded","n_prompt_tokens":9,"n_ctx":8}"#;
        assert_eq!(of(400, separate), refused);
        for (status, body) in [
            (400, r#"{"error":"the input length exceeds the context length"}"#),
            (500, r#"{"error":"the input length exceeds the context length"}"#),
            (400, r#"{"error":{"message":"no","code":"context_length_exceeded"}}"#),
            (400, r#"{"object":"error","message":"This model's maximum context length is 8 tokens.","code":400}"#),
        ] {
            let refused = of(status, body);
            let is_overflow = matches!(refused, UpstreamError::Refused(EngineError::ContextExceeded { .. }));
            assert!(is_overflow, "{body}: {refused:?}");
        }
        let feature = "no vectors".to_owned();
        let refused = of(501, r#"{"error":{"code":501,"message":"no vectors"}}"#);
        assert_eq!(refused, UpstreamError::Refused(EngineError::Unsupported { feature }));
        let line = br#"{"error":"the input length exceeds the context length"}"#;
        assert!(matches!(in_stream(line), UpstreamError::Refused(EngineError::ContextExceeded { .. })));
    }

    #[test]
    fn messages_are_passed_on_without_places_keys_and_values() {
        let check = |message: &str, expected: &str| {
            let body = json!({ "error": { "message": message } }).to_string();
            assert_eq!(of(400, &body), UpstreamError::Refused(EngineError::invalid(expected)), "{message}");
        };
        check("no file /srv/models/x.gguf, at 10.1.2.3:8000.", "no file …, at ….");
        check("see http://h/p or [::1]:80 (sk-secret)", "see … or … (…)");
        check("at 10.0.0.1:80/x or gpu1.lan:8000, in ~/m.gguf, host:/srv/a", "at … or …, in …, …");
        check("keys hf_secret, key:sk-secret and [sk-secret]", "keys …, … and …");
        check("cannot open 'C:\\models\\x'", "cannot open '…'");
        check(
            "'temperature' must be 0/1 and/or 0.5, as in /v1/models",
            "'temperature' must be 0/1 and/or 0.5, as in /v1/models",
        );
        check("1. two: 3", "1. two: 3");
        let field =
            json!({ "detail": [{ "loc": ["body", "messages", 0], "msg": "Field required", "input": "secret" }] });
        let refused = UpstreamError::Refused(EngineError::invalid("messages.0: Field required"));
        assert_eq!(of(422, &field.to_string()), refused);
    }

    #[test]
    fn the_status_tells_whose_fault_it_is() {
        let reason = |status| of(status, "{}").as_str();
        for (status, expected) in [
            (301, "redirected"),
            (401, "unauthorized"),
            (404, "no_route"),
            (405, "no_route"),
            (413, "refused"),
            (429, "busy"),
            (500, "server_error"),
            (503, "busy"),
        ] {
            assert_eq!(reason(status), expected, "{status}");
        }
        assert!(matches!(in_stream(br#"{"error":{"code":400,"message":"x"}}"#), UpstreamError::Refused(_)));
        assert!(matches!(in_stream(br#"{"error":{"code":"x"}}"#), UpstreamError::Failed { .. }));
    }

    #[test]
    fn a_missing_route_is_told_from_a_missing_model() {
        for route in [
            "",
            "404 page not found",
            "<html>",
            r#"{"detail":"Not Found"}"#,
            r#"{"error":{"message":"File Not Found"}}"#,
        ] {
            assert_eq!(of(404, route), UpstreamError::NoRoute { route: "embeddings" }, "{route}");
        }
        for model in [
            r#"{"error":{"message":"The model `x` does not exist.","type":"NotFoundError"}}"#,
            r#"{"error":"model 'x' not found"}"#,
            r#"{"message":"No endpoints found for x"}"#,
        ] {
            assert_eq!(of(404, model).as_str(), "model_missing", "{model}");
        }
    }

    #[test]
    fn retry_headers_are_read_and_bounded() {
        let after = |name: &'static str, value: &str| {
            retry_after(&HeaderMap::from_iter([(http::HeaderName::from_static(name), value.parse().unwrap())]))
        };
        assert_eq!(after("retry-after", "2"), Some(Duration::from_secs(2)));
        assert_eq!(after("retry-after-ms", "1500"), Some(Duration::from_millis(1500)));
        assert_eq!(after("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        assert_eq!(after("retry-after", "999999"), Some(MAX_RETRY_AFTER));
        for nonsense in ["-1", "soon", "NaN", "1e300"] {
            assert_eq!(after("retry-after", nonsense), None, "{nonsense}");
        }
    }
}
