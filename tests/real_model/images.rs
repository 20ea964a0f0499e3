//! Images in every dialect, and after the loss of a node, with the real model and a projector of random weights.

use std::io::Cursor;
use std::path::Path;
use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::StreamExt;
use harness::{BATON, BatonNode, BatonServer, ReloadableServer, eventually_async, upstream};
use image::{ImageFormat, Rgb, RgbImage};
use rustix::process::Signal;
use serde_json::{Value, json};
use tiny_gguf::Architecture;
use tiny_gguf::projector::{self, N_ROWS, TinyProjector};

/// Small enough for several models in the test machine's memory.
const SIZES: [&str; 6] = ["--ctx-size", "1024", "--kv-cells", "2048", "--slots", "2"];

/// A projector for SmolLM2-135M, whose rows have 576 values.
fn projector_file(folder: &tempfile::TempDir) -> String {
    let path = folder.path().join("mmproj.gguf");
    projector::write(&path, TinyProjector::Mlp, 576, 1);
    path.to_str().unwrap().to_owned()
}

/// A picture in base64: squares of a colour on black.
fn picture(colour: [u8; 3], width: u32, format: ImageFormat) -> String {
    let picture = RgbImage::from_fn(width, 40, |x, y| Rgb(if (x / 8 + y / 8) % 2 == 0 { colour } else { [0; 3] }));
    let mut bytes = Cursor::new(Vec::new());
    picture.write_to(&mut bytes, format).unwrap();
    STANDARD.encode(bytes.into_inner())
}

fn red() -> String {
    picture([255, 0, 0], 48, ImageFormat::Png)
}

fn uri(data: &str) -> String {
    format!("data:image/png;base64,{data}")
}

fn chat(content: &Value, more: &Value) -> Value {
    let mut body = json!({ "model": "smollm2", "messages": [{ "role": "user", "content": content }], "max_tokens": 12,
        "temperature": 0, "ignore_eos": true });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// An OpenAI chat about an image.
fn about(data: &str, more: &Value) -> Value {
    let text = json!({ "type": "text", "text": "What do you see?" });
    chat(&json!([text, { "type": "image_url", "image_url": { "url": uri(data) } }]), more)
}

async fn post(server: &BatonServer, path: &str, body: &Value) -> (u16, String, String) {
    let response = reqwest::Client::new().post(format!("{}{path}", server.base)).json(body).send().await.unwrap();
    let route = response.headers().get("x-baton-route").map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default();
    (response.status().as_u16(), route, response.text().await.unwrap())
}

async fn whole(server: &BatonServer, path: &str, body: &Value) -> Value {
    let (status, _, text) = post(server, path, body).await;
    assert_eq!(status, 200, "{path}: {text}");
    serde_json::from_str(&text).unwrap()
}

fn said(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{reply}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_dialect_takes_images_and_counts_them() {
    let folder = tempfile::tempdir().unwrap();
    let server = BatonServer::start(&[&SIZES[..], &["--mmproj", &projector_file(&folder)]].concat());
    let red = red();
    let openai = "/v1/chat/completions";
    let blind = whole(&server, openai, &chat(&json!("What do you see?"), &json!({}))).await;
    let first = whole(&server, openai, &about(&red, &json!({}))).await;
    let n_prompt = |reply: &Value| reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(n_prompt(&first) >= n_prompt(&blind) + N_ROWS as u64, "{first}");
    let again = whole(&server, openai, &about(&red, &json!({}))).await;
    let n_cached = again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!((n_cached, said(&again)), (n_prompt(&first) - 1, said(&first)));
    // The noise of random weights hardly changes the first tokens, but always their log-probabilities.
    let sureness = async |data: &str| {
        let reply = whole(&server, openai, &about(data, &json!({ "logprobs": true }))).await;
        reply["choices"][0]["logprobs"]["content"][0]["logprob"].as_f64().unwrap()
    };
    let of_red = sureness(&red).await;
    let blue = picture([0, 0, 255], 48, ImageFormat::Png);
    assert!((of_red - sureness(&blue).await).abs() > 1e-3, "the image makes no difference");
    assert!((of_red - sureness(&red).await).abs() < 1e-6, "the same image does");
    for format in [ImageFormat::Jpeg, ImageFormat::Gif, ImageFormat::WebP] {
        whole(&server, openai, &about(&picture([9, 99, 9], 48, format), &json!({}))).await;
    }
    // Two choices share one image.
    let both = whole(&server, openai, &about(&red, &json!({ "n": 2 }))).await;
    assert_eq!(both["choices"][1]["message"]["content"], both["choices"][0]["message"]["content"]);

    let source = json!({ "type": "base64", "media_type": "image/png", "data": red });
    let block = json!({ "type": "image", "source": source });
    let content = json!([block, { "type": "text", "text": "What do you see?" }]);
    let message = whole(&server, "/v1/messages", &chat(&content, &json!({}))).await;
    assert!(!message["content"][0]["text"].as_str().unwrap().is_empty(), "{message}");
    let counted = whole(&server, "/v1/messages/count_tokens", &chat(&content, &json!({}))).await;
    assert!(counted["input_tokens"].as_u64().unwrap() >= n_prompt(&blind) + N_ROWS as u64, "{counted}");
    let parts = json!([{ "type": "input_text", "text": "What?" }, { "type": "input_image", "image_url": uri(&red) }]);
    let body = json!({ "model": "smollm2", "input": [{ "role": "user", "content": parts }], "max_output_tokens": 8 });
    let response = whole(&server, "/v1/responses", &body).await;
    assert!(response["usage"]["input_tokens"].as_u64().unwrap() > N_ROWS as u64, "{response}");
    let options = json!({ "num_predict": 8, "temperature": 0 });
    let body = json!({ "model": "smollm2", "stream": false, "options": options, "messages": [
        { "role": "user", "content": "What do you see?", "images": [red] }] });
    let ollama = whole(&server, "/api/chat", &body).await;
    assert!(ollama["prompt_eval_count"].as_u64().unwrap() >= n_prompt(&blind) + N_ROWS as u64, "{ollama}");
    let body = json!({ "model": "smollm2", "stream": false, "options": options, "prompt": "What?", "images": [red] });
    assert!(!whole(&server, "/api/generate", &body).await["response"].as_str().unwrap().is_empty());
    let shown = whole(&server, "/api/show", &json!({ "model": "smollm2" })).await;
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("vision")), "{shown}");

    let (status, _, events) = post(&server, openai, &about(&red, &json!({ "stream": true }))).await;
    assert!(status == 200 && events.ends_with("data: [DONE]\n\n"), "{events}");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_images_are_a_400_that_names_the_field() {
    let folder = tempfile::tempdir().unwrap();
    let server = BatonServer::start(&[&SIZES[..], &["--mmproj", &projector_file(&folder)]].concat());
    let cut = STANDARD.encode(&STANDARD.decode(red()).unwrap()[..50]);
    let long = picture([1, 2, 3], 4_100, ImageFormat::Png);
    for (url, part) in [
        (uri("%%%"), "is not valid base64"),
        (uri("aGVsbG8="), "is not a PNG, JPEG, WebP or GIF"),
        (uri(&cut), "cannot be read"),
        (uri(&long), "too long and thin"),
        ("https://example.com/a.png".to_owned(), "never fetches"),
        ("file:///etc/hosts".to_owned(), "never fetches"),
    ] {
        let body = chat(&json!([{ "type": "image_url", "image_url": { "url": url } }]), &json!({}));
        let (status, _, reply) = post(&server, "/v1/chat/completions", &body).await;
        assert_eq!(status, 400, "{part}: {reply}");
        let error = serde_json::from_str::<Value>(&reply).unwrap()["error"].take();
        assert!(error["message"].as_str().is_some_and(|message| message.contains(part)), "{part}: {error}");
        assert_eq!(error["param"], "messages[0].content[0].image_url.url", "{error}");
    }
    let many = json!(vec![json!({ "type": "image_url", "image_url": { "url": uri(&red()) } }); 17]);
    let (status, _, reply) = post(&server, "/v1/chat/completions", &chat(&many, &json!({}))).await;
    assert!(status == 400 && reply.contains("16 images"), "{reply}");
    // The engine still works.
    whole(&server, "/v1/chat/completions", &about(&red(), &json!({}))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_about_an_image_moves_only_to_nodes_with_image_support() {
    let folder = tempfile::tempdir().unwrap();
    let eyes = projector_file(&folder);
    let node = |more: &[&str]| BatonNode::start(&[&SIZES[..], more].concat());
    let decode = [node(&["--mmproj", &eyes]), node(&["--mmproj", &eyes]), node(&[])];
    let prefill = node(&["--role", "prefill"]);
    let nodes = decode.each_ref().map(|node| ["--decode", node.url.as_str()]).concat();
    let more = ["--prefill", &prefill.url, "--policy", "always_handoff", "--no-calibration", "--name", "smollm2"];
    let server = BatonServer::with(&[&nodes[..], &more].concat());
    let body = about(&red(), &json!({ "max_tokens": 150 }));
    let ready = || async {
        let state: Value = reqwest::get(format!("{}/baton/state", server.base)).await.unwrap().json().await.unwrap();
        state["models"][0]["nodes"].as_array().unwrap().iter().all(|node| node["life"] == "ready")
    };
    eventually_async("all nodes", ready).await;
    let (status, route, undisturbed) = post(&server, "/v1/chat/completions", &body).await;
    assert_eq!(status, 200, "{undisturbed}");
    assert!(route.starts_with("direct; decode=decode-") && route.contains("reason=no_projector"), "{route}");
    let undisturbed: Value = serde_json::from_str(&undisturbed).unwrap();

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let request = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&streamed);
    let response = request.send().await.unwrap();
    let route = response.headers()["x-baton-route"].to_str().unwrap().to_owned();
    let mut bytes = response.bytes_stream();
    let mut text = String::new();
    let mut killed = false;
    while let Some(chunk) = bytes.next().await {
        text += &String::from_utf8_lossy(&chunk.unwrap());
        if !killed && text.matches("data: ").count() > 8 {
            let of = if route.contains("decode=decode-1;") { 0 } else { 1 };
            decode[of].signal(Signal::KILL);
            killed = true;
        }
    }
    let events = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let events = events.map(|data| serde_json::from_str::<Value>(data).unwrap());
    let whole: String = events.filter_map(|e| Some(e["choices"][0]["delta"]["content"].as_str()?.to_owned())).collect();
    assert!(killed && text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(whole, said(&undisturbed));
    for _ in 0..4 {
        let (status, route, reply) = post(&server, "/v1/chat/completions", &about(&red(), &json!({}))).await;
        assert_eq!(status, 200, "{reply}");
        assert!(!route.contains("decode=decode-3"), "{route}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_with_images_is_handed_over_and_its_reply_stays_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let eyes = projector_file(&folder);
    let seeing = [&SIZES[..], &["--mmproj", &eyes]].concat();
    let alone = BatonServer::start(&seeing);
    let decode = BatonNode::start(&seeing);
    let prefill = BatonNode::start(&[&seeing[..], &["--role", "prefill"]].concat());
    let nodes = ["--decode", &decode.url, "--prefill", &prefill.url, "--policy", "always_handoff"];
    let server = BatonServer::with(&[&nodes[..], &["--no-calibration", "--name", "smollm2"]].concat());
    let text = json!({ "type": "text", "text": "What do you see, and what is behind the hills on its left side?" });
    let part = |data: &str| json!({ "type": "image_url", "image_url": { "url": uri(data) } });
    let blue = picture([0, 0, 255], 80, ImageFormat::Jpeg);
    for images in [vec![part(&red())], vec![part(&blue), part(&red())]] {
        let content: Value = images.into_iter().chain([text.clone()]).collect();
        let body = chat(&content, &json!({}));
        let expected = whole(&alone, "/v1/chat/completions", &body).await;
        let (status, route, reply) = post(&server, "/v1/chat/completions", &body).await;
        assert_eq!(status, 200, "{reply}");
        assert!(route.starts_with("handoff; prefill="), "{route}");
        let reply: Value = serde_json::from_str(&reply).unwrap();
        let handoff = &reply["timings"]["handoff"];
        assert!(handoff["failure"].is_null() && handoff["n_tokens"].as_u64().unwrap() > N_ROWS as u64, "{reply}");
        assert_eq!(said(&reply), said(&expected));
    }
}

/// A request about a picture in each dialect, and where its reply has the text. The image comes before its text, as Ollama has
/// it.
fn in_every_dialect(model: &str, picture: &str) -> [(&'static str, Value, &'static str); 5] {
    const ASKED: &str = "What do you see?";
    let text = json!({ "type": "text", "text": ASKED });
    let part = json!({ "type": "image_url", "image_url": { "url": uri(picture) } });
    let block = json!({ "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": picture } });
    let of_user = |content: Value| {
        let messages = json!([{ "role": "user", "content": content }]);
        json!({ "model": model, "messages": messages, "max_tokens": 12, "temperature": 0 })
    };
    let inputs = json!([{ "type": "input_image", "image_url": uri(picture) }, { "type": "input_text", "text": ASKED }]);
    let response = json!({ "model": model, "input": [{ "role": "user", "content": inputs }], "max_output_tokens": 12,
        "temperature": 0 });
    let ollama = |more: Value| {
        let options = json!({ "num_predict": 12, "temperature": 0, "repeat_penalty": 1.0 });
        let mut body = json!({ "model": model, "stream": false, "options": options });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let messages = json!([{ "role": "user", "content": ASKED, "images": [picture] }]);
    [
        ("/v1/chat/completions", of_user(json!([part, text])), "/choices/0/message/content"),
        ("/v1/messages", of_user(json!([block, text])), "/content/0/text"),
        ("/v1/responses", response, "/output/0/content/0/text"),
        ("/api/chat", ollama(json!({ "messages": messages })), "/message/content"),
        ("/api/generate", ollama(json!({ "prompt": ASKED, "images": [picture] })), "/response"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_whose_images_share_positions_says_the_same_in_every_dialect_alone_and_handed_over() {
    let folder = tempfile::tempdir().unwrap();
    let [model, eyes] = ["tiny.gguf", "mmproj.gguf"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    tiny_gguf::write_with_template(Path::new(&model), Architecture::Qwen2Vl, 1);
    projector::write(Path::new(&eyes), TinyProjector::Qwen2Vl, 64, 1);
    let seeing = [&SIZES[..], &["--model", &model, "--mmproj", &eyes, "--threads", "1"]].concat();
    let alone = BatonServer::with(&[&seeing[..], &["--name", "tiny"]].concat());
    let decode = BatonNode::with(&seeing);
    let prefill = BatonNode::with(&[&seeing[..], &["--role", "prefill"]].concat());
    let nodes = ["--decode", &decode.url, "--prefill", &prefill.url, "--policy", "always_handoff"];
    let handing_over = BatonServer::with(&[&nodes[..], &["--no-calibration", "--name", "tiny"]].concat());
    let said_of = async |server: &BatonServer, (path, body, at): &(&'static str, Value, &'static str)| {
        let reply = whole(server, path, body).await;
        reply.pointer(at).and_then(Value::as_str).unwrap_or_else(|| panic!("{path}: {reply}")).to_owned()
    };
    let [png, webp, jpeg, gif] = [ImageFormat::Png, ImageFormat::WebP, ImageFormat::Jpeg, ImageFormat::Gif]
        .map(|format| in_every_dialect("tiny", &picture([200, 40, 9], 120, format)));
    let expected = said_of(&alone, &png[0]).await;
    assert!(!expected.is_empty());
    for request in png.iter().chain(&webp) {
        assert_eq!(said_of(&alone, request).await, expected, "{}", request.0);
    }
    let (status, route, reply) = post(&handing_over, png[0].0, &png[0].1).await;
    assert!(status == 200 && route.starts_with("handoff; prefill="), "{route}: {reply}");
    let handoff = serde_json::from_str::<Value>(&reply).unwrap()["timings"]["handoff"].take();
    assert!(handoff["failure"].is_null() && handoff["n_tokens"].as_u64().is_some_and(|n| n > 0), "{reply}");
    for request in png.iter().chain(&webp) {
        assert_eq!(said_of(&handing_over, request).await, expected, "{}", request.0);
    }
    // Their pixels are others.
    for request in [&jpeg[0], &gif[0]] {
        assert_eq!(said_of(&alone, request).await, said_of(&handing_over, request).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_sees_replies_about_an_image_in_every_dialect_as_it_does_itself() {
    let folder = tempfile::tempdir().unwrap();
    let second = BatonServer::start(&[&SIZES[..], &["--mmproj", &projector_file(&folder)]].concat());
    let red = red();
    let requests = in_every_dialect("smollm2", &red);
    let expected = said(&whole(&second, requests[0].0, &requests[0].1).await).to_owned();
    assert!(!expected.is_empty());
    let models = "models = { smollm2 = \"smollm2\" }\n";
    // The first says nothing of its models.
    for (kind, more) in [("openai", "images = true\n"), ("llama-server", ""), ("ollama", "")] {
        let front = ReloadableServer::start(&upstream("second", kind, &second.base, &format!("{models}{more}")));
        for (path, body, at) in &requests {
            let reply = whole(&front.server, path, body).await;
            assert_eq!(reply.pointer(at).and_then(Value::as_str), Some(&*expected), "{kind}{path}: {reply}");
        }
        let props = front.get("/props").await;
        assert_eq!(props["modalities"]["vision"], true, "{kind}: {props}");
    }
    drop(second);
    let blind = BatonServer::start(&SIZES);
    for kind in ["llama-server", "ollama"] {
        let front = ReloadableServer::start(&upstream("blind", kind, &blind.base, models));
        let (status, _, reply) = post(&front.server, requests[0].0, &requests[0].1).await;
        assert!(status == 400 && reply.contains("says that it sees none"), "{kind}: {reply}");
    }
}

#[test]
fn a_projector_that_does_not_fit_ends_the_start_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let of_another = folder.path().join("mmproj.gguf");
    projector::write(&of_another, TinyProjector::Mlp, 640, 1);
    let model = harness::model();
    let check = |command: &str, projector: &Path, part: &str| {
        let mut process = Command::new(&*BATON);
        process.args([command, "--listen", "127.0.0.1:0", "--threads", "1", "--model"]).arg(&model);
        let output =
            process.arg("--mmproj").arg(projector).env("BATON_CLUSTER_KEY", harness::CLUSTER_KEY).output().unwrap();
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        println!("{command}: {log}");
        assert!(!output.status.success(), "{log}");
        assert_eq!(log.lines().filter(|line| line.contains(part)).count(), 1, "{log}");
    };
    check("node", &of_another, "the projector of another model");
    check("serve", &of_another, "the projector of another model");
    check("node", &model, "is not a projector");
}
