use std::collections::HashMap;

use futures::StreamExt;

use super::*;

async fn ask(server: &TestServer, query: &str, headers: &[(&str, &str)]) -> reqwest::Response {
    let mut request = reqwest::Client::new().get(server.url(&format!("/baton/state{query}")));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.send().await.unwrap()
}

#[tokio::test]
async fn the_state_is_shown_and_addresses_only_for_a_key() {
    let open = start(hello()).await;
    let state = Reply::of(ask(&open, "", &[]).await).await;
    assert_eq!((state.status, state.json()["version"].as_str()), (200, Some("addresses: false")));

    let config = closed_config("one");
    let closed = start_with(hello(), config).await;
    Reply::of(ask(&closed, "", &[]).await).await.failed(401, "authentication_error", Some("invalid_api_key"));
    let state = Reply::of(ask(&closed, "", &[("x-api-key", "one")]).await).await;
    assert_eq!(state.json()["version"], "addresses: true");
}

#[tokio::test]
async fn the_state_is_streamed_until_the_server_stops() {
    let server = start(hello()).await;
    for (query, headers) in [("?stream=1", &[][..]), ("", &[("accept", "text/event-stream")])] {
        let mut response = ask(&server, query, headers).await;
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let event = response.chunk().await.unwrap().unwrap();
        let json = event.strip_prefix(b"data: ").unwrap();
        assert!(serde_json::from_slice::<EndpointState>(json).is_ok());
    }
    let response = ask(&server, "?stream=1", &[]).await;
    server.shutdown.begin.cancel();
    let rest = tokio::time::timeout(Duration::from_secs(5), response.bytes_stream().collect::<Vec<_>>()).await;
    let rest = rest.expect("a stream of states held up the server's end");
    let last = rest.last().unwrap().as_ref().unwrap();
    let last: EndpointState = serde_json::from_slice(last.strip_prefix(b"data: ").unwrap()).unwrap();
    assert!(last.is_stopping);
}

#[tokio::test]
async fn a_stream_of_states_ends_when_keys_are_replaced() {
    let server = start_with(hello(), closed_config("one")).await;
    let request = reqwest::Client::new().get(server.url("/baton/state?stream=changes")).bearer_auth("one");
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 200);
    crate::http::access::renew(
        &server.access,
        &AccessConfig { api_keys: vec!["two".to_owned()], ..AccessConfig::default() },
        &HashMap::new(),
    );
    let rest = tokio::time::timeout(Duration::from_secs(5), response.bytes_stream().collect::<Vec<_>>()).await;
    assert!(rest.is_ok(), "a key that is no longer valid still sees the state");
}

#[tokio::test]
async fn a_stream_of_changes_repeats_nothing() {
    let server = start(hello()).await;
    let mut response = ask(&server, "?stream=changes", &[]).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut next = async || {
        let event = response.chunk().await.unwrap().unwrap();
        serde_json::from_slice::<Value>(event.strip_prefix(b"data: ").unwrap()).unwrap()
    };
    let first = next().await;
    assert_eq!((first["version"].as_str(), first["requests"]["running"].as_u64()), (Some("addresses: false"), Some(0)));
    assert_eq!(first["history"].as_array().unwrap().len(), 2);
    assert_eq!(next().await, json!({ "at_ms": 0 }));
}

#[tokio::test]
async fn streams_of_states_are_bounded() {
    let server = start(hello()).await;
    let mut open = Vec::new();
    for _ in 0..32 {
        open.push(ask(&server, "?stream=1", &[]).await);
    }
    let refused = Reply::of(ask(&server, "?stream=1", &[]).await).await;
    refused.failed(503, "unavailable_error", Some("too_many_watchers"));
    drop(open);
    eventually("a free place", async || ask(&server, "?stream=1", &[]).await.status() == 200).await;
}

#[tokio::test]
async fn metrics_need_a_key_like_everything_else_and_replies_are_counted_by_route() {
    let config = closed_config("one");
    let server = start_with(hello(), config).await;
    assert_eq!(server.get("/metrics").await.status, 401);
    let scraped = reqwest::Client::new().get(server.url("/metrics")).bearer_auth("one").send().await.unwrap();
    assert!(scraped.headers()["content-type"].to_str().unwrap().starts_with("application/openmetrics-text"));
    for path in ["/v1/models/a", "/v1/models/b", "/secret/path"] {
        reqwest::Client::new().get(server.url(path)).bearer_auth("one").send().await.unwrap();
    }
    let replies = server.fake.replies.lock().unwrap().clone();
    let expected = [("/metrics", 401), ("/metrics", 200), ("/v1/models/{*id}", 404), ("/v1/models/{*id}", 404)];
    let expected = expected.into_iter().chain([("other", 404)]).map(|(path, status)| (path.to_owned(), status));
    assert_eq!(replies, expected.collect::<Vec<_>>());
}
