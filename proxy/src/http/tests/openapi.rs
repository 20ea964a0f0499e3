use std::collections::BTreeSet;

use super::*;
use crate::http::routes;

async fn document(server: &TestServer) -> Value {
    let reply = server.get("/openapi.json").await;
    assert_eq!((reply.status, reply.header("content-type")), (200, "application/json"));
    reply.json()
}

/// Every method and path in the document.
fn documented(document: &Value) -> BTreeSet<(String, String)> {
    let paths = document["paths"].as_object().unwrap();
    let methods = |path: &Value| path.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    paths.iter().flat_map(|(path, of)| methods(of).into_iter().map(|method| (method, path.clone()))).collect()
}

#[tokio::test]
async fn every_route_is_in_the_document_and_the_reverse() {
    let server = start(hello()).await;
    let documented = documented(&document(&server).await);
    let routes = routes();
    let routed = routes
        .documented
        .iter()
        .map(|route| (route.method.as_str().to_ascii_lowercase(), route.path.replace("{*", "{")));
    assert_eq!(documented, routed.collect());
    // And the router answers just these methods, HEAD beside GET.
    let paths: BTreeSet<&String> = documented.iter().map(|(_, path)| path).collect();
    for path in paths {
        let url = server.url(&path.replace("{id}", "m").replace("{digest}", "sha256:00"));
        for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] {
            let has = |method: &str| documented.contains(&(method.to_ascii_lowercase(), path.clone()));
            let request = reqwest::Client::new().request(method.parse().unwrap(), &url).header("connection", "close");
            let status = request.send().await.unwrap().status().as_u16();
            let is_expected = has(method) || method == "HEAD" && has("GET");
            assert_eq!(status != 405, is_expected, "{method} {path}: {status}");
            assert!(status < 500, "{method} {path}: {status}");
        }
    }
}

#[test]
fn the_list_of_routes_for_people_is_complete() {
    let expected = [
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/responses",
        "POST /v1/embeddings",
        "GET /v1/models",
        "GET /v1/models/{id}",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "POST /api/chat",
        "POST /api/generate",
        "POST /api/embed",
        "POST /api/embeddings",
        "GET /api/tags",
        "GET /api/ps",
        "POST /api/show",
        "POST /api/pull",
        "GET /api/version",
        "POST /api/copy",
        "DELETE /api/delete",
        "POST /completion",
        "POST /infill",
        "POST /embedding",
        "POST /tokenize",
        "POST /detokenize",
        "POST /apply-template",
        "GET /tokenizer_info",
        "GET /props",
        "GET /slots",
        "POST /models/load",
        "POST /models/unload",
        "GET /health",
        "POST /v1/rerank",
        "GET /api/v1/models",
        "POST /api/v1/models/load",
        "POST /api/v1/models/unload",
        "POST /baton/plan",
        "GET /baton/state",
        "GET /baton/usage",
        "GET /baton/keys",
        "GET /baton/models",
        "POST /baton/models",
        "GET /baton/config",
        "GET /baton/config/changes",
        "GET /baton/log",
        "GET /metrics",
        "GET /",
        "GET /openapi.json",
    ];
    assert_eq!(routes().listed(), expected);
}

#[test]
fn health_and_state_are_answered_during_the_shutdown() {
    assert_eq!(*routes().paths_while_stopping(), ["/health", "/v1/health", "/baton/state", "/metrics"]);
}

#[tokio::test]
async fn the_document_holds_together() {
    let server = start(hello()).await;
    let document = document(&server).await;
    assert_eq!(document["openapi"], "3.1.0");
    let mut references = BTreeSet::new();
    collect(&document, &mut references);
    for reference in &references {
        assert!(document.pointer(reference.trim_start_matches('#')).is_some(), "{reference}");
    }
    let schemas = document["components"]["schemas"].as_object().unwrap();
    assert!(schemas.len() > 60, "{}", schemas.len());
    for name in schemas.keys() {
        // A number at the end tells types of one name apart, which need names of their own; so do bodies and replies.
        assert!(!name.ends_with(|c: char| c.is_ascii_digit()), "{name}");
        assert!(references.contains(&format!("#/components/schemas/{name}")), "{name} is not used");
    }
    // Limits and words come from where the parsers have them.
    let chat = &schemas["ChatCompletionRequest"];
    assert_eq!(chat["required"], json!(["model", "messages"]));
    assert_eq!((&chat["properties"]["n"]["minimum"], &chat["properties"]["n"]["maximum"]), (&json!(1), &json!(16)));
    let operation = &document["paths"]["/v1/messages"]["post"];
    let envelope = &operation["responses"]["429"]["content"]["application/json"]["schema"]["$ref"];
    assert_eq!(envelope, "#/components/schemas/AnthropicError");
    let statuses: Vec<&String> = operation["responses"].as_object().unwrap().keys().collect();
    assert_eq!(statuses, ["200", "400", "401", "403", "404", "408", "413", "415", "429", "500", "501", "503"]);
    assert_eq!(document["paths"]["/health"]["get"]["security"], json!([]));
}

fn collect(value: &Value, references: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(reference) if name == "$ref" => drop(references.insert(reference.clone())),
                    _ => collect(value, references),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, references)),
        _ => {}
    }
}

#[test]
fn no_body_and_no_reply_share_a_name() {
    assert_eq!(crate::http::openapi::shared_names(&routes().documented), BTreeSet::<String>::new());
}
