//! Images for a model that only upstreams serve: they reach the upstreams that see them, and are refused before anything is
//! sent where none does. Baton fetches no URL.

use std::io::Cursor;
use std::sync::atomic::Ordering;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use harness::mock::{Mock, MockRequest, Step, says, whole};
use harness::{Answer, ReloadableServer, upstream};
use image::{ImageFormat, Rgb, RgbImage};
use serde_json::{Value, json};

const URL: &str = "https://example.com/a.png?signature=1%2B2";

/// A picture in each format that is taken: its media type, and its file in base64.
fn pictures() -> Vec<(&'static str, String)> {
    let formats = [
        ("image/png", ImageFormat::Png),
        ("image/jpeg", ImageFormat::Jpeg),
        ("image/webp", ImageFormat::WebP),
        ("image/gif", ImageFormat::Gif),
    ];
    let picture = RgbImage::from_fn(48, 40, |x, y| Rgb([(x * 5) as u8, (y * 6) as u8, 90]));
    let file = |format| {
        let mut bytes = Cursor::new(Vec::new());
        picture.write_to(&mut bytes, format).unwrap();
        STANDARD.encode(bytes.into_inner())
    };
    formats.map(|(media_type, format)| (media_type, file(format))).into()
}

fn uri((media_type, data): &(&str, String)) -> String {
    format!("data:{media_type};base64,{data}")
}

fn image_url(url: &str) -> Value {
    json!({ "type": "image_url", "image_url": { "url": url } })
}

fn block((media_type, data): &(&str, String)) -> Value {
    json!({ "type": "image", "source": { "type": "base64", "media_type": media_type, "data": data } })
}

fn chat(content: &Value) -> Value {
    json!({ "model": "m", "max_tokens": 5, "messages": [{ "role": "user", "content": content }] })
}

fn with_text(kind: &str, images: impl Iterator<Item = Value>) -> Value {
    std::iter::once(json!({ "type": kind, "text": "What is this?" })).chain(images).collect()
}

/// A request about these pictures in each dialect.
fn requests(pictures: &[(&'static str, String)]) -> Vec<(&'static str, Value)> {
    let parts = with_text("text", pictures.iter().map(|picture| image_url(&uri(picture))));
    let inputs =
        with_text("input_text", pictures.iter().map(|p| json!({ "type": "input_image", "image_url": uri(p) })));
    let blocks = with_text("text", pictures.iter().map(block));
    let files: Vec<&String> = pictures.iter().map(|(_, data)| data).collect();
    let of_user = json!([{ "role": "user", "content": "What is this?", "images": files }]);
    vec![
        ("/v1/chat/completions", chat(&parts)),
        ("/v1/responses", json!({ "model": "m", "input": [{ "role": "user", "content": inputs }] })),
        ("/v1/messages", chat(&blocks)),
        ("/api/chat", json!({ "model": "m", "stream": false, "messages": of_user })),
        ("/api/generate", json!({ "model": "m", "stream": false, "prompt": "What is this?", "images": files })),
    ]
}

/// A reply in Ollama's form, whole.
fn of_ollama(asked: &MockRequest) -> Vec<Step> {
    let message = json!({ "role": "assistant", "content": "well" });
    let end = json!({ "model": asked.body["model"], "message": message, "done": true, "done_reason": "stop" });
    whole(200, "", &end)
}

/// An upstream that replies in its kind's form. Ollama says that the model sees, the others list it with these words.
async fn seeing(kind: &'static str) -> Mock {
    let mock = Mock::start(move |_, asked| match (kind, asked.path.as_str()) {
        ("ollama", "/api/show") => whole(200, "", &json!({ "capabilities": ["completion", "vision"] })),
        ("ollama", _) => of_ollama(asked),
        _ => says("well"),
    })
    .await;
    mock.list_as(match kind {
        "ollama" => json!({ "models": [{ "name": "theirs" }] }),
        "llama-server" => json!({ "data": [{ "id": "theirs", "capabilities": ["completion", "multimodal"] }] }),
        _ => json!({ "data": [{ "id": "theirs", "architecture": { "input_modalities": ["text", "image"] } }] }),
    });
    mock
}

/// The last request that was not about the model itself.
fn last_chat(mock: &Mock) -> MockRequest {
    let all = mock.log.requests.lock().unwrap();
    all.iter().rev().find(|asked| asked.path != "/api/show").expect("a chat").clone()
}

/// The images of a request's messages, as data URIs or plain base64, in their order.
fn images_of(asked: &MockRequest) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut found = Vec::new();
    for message in asked.body["messages"].as_array().unwrap() {
        found.extend(message["images"].as_array().into_iter().flatten().map(text));
        let parts = message["content"].as_array().into_iter().flatten();
        found.extend(parts.filter(|part| part["type"] == "image_url").map(|part| text(&part["image_url"]["url"])));
    }
    found
}

async fn ready(front: &ReloadableServer) {
    // Until the list has come, nothing is known of the model.
    harness::eventually_async("the upstream's list", async || {
        front.get("/baton/state").await["upstreams"][0]["life"] == "ready"
    })
    .await;
}

fn refused(answer: &Answer, field: &str, why: &str) {
    assert_eq!(answer.status, 400, "{answer:?}");
    assert!(answer.text.contains(field) && answer.text.contains(why), "{field} {why}: {answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_format_passes_unchanged_from_every_dialect_to_every_kind() {
    let pictures = pictures();
    let uris: Vec<String> = pictures.iter().map(uri).collect();
    let files: Vec<String> = pictures.iter().map(|(_, data)| data.clone()).collect();
    for (kind, expected) in [("openai", &uris), ("llama-server", &uris), ("vllm", &uris), ("ollama", &files)] {
        let mock = seeing(kind).await;
        let front = ReloadableServer::start(&upstream("up", kind, &mock.url, ""));
        ready(&front).await;
        for (path, body) in requests(&pictures) {
            let answer = front.post(path, &body).await;
            assert!(answer.status == 200 && answer.text.contains("well"), "{kind}{path}: {answer:?}");
            let asked = last_chat(&mock);
            assert!(images_of(&asked) == *expected, "{kind}{path}: {}", asked.text);
            assert_eq!(asked.text.matches("What is this?").count(), 1, "{kind}{path}: {}", asked.text);
            assert!(!asked.text.contains('\u{F8FE}'), "a mark was sent: {}", asked.text);
        }
        let shown = front.post("/api/show", &json!({ "model": "m" })).await.json();
        assert!(shown["capabilities"].as_array().unwrap().contains(&json!("vision")), "{kind}: {shown}");
        assert_eq!(front.get("/props").await["modalities"]["vision"], true, "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_does_not_see_is_sent_nothing() {
    let pictures = pictures();
    let blind = json!({ "data": [{ "id": "theirs", "capabilities": ["completion"] }] });
    let silent = json!({ "data": [{ "id": "theirs" }] });
    for (kind, list, more, why) in [
        ("llama-server", &blind, "", "says that it sees none"),
        ("vllm", &silent, "", "images = true"),
        ("openai", &silent, "", "images = true"),
        ("openai", &blind, "images = false", "the operator sends none"),
    ] {
        let mock = Mock::start(|_, _| says("well")).await;
        mock.list_as(list.clone());
        let front = ReloadableServer::start(&upstream("up", kind, &mock.url, more));
        ready(&front).await;
        for (path, body) in requests(&pictures[..1]) {
            refused(&front.post(path, &body).await, "", why);
        }
        assert_eq!(mock.n_asked(), 0, "{kind}: something was sent");
        assert_eq!(front.chat(json!({})).await.status, 200, "{kind}: text goes on");
        // The operator knows better.
        let config = upstream("up", kind, &mock.url, "images = true");
        let knowing = ReloadableServer::start(&config);
        let (path, body) = requests(&pictures[..1]).remove(0);
        assert_eq!(knowing.post(path, &body).await.status, 200, "{kind}");
        assert_eq!(images_of(&last_chat(&mock)), [uri(&pictures[0])], "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ollama_that_does_not_see_is_asked_once_and_one_that_does_not_say_is_a_503() {
    let pictures = pictures();
    let (path, body) = requests(&pictures[..1]).remove(3);
    let shown = json!({ "capabilities": ["completion"] });
    let mock = Mock::start(move |_, _| whole(200, "", &shown)).await;
    let front = ReloadableServer::start(&upstream("up", "ollama", &mock.url, ""));
    for _ in 0..3 {
        refused(&front.post(path, &body).await, "messages[0].images[0]", "says that it sees none");
    }
    assert_eq!((mock.n_asked_at("/api/show"), mock.n_asked()), (1, 1));
    let mock = Mock::start(|_, _| whole(500, "", &json!({}))).await;
    let front = ReloadableServer::start(&upstream("up", "ollama", &mock.url, ""));
    let answer = front.post(path, &body).await;
    assert_eq!((answer.status, answer.retry_after.as_deref()), (503, Some("1")), "{answer:?}");
    assert_eq!(mock.n_asked(), mock.n_asked_at("/api/show"), "the images were sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_several_upstreams_only_those_that_see_get_images() {
    let (sees, blind) = (seeing("openai").await, Mock::start(|_, _| says("blind")).await);
    let config = upstream("blind", "openai", &blind.url, "images = false") + &upstream("sees", "openai", &sees.url, "");
    let front = ReloadableServer::start(&config);
    harness::eventually_async("both lists", async || {
        let state = front.get("/baton/state").await;
        state["upstreams"].as_array().unwrap().iter().all(|upstream| upstream["life"] == "ready")
    })
    .await;
    let (path, body) = requests(&pictures()[..1]).remove(0);
    for _ in 0..4 {
        let answer = front.post(path, &body).await;
        assert!(answer.status == 200 && answer.route.contains("upstream=sees"), "{answer:?}");
    }
    assert_eq!(blind.n_asked(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn urls_reach_only_an_upstream_that_may_fetch_them_and_baton_fetches_none() {
    // The server that the URL names.
    let host = Mock::start(|_, _| Vec::new()).await;
    let url = format!("{}/a.png", host.url);
    let text = json!({ "type": "text", "text": "What is this?" });
    let input = json!({ "type": "input_image", "image_url": url });
    let source = json!({ "type": "image", "source": { "type": "url", "url": url } });
    let requests = [
        ("/v1/chat/completions", chat(&json!([text, image_url(&url)])), "messages[0].content[1].image_url.url"),
        (
            "/v1/responses",
            json!({ "model": "m", "input": [{ "role": "user", "content": [input] }] }),
            "input[0].content[0].image_url",
        ),
        ("/v1/messages", chat(&json!([text, source])), "messages[0].content[1].source.url"),
    ];
    for kind in ["openai", "llama-server", "vllm"] {
        let mock = seeing(kind).await;
        let closed = ReloadableServer::start(&upstream("up", kind, &mock.url, "images = true"));
        let open = ReloadableServer::start(&upstream("up", kind, &mock.url, "images = true\nimage_urls = true"));
        for (path, body, field) in &requests {
            refused(&closed.post(path, body).await, field, "send the image itself, as a data URI in base64");
            assert_eq!(mock.n_asked(), 0, "{kind}");
        }
        for (i, (path, body, _)) in requests.iter().enumerate() {
            assert_eq!(open.post(path, body).await.status, 200, "{kind}{path}");
            assert_eq!((images_of(&last_chat(&mock)), mock.n_asked()), (vec![url.clone()], i + 1), "{kind}{path}");
        }
        // Whatever a client means by it, it is no URL to fetch.
        for other in ["file:///etc/passwd", "ftp://example.com/a.png", "http://example.com/a b.png"] {
            let body = chat(&json!([image_url(other)]));
            refused(&open.post("/v1/chat/completions", &body).await, "messages[0].content[0].image_url.url", "URL");
        }
        let listed = json!({ "model": "m", "messages": [{ "role": "user", "content": "x", "images": [URL] }] });
        refused(&open.post("/api/chat", &listed).await, "messages[0].images[0]", "never fetches");
    }
    assert_eq!((host.n_asked(), host.log.n_lists.load(Ordering::SeqCst)), (0, 0), "Baton fetched it");
}

#[tokio::test(flavor = "multi_thread")]
async fn images_have_no_tokens_that_an_upstream_would_count() {
    let picture = &pictures()[0];
    let text = json!({ "type": "text", "text": "What is this?" });
    let of_openai = chat(&json!([text, image_url(&uri(picture))]));
    let of_anthropic = chat(&json!([text, block(picture)]));
    for kind in ["llama-server", "vllm"] {
        let answer = json!({ "prompt": "rendered", "tokens": [1, 2, 3] });
        let mock = Mock::start(move |_, _| whole(200, "", &answer)).await;
        let front = ReloadableServer::start(&upstream("up", kind, &mock.url, "images = true"));
        let counted = front.post("/v1/messages/count_tokens", &chat(&json!([text]))).await;
        assert_eq!((counted.status, &counted.json()["input_tokens"]), (200, &json!(3)), "{kind}: {counted:?}");
        let n_asked = mock.n_asked();
        assert!(n_asked > 0);
        for (path, body, field) in [
            ("/v1/messages/count_tokens", &of_anthropic, "messages[0].content[1].source.data"),
            ("/apply-template", &of_openai, "messages[0].content[1].image_url.url"),
        ] {
            refused(&front.post(path, body).await, field, "does not count");
        }
        assert_eq!(mock.n_asked(), n_asked, "{kind}: the marks of images were sent as text");
    }
}
