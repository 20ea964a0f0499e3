//! However a client writes its requests, they take bounded memory and lose no other request.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::join_all;
use harness::mock::{Mock, Step};
use harness::{BatonServer, ReloadableServer, eventually_async, upstream};
use serde_json::{Value, json};
use tokio::time::timeout;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Requests that are sent at once.
const AT_ONCE: usize = 64;

/// The most by which they may make the endpoint's own process grow.
const MOST_MIB: u64 = 384;

/// The same for bodies that are not grammars. The aim is [`MOST_MIB`]; they take 222 to 417, those of 8 MiB 427 to 562.
const MOST_LONG_MIB: u64 = 768;

/// An array of `unit`s with about this many bytes.
fn array(unit: &str, n_bytes: usize) -> String {
    let n = n_bytes / (unit.len() + 1);
    format!("[{unit}{}]", format!(",{unit}").repeat(n - 1))
}

/// A schema of 38 KB, whose values take 4 MB.
fn schema() -> String {
    format!(r#"{{"enum":{}}}"#, array("[0]", 38 * KIB))
}

/// A grammar that writes the pattern of a terminal of 30 KB thousands of times.
fn lark(n_ignored: usize, n_rules: usize) -> String {
    let chain: String = (0..n_rules).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
    let ignored = "%ignore X\n".repeat(n_ignored);
    format!("start: r0\n{chain}r{n_rules}: X\nX: \"{}\"\n{ignored}", "x".repeat(30_000))
}

/// A grammar that mentions a rule of 30 KB 12,000 times, and refers to itself.
fn gbnf() -> String {
    format!("root ::= \"(\" root \")\" | a{}\na ::= \"{}\"\n", "|a".repeat(12_000), "x".repeat(30_000))
}

/// Functions of which each is as large as 64 of them may be.
fn functions() -> Vec<Value> {
    let parameters = json!({ "type": "object", "properties": { "a": { "enum": vec![json!([0]); 140] } } });
    let text = "x".repeat(8 * KIB);
    (0..64).map(|i| json!({ "name": format!("f{i}"), "description": text, "parameters": parameters })).collect()
}

/// Six MiB that begin like a PNG image, in base64.
fn image() -> String {
    format!("iVBORw0KGgoA{}", "A".repeat((6 * MIB) / 3 * 4))
}

struct WorstBody {
    path: &'static str,
    body: Bytes,
}

fn worst(path: &'static str, body: &Value) -> WorstBody {
    WorstBody { path, body: body.to_string().into() }
}

/// Bodies of 50 KB that became gigabytes.
fn grammars() -> Vec<WorstBody> {
    let custom = |definition: String| {
        let format = json!({ "type": "grammar", "syntax": "lark", "definition": definition });
        json!({ "model": "sim", "input": "hi", "tools": [{ "type": "custom", "name": "t", "format": format }] })
    };
    let chat = json!({ "model": "sim", "messages": [{ "role": "user", "content": "hi" }], "grammar": gbnf() });
    vec![
        worst("/v1/responses", &custom(lark(2_400, 60))),
        worst("/v1/responses", &custom(lark(1_400, 20))),
        worst("/v1/chat/completions", &chat),
        worst("/api/chat", &chat),
    ]
}

fn worst_bodies() -> Vec<WorstBody> {
    let prompts = vec!["a"; 64];
    let schema: Value = serde_json::from_str(&schema()).unwrap();
    let tools: Vec<_> = functions().into_iter().map(|f| json!({ "type": "function", "function": f })).collect();
    let responses_tools: Vec<_> = functions()
        .into_iter()
        .map(|mut f| {
            f["type"] = "function".into();
            f
        })
        .collect();
    let anthropic_tool = |f: Value| json!({ "name": f["name"], "input_schema": f["parameters"] });
    let anthropic_tools: Vec<_> = functions().into_iter().map(anthropic_tool).collect();
    let values: Value = serde_json::from_str(&array("[0]", 300 * KIB)).unwrap();
    let said = |content: Value| json!([{ "role": "user", "content": content }]);
    let hi = || said("hi".into());
    let stops: Vec<_> = (0..16).map(|i| format!("{i}{}", "x".repeat(1000))).collect();
    let biases: serde_json::Map<_, _> = (0..250).map(|token| (token.to_string(), json!(1))).collect();
    vec![
        worst("/v1/completions", &json!({ "model": "sim", "prompt": prompts, "json_schema": schema, "max_tokens": 1 })),
        worst("/completion", &json!({ "prompt": prompts, "json_schema": schema, "n_predict": 1 })),
        worst("/v1/completions", &json!({ "model": "sim", "prompt": prompts, "stop": stops, "max_tokens": 1 })),
        worst("/v1/completions", &json!({ "model": "sim", "prompt": prompts, "logit_bias": biases, "max_tokens": 1 })),
        worst("/v1/chat/completions", &json!({ "model": "sim", "messages": hi(), "json_schema": schema, "n": 16 })),
        worst(
            "/v1/chat/completions",
            &json!({ "model": "sim", "messages": hi(), "chat_template_kwargs": { "a": values } }),
        ),
        worst("/v1/chat/completions", &json!({ "model": "sim", "messages": hi(), "tools": tools, "max_tokens": 1 })),
        worst("/v1/responses", &json!({ "model": "sim", "input": "hi", "tools": responses_tools })),
        worst("/v1/messages", &json!({ "model": "sim", "messages": hi(), "tools": anthropic_tools, "max_tokens": 1 })),
        worst("/api/chat", &json!({ "model": "sim", "messages": hi(), "tools": tools })),
    ]
}

/// Bodies of 8 MiB. The context of no engine has room for their texts.
fn long_bodies() -> Vec<WorstBody> {
    let long = "x".repeat(8 * MIB);
    let said = |content: Value| json!([{ "role": "user", "content": content }]);
    let prompts = vec!["a"; 64];
    let hi = || said("hi".into());
    vec![
        worst("/v1/completions", &json!({ "model": "sim", "prompt": prompts, "suffix": long })),
        worst("/infill", &json!({ "input_prefix": "a", "input_suffix": long })),
        worst("/api/generate", &json!({ "model": "sim", "prompt": "a", "suffix": long })),
        worst(
            "/v1/chat/completions",
            &json!({ "model": "sim", "messages": hi(), "json_schema": format!(r#"{{"enum":{}}}"#, array("[0]", 8 * MIB)) }),
        ),
        worst("/v1/chat/completions", &json!({ "model": "sim", "messages": said(long.as_str().into()) })),
        worst("/v1/messages/count_tokens", &json!({ "model": "sim", "messages": said(long.as_str().into()) })),
        worst("/tokenize", &json!({ "content": long })),
        worst("/v1/rerank", &json!({ "model": "sim", "query": long, "documents": vec!["a"; 1000] })),
        worst(
            "/v1/chat/completions",
            &json!({ "model": "sim", "messages": said(json!([{ "type": "image_url",
                "image_url": { "url": format!("data:image/png;base64,{}", image()) } }])) }),
        ),
        worst(
            "/api/chat",
            &json!({ "model": "sim", "messages": [{ "role": "user", "content": "hi", "images": [image()] }] }),
        ),
        worst("/v1/embeddings", &json!({ "model": "sim", "input": vec!["x".repeat(4 * KIB); 2048] })),
    ]
}

/// The status of a reply. Every refusal is an error of its dialect.
async fn answered(client: &reqwest::Client, url: String, body: Bytes) -> u16 {
    let reply = client.post(&url).body(body).send().await.unwrap_or_else(|error| panic!("{url}: {error:?}"));
    let status = reply.status();
    let text = reply.text().await.unwrap();
    assert!(
        status.is_success() || status.is_client_error() || [501, 503].contains(&status.as_u16()),
        "{status}: {text}"
    );
    assert!(status.is_success() || text.contains("error"), "{url}: {status}: {text}");
    status.as_u16()
}

/// Sends 64 bodies of each kind at once, and then 64 of all kinds together. Returns the statuses of each round.
async fn all_answered(bodies: &[WorstBody], most_mib: u64) -> Vec<Vec<u16>> {
    let server = BatonServer::with(&["--engine", "sim", "--no-calibration"]);
    let client = reqwest::Client::new();
    let before = server.peak_mib();
    let mut waits = Vec::new();
    let mut rounds = Vec::new();
    for round in bodies.iter().map(std::slice::from_ref).chain([bodies]) {
        let posts = round.iter().cycle().take(AT_ONCE);
        let posts = posts.map(|worst| answered(&client, format!("{}{}", server.base, worst.path), worst.body.clone()));
        let mut posts = std::pin::pin!(join_all(posts));
        let statuses = loop {
            if let Ok(statuses) = timeout(Duration::from_millis(50), &mut posts).await {
                break statuses;
            }
            let asked = Instant::now();
            assert!(server.get_text("/health").await.contains("ok"));
            waits.push(asked.elapsed());
        };
        let grown = server.peak_mib().saturating_sub(before);
        println!("{grown} MiB after {} of {} bytes: {statuses:?}", round[0].path, round[0].body.len());
        assert!(grown <= most_mib, "the endpoint grew by {grown} MiB");
        rounds.push(statuses);
    }
    waits.sort();
    if let Some(most) = waits.last() {
        let p99 = waits[(waits.len() - 1) * 99 / 100];
        println!("/health, {} times: p50 {:?}, p99 {p99:?}, most {most:?}", waits.len(), waits[waits.len() / 2]);
    }
    let idle = async || {
        let requests = server.state().await["requests"].clone();
        (&requests["waiting"], &requests["memory_bytes"]) == (&json!(0), &json!(0))
    };
    eventually_async("everything to be given back", idle).await;
    rounds
}

#[tokio::test(flavor = "multi_thread")]
async fn the_worst_bodies_of_every_dialect_take_bounded_memory_and_each_is_answered() {
    all_answered(&worst_bodies(), MOST_LONG_MIB).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_longest_texts_take_bounded_memory_and_each_is_answered() {
    all_answered(&long_bodies(), MOST_LONG_MIB).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn grammars_that_grow_take_bounded_memory_or_are_refused() {
    let rounds = all_answered(&grammars(), MOST_MIB).await;
    // The simulator has no structured output: a grammar that fits is 501.
    assert!(rounds.iter().flatten().all(|status| [400, 501, 503].contains(status)), "{rounds:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_prompts_of_a_body_that_waits_share_its_schema_and_its_suffix() {
    let mock = Mock::start(|_, _| vec![Step::Hang]).await;
    let front = ReloadableServer::start(&("max_requests = 1\n".to_owned() + &upstream("one", "openai", &mock.url, "")));
    let post = |body: Value| {
        let client = reqwest::Client::new();
        tokio::spawn(client.post(format!("{}/v1/completions", front.server.base)).json(&body).send())
    };
    let requests = async || front.get("/baton/state").await["requests"].clone();
    let first = post(json!({ "model": "m", "prompt": "a" }));
    eventually_async("the only place to be taken", async || requests().await["slots"] == 1).await;
    let before = front.server.peak_mib();
    let prompts = vec!["a"; 64];
    let mut waiting = Vec::new();
    for n in 1..=12 {
        let schema: Value = serde_json::from_str(&schema()).unwrap();
        let body = match n % 8 {
            0 => json!({ "model": "m", "prompt": prompts, "suffix": "x".repeat(8 * MIB) }),
            _ => json!({ "model": "m", "prompt": prompts, "json_schema": schema }),
        };
        waiting.push(post(body));
    }
    // Each prompt counts.
    let all = 12 * prompts.len();
    eventually_async("all to wait", async || requests().await["waiting"] == all).await;
    let grown = front.server.peak_mib().saturating_sub(before);
    // 11 schemas of 4 MB, a suffix of 8 MiB, and what parsing takes. A copy for each prompt takes gigabytes.
    assert!(grown <= 256, "the endpoint grew by {grown} MiB");
    // What they hold is charged.
    let held = requests().await["memory_bytes"].as_u64().unwrap();
    assert!((32 * MIB as u64..128 * MIB as u64).contains(&held), "{held}");
    let metrics = front.server.get_text("/metrics").await;
    let value = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name}: {metrics}")).parse::<f64>().unwrap()
    };
    assert_eq!(value("baton_request_memory_bytes"), held as f64);
    assert!(value("baton_request_memory_limit_bytes") > held as f64);
    assert_eq!(value("baton_request_memory_refusals_total"), 0.0);
    waiting.iter().chain([&first]).for_each(tokio::task::JoinHandle::abort);
    eventually_async("all to be given back", async || requests().await["memory_bytes"] == 0).await;
}
