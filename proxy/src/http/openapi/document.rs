//! The document itself.

use baton_planner::policy::PolicyName;
use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::operation::{Operation, ReplyContent};
use super::routes::DocumentedRoute;
use crate::http::dialect::Dialect;
use crate::request::kv_loss::KvWish;

const DESCRIPTION: &str = "One endpoint that speaks OpenAI's, Anthropic's, Ollama's and llama-server's API. \
    Unknown fields of bodies are ignored, and null is the same as nothing. A body may be compressed (zstd, gzip, \
    deflate), and is read as JSON whatever its type says. HEAD is answered wherever GET is. Other methods of these \
    paths are a 405, and other paths a 404, in the same error envelopes. A stream that fails after its head ends with \
    an error of its dialect. docs/compatibility.md says what each route does and does not do.";

/// Writes the document of these routes.
pub(in crate::http) fn document(routes: &[DocumentedRoute]) -> Value {
    let mut schemas = Schemas::new();
    let mut paths = Map::new();
    for route in routes {
        // The router's `{*id}` is a parameter that may hold slashes, for which OpenAPI has no sign.
        let path = route.path.replace("{*", "{");
        let entry = paths.entry(path).or_insert_with(|| json!({}));
        entry[route.method.as_str().to_ascii_lowercase()] = operation(route, &mut schemas);
    }
    json!({
        "openapi": "3.1.0",
        "info": { "title": "Baton", "version": env!("CARGO_PKG_VERSION"), "description": DESCRIPTION },
        "servers": [{ "url": "/" }],
        // Without configured keys, none is required.
        "security": [{ "bearer": [] }, { "apiKey": [] }, {}],
        "paths": paths,
        "components": {
            "schemas": schemas.definitions(),
            "securitySchemes": {
                "bearer": { "type": "http", "scheme": "bearer" },
                "apiKey": { "type": "apiKey", "in": "header", "name": "X-Api-Key" },
            },
        },
    })
}

/// Names that both a body's type and a reply's type have.
#[cfg(test)]
pub(in crate::http) fn shared_names(routes: &[DocumentedRoute]) -> std::collections::BTreeSet<String> {
    let mut schemas = Schemas::new();
    for route in routes {
        operation(route, &mut schemas);
    }
    let names = schemas.bodies.definitions().keys();
    names.filter(|name| schemas.replies.definitions().contains_key(*name)).cloned().collect()
}

/// serde's attributes can make a type read something else than it writes, so bodies and replies have a generator each.
struct Schemas {
    bodies: SchemaGenerator,
    replies: SchemaGenerator,
}

impl Schemas {
    fn new() -> Self {
        let settings = || {
            SchemaSettings::draft2020_12().with(|settings| {
                settings.definitions_path = "/components/schemas".into();
                settings.meta_schema = None;
            })
        };
        let bodies = settings().for_deserialize().into_generator();
        Schemas { bodies, replies: settings().for_serialize().into_generator() }
    }

    fn definitions(mut self) -> Map<String, Value> {
        let mut definitions = self.bodies.take_definitions(true);
        definitions.extend(self.replies.take_definitions(true));
        definitions
    }
}

fn operation(route: &DocumentedRoute, schemas: &mut Schemas) -> Value {
    let DocumentedRoute { method, path, tag, operation } = route;
    let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let id = [method.as_str().to_ascii_lowercase()].into_iter().chain(words.map(str::to_owned)).collect::<Vec<_>>();
    let mut written = json!({
        "operationId": id.join("_"),
        "summary": operation.summary,
        "tags": [tag],
        "responses": responses(operation, Dialect::of(path), schemas),
    });
    let parameters = parameters(path, operation);
    if !parameters.is_empty() {
        written["parameters"] = parameters.into();
    }
    if let Some(body) = operation.body {
        let schema = body(&mut schemas.bodies);
        written["requestBody"] = json!({ "required": true, "content": { "application/json": { "schema": schema } } });
    }
    if operation.is_public {
        written["security"] = json!([]);
    }
    written
}

fn parameters(path: &str, operation: &Operation) -> Vec<Value> {
    let in_path = path.split('{').skip(1).filter_map(|rest| rest.split('}').next()).map(|name| {
        let name = name.trim_start_matches('*');
        json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } })
    });
    let in_query = operation.query.iter().map(|(name, meaning)| {
        json!({ "name": name, "in": "query", "description": meaning, "schema": { "type": "string" } })
    });
    let policy = operation.is_planned.then(|| {
        let names = PolicyName::ALL.map(PolicyName::as_str);
        json!({ "name": "x-baton-policy", "in": "header", "schema": { "type": "string", "enum": names },
            "description": "How the request is planned, instead of as configured. Some keys may not choose: 403." })
    });
    let kv = operation.is_planned.then(|| {
        let names = KvWish::ALL.map(KvWish::as_str);
        json!({ "name": "x-baton-kv", "in": "header", "schema": { "type": "string", "enum": names },
            "description": "Whether the reply may follow from KV that went through a lossy codec, where the operator allows such. \
                With a seed it never does." })
    });
    in_path.chain(in_query).chain(policy).chain(kv).collect()
}

fn responses(operation: &Operation, dialect: Dialect, schemas: &mut Schemas) -> Value {
    let mut success = json!({ "description": "Success.", "headers": headers(200, operation) });
    for (media_type, content) in &operation.replies {
        success["content"][media_type.as_ref()] = match content {
            ReplyContent::Json(schema) => json!({ "schema": schema(&mut schemas.replies) }),
            // The schema of one event: before OpenAPI 3.2 there is no form for a stream of them.
            ReplyContent::Events { item, ends_marked } => {
                let items = [item(&mut schemas.replies), dialect.envelope_schema(&mut schemas.replies)];
                let json = json!({ "type": "string", "contentMediaType": "application/json",
                    "contentSchema": { "anyOf": items } });
                let data = if *ends_marked { json!({ "anyOf": [{ "const": "[DONE]" }, json] }) } else { json };
                json!({ "schema": { "type": "object", "required": ["data"], "properties": { "data": data } } })
            }
            // OpenAPI has no form for lines of JSON.
            ReplyContent::Lines(item) => {
                let items = [item(&mut schemas.replies), dialect.envelope_schema(&mut schemas.replies)];
                json!({ "schema": { "type": "string" }, "x-line-schema": { "anyOf": items } })
            }
            ReplyContent::Text => json!({ "schema": { "type": "string" } }),
        };
    }
    let mut responses = Map::new();
    if !operation.replies.is_empty() {
        responses.insert("200".into(), success);
    }
    // Every route has these: no valid host (400), a host or an origin that is not allowed (403), a panic (500).
    let mut failures = vec![400, 403, 500];
    if !operation.is_public {
        failures.push(401);
    }
    failures.extend(&operation.failures);
    failures.sort_unstable();
    for status in failures {
        let schema = match operation.unavailable {
            Some(schema) if status == 503 => schema(&mut schemas.replies),
            _ => dialect.envelope_schema(&mut schemas.replies),
        };
        let failure = json!({
            "description": meaning(status),
            "headers": headers(status, operation),
            "content": { "application/json": { "schema": schema } },
        });
        responses.insert(status.to_string(), failure);
    }
    responses.into()
}

fn headers(status: u16, operation: &Operation) -> Value {
    let text = |description: &str| json!({ "description": description, "schema": { "type": "string" } });
    let mut headers = json!({ "x-request-id": text("The request's id in the server's log.") });
    match status {
        200 if operation.is_planned => {
            headers["x-baton-route"] =
                text("Which nodes serve the request, and why; `pending` if that is not known yet.");
            headers["x-baton-warning"] = text(
                "What the request asks for and does not get (fields, tools, parts of schemas), and what an upstream's reply loses.",
            );
        }
        429 | 503 => {
            headers["retry-after"] =
                json!({ "description": "Seconds.", "schema": { "type": "integer", "minimum": 1 } });
        }
        _ => {}
    }
    headers
}

fn meaning(status: u16) -> &'static str {
    match status {
        400 => "The request is wrong; 'param' names the field at fault.",
        401 => "No valid API key.",
        403 => "Not allowed: to this key, for this host, or from this page.",
        404 => "There is no such model.",
        408 => "The body did not arrive in time.",
        413 => "The body is too large.",
        415 => "The body is compressed in an unknown way.",
        429 => "A limit of the key is reached.",
        501 => "The model's engine cannot do this.",
        503 => "The server is full, or no engine answers now.",
        _ => "The server failed.",
    }
}
