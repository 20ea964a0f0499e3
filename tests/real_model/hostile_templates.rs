//! The template of a model's file may ask for all memory. It costs the request that was rendered.

use futures::future::join_all;
use harness::{BatonServer, chat, peak_mib};
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

fn template() -> String {
    let begin = "{% set ns = namespace(s='x', l=[1]) %}{% set long = 'x' * 1000000 %}{% set wanted = messages[-1].content %}\
                 {% if wanted == 'hi' %}<|im_start|>hi<|end|>";
    let branch = |(name, expansion): (&str, &str)| format!("{{% elif wanted == '{name}' %}}{expansion}");
    format!("{begin}{}{{% endif %}}", EXPANSIONS.map(branch).concat() + &branch(ENDLESS))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_takes_all_memory_costs_one_request_and_no_engine() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("scripted.gguf");
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
    script.write(&model);
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
