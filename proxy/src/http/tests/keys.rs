//! Keys with limits, over sockets.

use std::sync::Arc;

use super::*;
use crate::account::{Account, KeyLimits};
use crate::admission::{AdmissionLimits, RequestAdmission};
use crate::http::{ConfiguredKey, key_hash};
use crate::request::kv_loss::KvWish;

/// A server with these keys beside the owner's, which is `owner`.
async fn with(keys: &[(&str, KeyLimits)]) -> TestServer {
    let keys = keys.iter().map(|(name, limits)| ConfiguredKey {
        hash: key_hash(name.as_bytes()),
        expires: None,
        account: Arc::new(Account::new(*name, limits.clone())),
    });
    let access = AccessConfig { api_keys: vec!["owner".into()], keys: keys.collect(), ..AccessConfig::default() };
    start_with(hello(), HttpConfig { access, ..HttpConfig::default() }).await
}

fn guest() -> KeyLimits {
    KeyLimits { may_choose_policy: false, is_operator: false, ..KeyLimits::default() }
}

async fn get(server: &TestServer, path: &str, key: &str) -> Reply {
    Reply::of(reqwest::Client::new().get(server.url(path)).bearer_auth(key).send().await.unwrap()).await
}

#[tokio::test]
async fn a_guests_key_opens_the_api_but_not_the_state() {
    let server = with(&[("guest", guest()), ("admin", KeyLimits { is_operator: true, ..guest() })]).await;
    for path in ["/baton/state", "/metrics"] {
        get(&server, path, "guest").await.failed(403, "permission_error", Some("operator_key_required"));
        assert_eq!(get(&server, path, "admin").await.status, 200);
        assert_eq!(get(&server, path, "owner").await.status, 200);
        assert_eq!(get(&server, path, "wrong").await.status, 401);
    }
    assert_eq!(
        Reply::of(server.post().bearer_auth("guest").json(&chat_body(json!({}))).send().await.unwrap()).await.status,
        200
    );
}

#[tokio::test]
async fn a_key_sees_its_own_models() {
    let server = with(&[("guest", KeyLimits { models: vec!["M".into()], ..guest() })]).await;
    let ids = |reply: Reply| reply.json()["data"].as_array().unwrap().len();
    assert_eq!(ids(get(&server, "/v1/models", "guest").await), 1, "all its names are one entry");
    assert_eq!(ids(get(&server, "/v1/models", "owner").await), 3);
    for name in ["m", "alias"] {
        assert_eq!(get(&server, &format!("/v1/models/{name}"), "guest").await.status, 200, "{name}");
    }
    get(&server, "/v1/models/org/name:q4", "guest").await.failed(404, "not_found_error", Some("model_not_found"));
}

#[tokio::test]
async fn replies_show_the_remaining_rates_and_a_policy_needs_permission() {
    let limits = KeyLimits { requests_per_minute: Some(5), tokens_per_minute: Some(100), ..guest() };
    let server = with(&[("guest", limits)]).await;
    let reply = get(&server, "/v1/models", "guest").await;
    for (name, value) in [
        ("x-ratelimit-limit-requests", "5"),
        ("x-ratelimit-remaining-requests", "5"),
        ("x-ratelimit-reset-requests", "0.000s"),
        ("x-ratelimit-limit-tokens", "100"),
        ("x-ratelimit-remaining-tokens", "100"),
    ] {
        assert_eq!(reply.header(name), value, "{name}");
    }
    assert_eq!(get(&server, "/v1/models", "owner").await.header("x-ratelimit-limit-requests"), "");
    for (key, status) in [("guest", 403), ("owner", 200)] {
        let chat = server.post().bearer_auth(key).header("x-baton-policy", "direct").json(&chat_body(json!({})));
        assert_eq!(chat.send().await.unwrap().status(), status, "{key}");
    }
}

#[tokio::test]
async fn any_key_may_say_which_kv_its_reply_follows_from() {
    let server = with(&[("guest", guest())]).await;
    let ask = async |kv: &str| {
        let call = server.post().bearer_auth("guest").header("x-baton-kv", kv).json(&chat_body(json!({})));
        Reply::of(call.send().await.unwrap()).await
    };
    for kv in ["lossless", "lossy"] {
        assert_eq!(ask(kv).await.status, 200, "{kv}");
    }
    ask("kvq").await.failed(400, "invalid_request_error", None);
    let requests = server.fake.requests.lock().unwrap();
    let wishes: Vec<_> = requests.iter().map(|(_, caller)| caller.kv_loss.wish).collect();
    assert_eq!(wishes, [Some(KvWish::Lossless), Some(KvWish::Lossy)]);
}

#[tokio::test]
async fn a_waiting_stream_shows_its_place() {
    let app = Arc::new(crate::observe::tests::app().await);
    app.admission.set_limits(AdmissionLimits { max_requests: Some(1), ..AdmissionLimits::default() });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = crate::http::router(app.clone(), impatient());
    let server = tokio::spawn(serve_with(DEADLINES, listener, router, Shutdown::default(), SOON));
    let holder = Arc::new(Account::new("holder", guest()));
    app.admission.set_targets(app.targets.places());
    let places = app.admission.enter(&holder, &RequestAdmission::default()).places(&Arc::default());
    let holder = places.next(&app.targets.places()).await.unwrap();
    drop(places);
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(chat_bytes(json!({"stream": true, "max_tokens": 2}), "close").as_bytes()).await.unwrap();
    let mut told = [0; 1_024];
    let mut text = String::new();
    while !text.contains(": place 1 in the queue\n\n") {
        let n = client.read(&mut told).await.unwrap();
        assert!(n > 0, "it ended: {text}");
        text += std::str::from_utf8(&told[..n]).unwrap();
    }
    drop(holder);
    client.read_to_string(&mut text).await.unwrap();
    assert!(text.contains("data: [DONE]"), "{text}");
    server.abort();
}

#[tokio::test]
async fn a_plan_needs_the_permissions_of_its_request() {
    let app = Arc::new(crate::observe::tests::app().await);
    let key = |name: &str, limits: KeyLimits| ConfiguredKey {
        hash: key_hash(name.as_bytes()),
        expires: None,
        account: Arc::new(Account::new(name, limits)),
    };
    let models = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    let keys = vec![
        key("theirs", KeyLimits { models: models(&["M"]), ..guest() }),
        key("others", KeyLimits { models: models(&["another"]), ..guest() }),
        key("planner", KeyLimits { may_choose_policy: true, ..guest() }),
    ];
    let access = AccessConfig { api_keys: vec!["owner".into()], keys, ..AccessConfig::default() };
    let router = crate::http::router(app.clone(), HttpConfig { access, ..HttpConfig::default() });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(serve_with(DEADLINES, listener, router, Shutdown::default(), SOON));
    let ask = async |path: &str, key: &str, policy: Option<&str>| {
        let body = chat_body(json!({"max_tokens": 2}));
        let mut call = reqwest::Client::new().post(format!("{base}{path}")).bearer_auth(key).json(&body);
        if let Some(policy) = policy {
            call = call.header("x-baton-policy", policy);
        }
        Reply::of(call.send().await.unwrap()).await
    };
    for path in ["/baton/plan", "/v1/chat/completions"] {
        for key in ["theirs", "planner", "owner"] {
            assert_eq!(ask(path, key, None).await.status, 200, "{path} {key}");
        }
        ask(path, "others", None).await.failed(403, "permission_error", Some("model_not_allowed"));
        assert_eq!(ask(path, "wrong", None).await.status, 401, "{path}");
        for key in ["theirs", "others"] {
            ask(path, key, Some("direct")).await.failed(403, "permission_error", Some("policy_not_allowed"));
        }
        for key in ["planner", "owner"] {
            assert_eq!(ask(path, key, Some("direct")).await.status, 200, "{path} {key}");
            assert_eq!(ask(path, key, Some("nonsense")).await.status, 400, "{path} {key}");
        }
    }
    server.abort();
}
