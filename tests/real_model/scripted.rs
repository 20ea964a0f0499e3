//! A scripted model plays an agent's turns: its calls are read by Baton's own parser, and their results choose the next turn.

use harness::BatonServer;
use serde_json::{Value, json};
use tiny_gguf::scripted::{Reply, Script, Tokenizer, cut};

/// Ends the prompt with the number of results so far.
const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}\
    <tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {{ '<|turn' ~ (messages | selectattr('role', 'equalto', 'tool') | list | length) ~ '|>' }}{# arguments #}";

/// The same call and the same words occur in several turns.
const TURNS: [(&str, &str); 3] = [
    (
        "<|turn0|>",
        "I read both files.\n<tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\": \"a/é.txt\"}}\n</tool_call>\n\
         <tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\": \"b.txt\"}}\n</tool_call>",
    ),
    ("<|turn2|>", "<tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\": \"b.txt\"}}\n</tool_call>"),
    ("<|turn3|>", "Both files say 😀.\nBoth."),
];

fn tools() -> Value {
    let path = json!({ "type": "object", "properties": { "path": { "type": "string" } }, "required": ["path"] });
    json!([{ "type": "function", "function": { "name": "read", "description": "Reads a file.", "parameters": path } }])
}

/// Asks for the next turn, and adds it and the results of its calls to the messages. Returns its text and its calls.
async fn turn(server: &BatonServer, messages: &mut Vec<Value>, temperature: f64) -> (String, Vec<(String, String)>) {
    let body = json!({ "model": "scripted", "messages": messages, "tools": tools(), "temperature": temperature,
        "max_tokens": 500 });
    let (status, reply) = server.post("/v1/chat/completions", &body).await;
    assert_eq!(status, 200, "{reply}");
    let message = reply["choices"][0]["message"].clone();
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    let expected = if calls.is_empty() { "stop" } else { "tool_calls" };
    assert_eq!(reply["choices"][0]["finish_reason"], expected, "{reply}");
    messages.push(message.clone());
    let result = |call: &Value| json!({ "role": "tool", "tool_call_id": call["id"], "content": "😀" });
    messages.extend(calls.iter().map(result));
    let of = |call: &Value, key: &str| call["function"][key].as_str().unwrap().to_owned();
    let calls = calls.iter().map(|call| (of(call, "name"), of(call, "arguments"))).collect();
    (message["content"].as_str().unwrap_or_default().to_owned(), calls)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_replies_with_the_script() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("scripted.gguf");
    let tokenizers = [Tokenizer::BytePairs { pre: "qwen2".into() }, Tokenizer::SentencePiece];
    let user_defined = ["<tool_call>", "</tool_call>"];
    for (tokenizer, n_chars, temperature) in
        [(&tokenizers[0], 1, 0.0), (&tokenizers[0], 7, 1.0), (&tokenizers[1], 1, 0.0), (&tokenizers[1], 500, 0.0)]
    {
        let script = Script {
            tokenizer: tokenizer.clone(),
            template: TEMPLATE.into(),
            control: vec!["<|im_start|>".into()],
            user_defined: user_defined.map(String::from).into(),
            bos: None,
            end: "<|im_end|>".into(),
            context_length: 4096,
            replies: TURNS.map(|(after, reply)| Reply::new(after, cut(reply, &user_defined, n_chars))).into(),
        };
        script.write(&model);
        let server = BatonServer::with(&["--model", model.to_str().unwrap(), "--name", "scripted", "--threads", "1"]);
        // The text of the reply is the script, control tokens and all.
        for (after, reply) in TURNS {
            let prompt = json!({ "model": "scripted", "prompt": format!("Hi{after}"), "max_tokens": 500,
                "temperature": temperature });
            let (status, completion) = server.post("/v1/completions", &prompt).await;
            assert_eq!(status, 200, "{completion}");
            assert_eq!(completion["choices"][0]["text"], reply, "{tokenizer:?} {n_chars}");
            assert_eq!(completion["choices"][0]["finish_reason"], "stop");
        }
        let mut messages = vec![json!({ "role": "user", "content": "What do the files say?" })];
        let call = |path: &str| ("read".to_owned(), format!("{{\"path\": \"{path}\"}}"));
        let mut turns = Vec::new();
        for _ in TURNS {
            turns.push(turn(&server, &mut messages, temperature).await);
        }
        let expected = [
            ("I read both files.".to_owned(), vec![call("a/é.txt"), call("b.txt")]),
            (String::new(), vec![call("b.txt")]),
            ("Both files say 😀.\nBoth.".to_owned(), vec![]),
        ];
        assert_eq!(turns, expected, "{tokenizer:?} {n_chars}");
        // After anything else, the reply is empty.
        let unscripted = json!({ "model": "scripted", "prompt": "Hi", "max_tokens": 500 });
        let (_, completion) = server.post("/v1/completions", &unscripted).await;
        assert_eq!(completion["choices"][0]["text"], "", "{completion}");
    }
}
