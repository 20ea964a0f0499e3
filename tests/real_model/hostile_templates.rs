//! The template of a model's file may ask for all memory. It costs the request that was rendered.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::future::join_all;
use harness::{BatonServer, chat, children_of, eventually_async, peak_mib};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tiny_gguf::scripted::{Reply, Script, Tokenizer, cut};

/// Expressions that ask for far more memory than there is, each with the message that makes the template compute it.
const EXPANSIONS: [(&str, &str); 7] = [
    ("doubling", "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}"),
    ("replacing", "{{ long | replace('x', long) | length }}"),
    ("adding lists", "{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l | list | length }}"),
    ("joining", "{{ long.join(long | list) | length }}"),
    ("indenting", "{{ 'a\nb' | indent(30000000000) | length }}"),
    ("nesting", "{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson | length }}"),
    ("formatting", "{{ '%30000000000d' | format(1) | length }}"),
];

/// This takes all the time before it takes all memory.
const ENDLESS: (&str, &str) =
    ("writing", "{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | string | length }}");

/// This takes a second or more of a processor, and no more than a template may.
const SLOW: (&str, &str) =
    ("slow", "{% for i in range(1000) %}{% set ns.s = long | upper %}{% endfor %}{{ ns.s | length }}");

/// Prompts that a node renders at once.
const MAX_AT_ONCE: usize = 4;

fn template() -> String {
    let begin = "{% set ns = namespace(s='x', l=[1]) %}{% set long = 'x' * 1000000 %}{% set wanted = messages[-1].content %}\
                 {% if wanted == 'hi' %}<|im_start|>hi<|end|>";
    let branch = |(name, expansion): (&str, &str)| format!("{{% elif wanted == '{name}' %}}{expansion}");
    format!("{begin}{}{{% endif %}}", EXPANSIONS.map(branch).concat() + &branch(ENDLESS) + &branch(SLOW))
}

/// A model with that template, which answers "Hello." to "hi".
fn write_model(path: &Path) {
    let script = Script {
        tokenizer: Tokenizer::BytePairs { pre: "qwen2".into() },
        template: template(),
        control: vec!["<|im_start|>".into(), "<|end|>".into()],
        user_defined: Vec::new(),
        bos: None,
        end: "<|im_end|>".into(),
        context_length: 4096,
        replies: vec![Reply::new("<|end|>", cut("Hello.", &[""; 0], 3))],
    };
    script.write(path);
}

/// The processes in which this engine renders.
fn renderers(engine: Pid) -> Vec<Pid> {
    children_of(engine.as_raw_nonzero().get().cast_unsigned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_whose_prompts_are_slow_to_render_makes_another_wait_for_one_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("scripted.gguf");
    write_model(&model);
    let keys = ["--api-key", "a", "--api-key", "b", "--slots", "8"];
    let model = ["--model", model.to_str().unwrap(), "--name", "scripted", "--threads", "1"];
    let server = BatonServer::with(&[&model[..], &keys].concat());
    let client = reqwest::Client::new();
    let post = async |key: &str, path: &str, text: &str| {
        let body = chat(text, json!({ "model": "scripted", "max_tokens": 8 }));
        let sent = client.post(format!("{}{path}", server.base)).bearer_auth(key).json(&body).send().await.unwrap();
        (sent.status().as_u16(), sent.text().await.unwrap())
    };
    let n_done = AtomicUsize::new(0);
    let slow = async |_: usize| {
        let (status, reply) = post("a", "/v1/messages/count_tokens", SLOW.0).await;
        n_done.fetch_add(1, Ordering::SeqCst);
        assert_eq!(status, 200, "{reply}");
    };
    let quick = async {
        eventually_async("all that render are busy", async || renderers(server.engine()).len() == MAX_AT_ONCE).await;
        let (status, reply) = post("b", "/v1/chat/completions", "hi").await;
        assert_eq!(status, 200, "{reply}");
        n_done.load(Ordering::SeqCst)
    };
    let (_, n_before) = tokio::join!(join_all((0..3 * MAX_AT_ONCE).map(slow)), quick);
    // Its prompt is rendered, and then cut into tokens.
    assert!(n_before <= 2 * MAX_AT_ONCE, "{n_before} of the others were served first");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renderer_that_is_stopped_costs_its_request_only_time() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("scripted.gguf");
    write_model(&model);
    let server = BatonServer::with(&["--model", model.to_str().unwrap(), "--name", "scripted", "--threads", "1"]);
    for renderer in renderers(server.engine()) {
        kill_process(renderer, Signal::STOP).unwrap();
    }
    let (status, reply) = server.post("/v1/chat/completions", &chat("hi", json!({ "model": "scripted" }))).await;
    assert_eq!((status, &reply["choices"][0]["message"]["content"]), (200, &json!("Hello.")), "{reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_takes_all_memory_costs_one_request_and_no_engine() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("scripted.gguf");
    write_model(&model);
    let server = BatonServer::with(&["--model", model.to_str().unwrap(), "--name", "scripted", "--threads", "1"]);
    let ask = async |text: &str| {
        let (status, reply) = server.post("/v1/chat/completions", &chat(text, json!({ "model": "scripted" }))).await;
        (status, reply["choices"][0]["message"]["content"].as_str().map(str::to_owned), reply)
    };
    let (engine, before) = (server.engine(), peak_mib(server.engine().as_raw_nonzero().get().cast_unsigned()));
    assert!(matches!(ask("hi").await, (200, Some(text), _) if text == "Hello."));
    // Twice as many as are rendered at once. The endless one, which takes the longest, comes first.
    let names = [ENDLESS].into_iter().chain(EXPANSIONS).map(|(name, _)| name);
    let replies = join_all(names.clone().map(&ask)).await;
    for (name, (status, _, reply)) in names.zip(replies) {
        assert_eq!(status, 400, "{name}: {reply}");
        assert!(!reply["error"]["message"].as_str().unwrap_or_default().is_empty(), "{name}: {reply}");
    }
    assert!(matches!(ask("hi").await, (200, Some(text), _) if text == "Hello."));
    assert_eq!(server.engine(), engine, "the engine's process goes on");
    let grown = peak_mib(engine.as_raw_nonzero().get().cast_unsigned()) - before;
    assert!(grown < 256, "the engine's process has grown by {grown} MiB");
}
