//! The families of models that people run, as tiny models with the family's chat template, its control tokens and its
//! rules for words. A scripted reply with reasoning and calls reaches the client of every dialect the same, whatever its
//! tokens are.
//!
//! The unit tests of `baton-reply` cut the replies at every place; here are tokens of one character and of several.

use std::path::{Path, PathBuf};

use harness::{BatonServer, skip};
use serde_json::{Value, json};
use tiny_gguf::scripted::{Reply, Script, Tokenizer, cut};

struct Family {
    template: &'static str,
    /// The name of the rules for words; `None`: a vocabulary of SentencePiece.
    pre: Option<&'static str>,
    control: &'static [&'static str],
    user_defined: &'static [&'static str],
    bos: Option<&'static str>,
    end: &'static str,
    /// The last token of the prompt.
    after: &'static str,
    reply: &'static str,
    thinks: bool,
    text: &'static str,
    n_calls: usize,
}

const DEFAULT: Family = Family {
    template: "",
    pre: None,
    control: &[],
    user_defined: &[],
    bos: None,
    end: "",
    after: "\n",
    reply: "",
    thinks: false,
    text: "I look.",
    n_calls: 2,
};

const FAMILIES: [Family; 8] = [
    Family {
        template: "qwen3-coder",
        pre: Some("qwen2"),
        control: &["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        user_defined: &["<tool_call>", "</tool_call>"],
        end: "<|im_end|>",
        reply: "I look.\n\n<tool_call>\n<function=look>\n<parameter=place>\nKöln 😀\n</parameter>\n<parameter=days>\n3\n\
            </parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        ..DEFAULT
    },
    Family {
        template: "gpt-oss",
        pre: Some("gpt-4o"),
        control: &[
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
            "<|constrain|>",
            "<|return|>",
            "<|call|>",
            "<|endoftext|>",
        ],
        bos: Some("<|startoftext|>"),
        end: "<|return|>",
        after: "t",
        reply: "<|channel|>analysis<|message|>Köln? I look.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.\
            <|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>\
            {\"place\": \"Köln 😀\", \"days\": 3}<|call|>",
        thinks: true,
        n_calls: 1,
        ..DEFAULT
    },
    Family {
        template: "gemma-3",
        control: &["<eos>", "<start_of_turn>", "<end_of_turn>"],
        bos: Some("<bos>"),
        end: "<end_of_turn>",
        reply: "I look.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"place\": \"Köln 😀\", \"days\": 3}}\n</tool_call>\n\
            <tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>",
        ..DEFAULT
    },
    Family {
        template: "llama-3.1",
        pre: Some("llama-bpe"),
        control: &["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
        bos: Some("<|begin_of_text|>"),
        end: "<|eot_id|>",
        reply: "<|python_tag|>{\"name\": \"look\", \"parameters\": {\"place\": \"Köln 😀\", \"days\": 3}}",
        text: "",
        n_calls: 1,
        ..DEFAULT
    },
    Family {
        template: "llama-4",
        pre: Some("llama4"),
        control: &["<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>", "<|python_end|>"],
        bos: Some("<|begin_of_text|>"),
        end: "<|eot|>",
        reply: "<|python_start|>I look.<|python_end|>{\"name\": \"look\", \"parameters\": {\"place\": \"Köln 😀\", \"days\": 3}}\
            {\"name\": \"stop\", \"parameters\": {}}",
        ..DEFAULT
    },
    Family {
        template: "mistral-small-3.2",
        pre: Some("tekken"),
        control: &["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        bos: Some("<s>"),
        end: "</s>",
        after: "[/INST]",
        reply: "I look.[TOOL_CALLS]look[CALL_ID]a1B2c3D4e[ARGS]{\"place\": \"Köln 😀\", \"days\": 3}[TOOL_CALLS]stop[ARGS]{}",
        ..DEFAULT
    },
    Family {
        template: "mistral-nemo",
        pre: Some("tekken"),
        control: &["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"],
        bos: Some("<s>"),
        end: "</s>",
        after: "[/INST]",
        reply: "[TOOL_CALLS][{\"name\": \"look\", \"arguments\": {\"place\": \"Köln 😀\", \"days\": 3}}, \
            {\"name\": \"stop\", \"arguments\": {}}]",
        text: "",
        ..DEFAULT
    },
    Family {
        template: "deepseek-v3.1",
        pre: Some("deepseek-v3"),
        control: &[
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ],
        user_defined: &["<think>", "</think>"],
        bos: Some("<｜begin▁of▁sentence｜>"),
        end: "<｜end▁of▁sentence｜>",
        after: "<think>",
        reply: "Köln? I look.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>\
            {\"place\": \"Köln 😀\", \"days\": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜>\
            <｜tool▁calls▁end｜>",
        thinks: true,
        ..DEFAULT
    },
];

impl Family {
    /// The chat template, from the repository or from the packages of the client tests. On a machine without these the
    /// test is skipped; under CI it fails.
    fn template(&self) -> Option<String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = format!("{}.jinja", self.template);
        let folders: [PathBuf; 2] =
            ["tests/fixtures/templates", "target/clients-node/templates"].map(|at| root.join(at));
        let found = folders.iter().find_map(|folder| std::fs::read_to_string(folder.join(&file)).ok());
        if found.is_none() {
            skip(&format!("there is no template {file}: `scripts/run-clients.sh prepare` fetches it"));
        }
        found
    }

    /// Serves a model whose reply has tokens of `n_chars` characters.
    fn serve(&self, folder: &Path, n_chars: usize) -> Option<BatonServer> {
        let owned = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        let special = [self.control, self.user_defined].concat();
        let script = Script {
            tokenizer: self.pre.map_or(Tokenizer::SentencePiece, |pre| Tokenizer::BytePairs { pre: pre.into() }),
            template: self.template()?,
            control: owned(self.control),
            user_defined: owned(self.user_defined),
            bos: self.bos.map(Into::into),
            end: self.end.into(),
            context_length: 65_536,
            replies: vec![Reply::new(self.after, cut(self.reply, &special, n_chars))],
        };
        let model = folder.join(format!("{}.gguf", self.template));
        script.write(&model);
        Some(BatonServer::with(&["--model", model.to_str().unwrap(), "--name", "m", "--threads", "1"]))
    }

    fn expected(&self) -> Said {
        let look = ("look".to_owned(), json!({ "place": "Köln 😀", "days": 3 }));
        let calls = [look, ("stop".to_owned(), json!({}))].into_iter().take(self.n_calls).collect();
        let reasoning = if self.thinks { "Köln? I look." } else { "" };
        Said { reasoning: reasoning.into(), text: self.text.into(), calls }
    }
}

/// A reply, as its client reads it.
#[derive(Debug, Default, PartialEq)]
struct Said {
    reasoning: String,
    text: String,
    calls: Vec<(String, Value)>,
}

impl Said {
    fn call(&mut self, name: &Value, arguments: &str) {
        let arguments = serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{error}: {arguments}"));
        self.calls.push((name.as_str().unwrap().to_owned(), arguments));
    }
}

fn tools() -> [(&'static str, Value); 2] {
    let look = json!({ "type": "object", "required": ["place"], "properties": {
        "place": { "type": "string" }, "days": { "type": "integer" } } });
    [("look", look), ("stop", json!({ "type": "object", "properties": {} }))]
}

const ASK: &str = "What is in Köln?";

#[derive(Debug, Clone, Copy)]
enum Dialect {
    Chat,
    Responses,
    Messages,
    Ollama,
}

impl Dialect {
    const ALL: [Dialect; 4] = [Dialect::Chat, Dialect::Responses, Dialect::Messages, Dialect::Ollama];

    fn path(self) -> &'static str {
        match self {
            Dialect::Chat => "/v1/chat/completions",
            Dialect::Responses => "/v1/responses",
            Dialect::Messages => "/v1/messages",
            Dialect::Ollama => "/api/chat",
        }
    }

    fn body(self, thinks: bool) -> Value {
        let function = |(name, parameters)| json!({ "type": "function", "function": { "name": name, "description": "It helps.", "parameters": parameters } });
        let messages = json!([{ "role": "user", "content": ASK }]);
        match self {
            Dialect::Chat => json!({ "messages": messages, "tools": tools().map(function), "enable_thinking": thinks }),
            Dialect::Responses => {
                let flat = |(name, parameters)| json!({ "type": "function", "name": name, "parameters": parameters, "strict": false });
                let effort = if thinks { "medium" } else { "none" };
                json!({ "input": messages, "tools": tools().map(flat), "reasoning": { "effort": effort } })
            }
            Dialect::Messages => {
                let tool = |(name, schema)| json!({ "name": name, "input_schema": schema });
                let kind = if thinks { "enabled" } else { "disabled" };
                let thinking = json!({ "type": kind, "budget_tokens": 1024 });
                json!({ "messages": messages, "tools": tools().map(tool), "max_tokens": 2000, "thinking": thinking })
            }
            Dialect::Ollama => json!({ "messages": messages, "tools": tools().map(function), "think": thinks }),
        }
    }

    async fn ask(self, server: &BatonServer, body: &Value, stream: bool) -> Said {
        let mut body = body.clone();
        (body["model"], body["stream"]) = (json!("m"), json!(stream));
        let call = reqwest::Client::new().post(format!("{}{}", server.base, self.path())).json(&body);
        let reply = call.send().await.unwrap();
        let (status, text) = (reply.status(), reply.text().await.unwrap());
        assert_eq!(status, 200, "{self:?}: {text}");
        let lines =
            text.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line)).filter(|line| line.starts_with('{'));
        let events: Vec<Value> = match stream {
            true => lines.map(|line| serde_json::from_str(line).unwrap()).collect(),
            false => vec![serde_json::from_str(&text).unwrap()],
        };
        let mut said = Said::default();
        match (self, stream) {
            (Dialect::Chat, _) => chat(&events, &mut said),
            (Dialect::Responses, true) => response(&events.last().unwrap()["response"], &mut said),
            (Dialect::Responses, false) => response(&events[0], &mut said),
            (Dialect::Messages, true) => message_events(&events, &mut said),
            (Dialect::Messages, false) => message(&events[0], &mut said),
            (Dialect::Ollama, _) => ollama(&events, &mut said),
        }
        said
    }
}

fn chat(events: &[Value], said: &mut Said) {
    let mut calls: Vec<(Value, String)> = Vec::new();
    for choice in events.iter().map(|event| &event["choices"][0]) {
        let part = if choice["message"].is_object() { &choice["message"] } else { &choice["delta"] };
        said.reasoning += part["reasoning_content"].as_str().unwrap_or_default();
        said.text += part["content"].as_str().unwrap_or_default();
        for call in part["tool_calls"].as_array().into_iter().flatten() {
            let function = &call["function"];
            if function["name"].is_string() {
                calls.push((function["name"].clone(), String::new()));
            }
            calls.last_mut().unwrap().1 += function["arguments"].as_str().unwrap();
        }
    }
    calls.iter().for_each(|(name, arguments)| said.call(name, arguments));
}

fn response(response: &Value, said: &mut Said) {
    for item in response["output"].as_array().unwrap() {
        let text = item["content"][0]["text"].as_str().unwrap_or_default();
        match item["type"].as_str().unwrap() {
            "reasoning" => said.reasoning += text,
            "message" => said.text += text,
            _ => said.call(&item["name"], item["arguments"].as_str().unwrap()),
        }
    }
}

fn message(message: &Value, said: &mut Said) {
    for block in message["content"].as_array().unwrap() {
        match block["type"].as_str().unwrap() {
            "thinking" => said.reasoning += block["thinking"].as_str().unwrap(),
            "text" => said.text += block["text"].as_str().unwrap(),
            _ => said.call(&block["name"], &block["input"].to_string()),
        }
    }
}

fn message_events(events: &[Value], said: &mut Said) {
    let mut calls: Vec<(Value, String)> = Vec::new();
    for event in events {
        let (block, delta) = (&event["content_block"], &event["delta"]);
        if block["type"] == "tool_use" {
            calls.push((block["name"].clone(), String::new()));
        }
        said.reasoning += delta["thinking"].as_str().unwrap_or_default();
        said.text += delta["text"].as_str().unwrap_or_default();
        if let Some(json) = delta["partial_json"].as_str() {
            calls.last_mut().unwrap().1 += json;
        }
    }
    let whole = |arguments: &String| if arguments.is_empty() { "{}".to_owned() } else { arguments.clone() };
    calls.iter().for_each(|(name, arguments)| said.call(name, &whole(arguments)));
}

fn ollama(lines: &[Value], said: &mut Said) {
    for message in lines.iter().map(|line| &line["message"]) {
        said.reasoning += message["thinking"].as_str().unwrap_or_default();
        said.text += message["content"].as_str().unwrap_or_default();
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            said.call(&call["function"]["name"], &call["function"]["arguments"].to_string());
        }
    }
}

/// A conversation as agents have it: two calls at once, a user's text after their results, a system message after that.
fn agents_history() -> Value {
    let call = |id: &str, name: &str, arguments: &str| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
    json!([
        { "role": "developer", "content": "Be brief." },
        { "role": "user", "content": "We are in Köln." },
        { "role": "user", "content": ASK },
        { "role": "assistant", "content": null, "reasoning_content": "Hm.", "tool_calls": [
            call("call_1", "look", "{\"place\": \"Köln\"}"), call("call_2", "stop", "{}")] },
        { "role": "tool", "tool_call_id": "call_1", "content": "first result" },
        { "role": "tool", "tool_call_id": "call_2", "content": "second result" },
        { "role": "user", "content": "Go on." },
        { "role": "system", "content": "One day is left." },
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn every_dialect_gets_the_same_reasoning_text_and_calls_from_every_family() {
    let folder = tempfile::tempdir().unwrap();
    for (family, n_chars) in FAMILIES.iter().flat_map(|family| [(family, 1), (family, 6)]) {
        let Some(server) = family.serve(folder.path(), n_chars) else { continue };
        for dialect in Dialect::ALL {
            for stream in [true, false] {
                let said = dialect.ask(&server, &dialect.body(family.thinks), stream).await;
                let what = format!("{}, tokens of {n_chars}, {dialect:?}, streamed: {stream}", family.template);
                assert_eq!(said, family.expected(), "{what}");
            }
        }
        let mut history = Dialect::Chat.body(family.thinks);
        history["messages"] = agents_history();
        Dialect::Chat.ask(&server, &history, false).await;
        let (status, prompt) = server.post("/apply-template", &history).await;
        assert_eq!(status, 200, "{prompt}");
        let prompt = prompt["prompt"].as_str().unwrap();
        let words =
            ["Be brief.", "We are in Köln.", ASK, "first result", "second result", "Go on.", "One day is left."];
        for word in words {
            assert_eq!(prompt.matches(word).count(), 1, "{}: {word} in {prompt}", family.template);
        }
        if n_chars > 1 {
            takes_the_first_requests_of_agents(&server, family.template).await;
        }
    }
}

/// Every template renders what agents send first: late and repeated system messages, and nested schemas.
async fn takes_the_first_requests_of_agents(server: &BatonServer, template: &str) {
    // The place in the reply that tells the size of the prompt: its tokens, or its text.
    for (agent, path, prompt) in [
        ("claude-code", "/v1/messages/count_tokens?beta=true", "/input_tokens"),
        ("codex", "/v1/responses", "/usage/input_tokens"),
        ("opencode", "/apply-template", "/prompt"),
    ] {
        let file = format!("{}/tests/fixtures/agents/{agent}.json", env!("CARGO_MANIFEST_DIR"));
        let mut body: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        body["stream"] = json!(false);
        if path == "/v1/responses" {
            body["max_output_tokens"] = json!(16);
        }
        let (status, reply) = server.post(path, &body).await;
        assert_eq!(status, 200, "{agent} on {template}: {reply}");
        match reply.pointer(prompt).unwrap_or_else(|| panic!("{agent} on {template}: {reply}")) {
            Value::String(text) => assert!(text.contains("todowrite"), "{agent} on {template}: {text}"),
            // Nearly each byte is a token of these vocabularies.
            n_tokens => assert!(n_tokens.as_u64().unwrap() > 1_000, "{agent} on {template}: {reply}"),
        }
    }
}
