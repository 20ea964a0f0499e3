use baton_schemas::CacheScope;
use reqwest::Method;

use super::*;

fn with_keys() -> HttpConfig {
    HttpConfig {
        access: AccessConfig { api_keys: vec!["one".into(), "two".into()], ..AccessConfig::default() },
        ..HttpConfig::default()
    }
}

impl TestServer {
    async fn ask(&self, method: Method, path: &str, headers: &[(&str, &str)]) -> Reply {
        let mut request = reqwest::Client::new().request(method.clone(), self.url(path));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if method == Method::POST {
            request = request.json(&chat_body(json!({})));
        }
        Reply::of(request.send().await.unwrap()).await
    }
}

#[tokio::test]
async fn every_route_but_the_public_ones_requires_a_key() {
    let server = start_with(hello(), with_keys()).await;
    for (method, path) in [(Method::POST, "/v1/chat/completions"), (Method::GET, "/v1/models"), (Method::GET, "/nope")]
    {
        for headers in [&[][..], &[("authorization", "Bearer wrong")], &[("x-api-key", "wrong")]] {
            let reply = server.ask(method.clone(), path, headers).await;
            reply.failed(401, "authentication_error", Some("invalid_api_key"));
            assert_eq!(reply.header("www-authenticate"), "Bearer");
        }
    }
    let chat = "/v1/chat/completions";
    assert_eq!(server.ask(Method::POST, chat, &[("authorization", "Bearer one")]).await.status, 200);
    assert_eq!(server.ask(Method::POST, chat, &[("x-api-key", "two")]).await.status, 200);
    for path in ["/health", "/v1/health"] {
        assert_eq!(server.ask(Method::GET, path, &[]).await.status, 200);
        assert_eq!(server.ask(Method::HEAD, path, &[("x-api-key", "wrong")]).await.status, 200);
    }
    let preflight = [("origin", "http://localhost:3000"), ("access-control-request-method", "POST")];
    assert_eq!(server.ask(Method::OPTIONS, chat, &preflight).await.status, 200);
}

#[tokio::test]
async fn callers_with_different_keys_have_different_caches() {
    let scopes = async |config: HttpConfig| {
        let server = start_with(hello(), config).await;
        for headers in [&[("x-api-key", "one")][..], &[("authorization", "Bearer one")], &[("x-api-key", "two")]] {
            server.ask(Method::POST, "/v1/chat/completions", headers).await;
        }
        let requests = server.fake.requests.lock().unwrap();
        requests.iter().map(|(_, caller)| caller.cache_scope).collect::<Vec<_>>()
    };
    let apart = scopes(with_keys()).await;
    assert_eq!(apart[0], apart[1]);
    assert_ne!(apart[0], apart[2]);
    let shared = scopes(HttpConfig {
        access: AccessConfig { share_prefix_cache: true, ..with_keys().access },
        ..HttpConfig::default()
    })
    .await;
    assert_eq!(shared, [CacheScope::SHARED; 3]);
}

#[tokio::test]
async fn a_rebound_name_is_refused_on_loopback() {
    let config = HttpConfig {
        access: AccessConfig { allowed_hosts: vec!["llm.example.com".into()], ..AccessConfig::default() },
        ..HttpConfig::default()
    };
    let server = start_with(hello(), config).await;
    for path in ["/health", "/v1/models", "/nope"] {
        for host in ["evil.example.com", "127.0.0.1.evil.com:8080", "192.168.0.9"] {
            let reply = server.ask(Method::GET, path, &[("host", host)]).await;
            reply.failed(403, "permission_error", Some("host_not_allowed"));
            assert!(!reply.text.contains(host) && reply.text.contains("allowed_hosts"), "{}", reply.text);
        }
    }
    for host in ["localhost:1", "127.0.0.1", "[::1]:1", "x.local", "llm.example.com:443"] {
        assert_eq!(server.ask(Method::GET, "/health", &[("host", host)]).await.status, 200, "{host}");
    }
    // A preflight does not get around it.
    let preflight = [("host", "evil.com"), ("origin", "http://localhost"), ("access-control-request-method", "POST")];
    server.ask(Method::OPTIONS, "/v1/models", &preflight).await.failed(
        403,
        "permission_error",
        Some("host_not_allowed"),
    );

    let public = start_with(hello(), HttpConfig { check_host: false, ..HttpConfig::default() }).await;
    assert_eq!(public.ask(Method::GET, "/health", &[("host", "any.example.com")]).await.status, 200);
}

#[tokio::test]
async fn a_request_names_exactly_one_host() {
    for check_host in [true, false] {
        let server = start_with(hello(), HttpConfig { check_host, ..HttpConfig::default() }).await;
        for hosts in ["", "Host: localhost\r\nHost: localhost\r\n", "Host: local host\r\n", "Host: \r\n"] {
            let reply =
                server.raw(format!("GET /health HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n").as_bytes()).await;
            assert!(
                reply.starts_with("HTTP/1.1 400") && reply.contains(r#""message":"The request"#),
                "{hosts}: {reply}"
            );
        }
    }
}

#[tokio::test]
async fn only_known_origins_may_read() {
    let config = HttpConfig {
        access: AccessConfig { allowed_origins: vec!["https://chat.example.com".into()], ..with_keys().access },
        ..HttpConfig::default()
    };
    let server = start_with(hello(), config).await;
    let chat = "/v1/chat/completions";
    for origin in
        ["http://localhost:5173", "tauri://localhost", "app://x", "vscode-webview://y", "https://chat.example.com"]
    {
        let preflight = server
            .ask(
                Method::OPTIONS,
                chat,
                &[
                    ("origin", origin),
                    ("access-control-request-method", "POST"),
                    ("access-control-request-headers", "authorization,x-stainless-os"),
                ],
            )
            .await;
        assert_eq!(preflight.header("access-control-allow-origin"), origin);
        assert_eq!(preflight.header("access-control-allow-headers"), "authorization,x-stainless-os");
        assert!(preflight.header("access-control-allow-methods").contains("POST"));
        // On refusals too, or the page's script cannot read why.
        let refused = server.ask(Method::POST, chat, &[("origin", origin)]).await;
        assert_eq!((refused.status, refused.header("access-control-allow-origin")), (401, origin));
        let reply = server.ask(Method::POST, chat, &[("origin", origin), ("x-api-key", "one")]).await;
        assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, origin));
        assert!(reply.header("access-control-expose-headers").contains("x-request-id"));
        assert!(reply.headers.get("access-control-allow-credentials").is_none());
    }
    for origin in ["https://evil.example.com", "null", "http://localhost.evil.com"] {
        let preflight = [("origin", origin), ("access-control-request-method", "POST")];
        let reply = server.ask(Method::OPTIONS, chat, &preflight).await;
        assert!(reply.headers.get("access-control-allow-origin").is_none(), "{origin}");
    }
}

/// The live page, opened from another machine.
#[tokio::test]
async fn this_servers_own_page_may_call_it() {
    let access = AccessConfig { allowed_hosts: vec!["mac".to_owned()], ..AccessConfig::default() };
    let server = start_with(hello(), HttpConfig { check_host: false, access, ..HttpConfig::default() }).await;
    let status = async |host: &str, origin: &str| {
        server.ask(Method::POST, "/v1/chat/completions", &[("host", host), ("origin", origin)]).await.status
    };
    for host in ["192.168.1.7:8080", "[fd00::7]:8080", "mac.local:8080"] {
        assert_eq!(status(host, &format!("http://{host}")).await, 200, "{host}");
        assert_eq!(status(host, &format!("https://{host}")).await, 200, "{host}, behind a proxy that speaks TLS");
    }
    for (host, origin) in [
        ("192.168.1.7:8080", "http://192.168.1.7:9090"),
        ("192.168.1.7:8080", "http://192.168.1.8:8080"),
        ("mac.local:8080", "http://spark.local:8080"),
        // Anybody in the local network answers for such a name.
        ("evil.local:8080", "http://evil.local:8080"),
        ("chat.example.com", "http://chat.example.com"),
    ] {
        assert_eq!(status(host, origin).await, 403, "{origin} asks {host}");
    }
}

#[tokio::test]
async fn a_foreign_page_cannot_make_the_server_compute() {
    let server = start_with(hello(), with_keys()).await;
    for origin in ["https://evil.example.com", "null", "http://localhost.evil.com"] {
        for method in [Method::POST, Method::OPTIONS] {
            let headers = [("origin", origin), ("x-api-key", "one"), ("content-type", "text/plain")];
            let reply = server.ask(method, "/v1/chat/completions", &headers).await;
            let error = reply.failed(403, "permission_error", Some("origin_not_allowed"));
            assert!(error["message"].as_str().unwrap().contains("allowed_origins"), "{error}");
        }
    }
    // A rebound name, which a listener for other machines does not check: the page's origin is the host that it asks.
    let rebound = [("host", "evil.example.com"), ("origin", "http://evil.example.com"), ("x-api-key", "one")];
    let unchecked = start_with(hello(), HttpConfig { check_host: false, ..with_keys() }).await;
    assert_eq!(unchecked.ask(Method::POST, "/v1/chat/completions", &rebound).await.status, 403);
    assert!(unchecked.fake.requests.lock().unwrap().is_empty());
    // Two of them, one of which is fine.
    let both = [("origin", "http://localhost"), ("origin", "https://evil.example.com"), ("x-api-key", "one")];
    assert_eq!(server.ask(Method::POST, "/v1/chat/completions", &both).await.status, 403);
    assert!(server.fake.requests.lock().unwrap().is_empty());

    let config = HttpConfig {
        access: AccessConfig { allowed_origins: vec!["null".into()], ..with_keys().access },
        ..HttpConfig::default()
    };
    let headers = [("origin", "null"), ("x-api-key", "one")];
    let reply = start_with(hello(), config).await.ask(Method::POST, "/v1/chat/completions", &headers).await;
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, "null"));
}
