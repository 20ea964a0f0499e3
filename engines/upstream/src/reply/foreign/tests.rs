//! Every field of replies as servers send them is left out, added to, and given every other type.

use baton_schemas::FinishReason;
use baton_schemas::tools::ToolCallDelta;
use serde_json::json;

use super::*;
use crate::{ApiCall, ApiPath, TextDelta, UpstreamKind};

/// The events of one reply, in the form in which a server sends them.
struct Recorded {
    server: &'static str,
    kind: UpstreamKind,
    events: &'static [&'static str],
}

const RECORDED: [Recorded; 7] = [
    Recorded {
        server: "OpenAI, a stream",
        kind: UpstreamKind::OpenAi,
        events: &[
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","service_tier":"default","system_fingerprint":"fp","choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}],"usage":null,"obfuscation":"x"}"#,
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}],"usage":null}"#,
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"f","arguments":""}}]},"logprobs":null,"finish_reason":null}]}"#,
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\":1}"}}]},"logprobs":null,"finish_reason":null}]}"#,
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls"}]}"#,
            r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12,"prompt_tokens_details":{"cached_tokens":2,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":0,"accepted_prediction_tokens":0}}}"#,
        ],
    },
    Recorded {
        server: "OpenAI, a whole reply",
        kind: UpstreamKind::OpenAi,
        events: &[
            r#"{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hi","refusal":null,"annotations":[],"tool_calls":[{"id":"call_1","type":"function","function":{"name":"f","arguments":"{}"}}]},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12,"prompt_tokens_details":{"cached_tokens":2},"completion_tokens_details":{"reasoning_tokens":0}},"service_tier":"default","system_fingerprint":"fp"}"#,
        ],
    },
    Recorded {
        server: "Mistral, with thinking",
        kind: UpstreamKind::OpenAi,
        events: &[
            r#"{"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":[{"type":"thinking","thinking":[{"type":"text","text":"hm"}]}]},"finish_reason":null}]}"#,
            r#"{"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":[{"type":"text","text":"Hi"}]},"finish_reason":null}]}"#,
            r#"{"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" you"},"finish_reason":"model_length"}],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3}}"#,
        ],
    },
    Recorded {
        server: "vLLM, a stream with reasoning",
        kind: UpstreamKind::Vllm,
        events: &[
            r#"{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}"#,
            r#"{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"reasoning":"hm"},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#,
            r#"{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":null}]}"#,
            r#"{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,"prompt_tokens_details":null}}"#,
        ],
    },
    Recorded {
        server: "llama-server, a plain completion",
        kind: UpstreamKind::LlamaServer,
        events: &[
            r#"{"choices":[{"text":"Hi","index":0,"logprobs":null,"finish_reason":null}],"created":1,"model":"m","system_fingerprint":"b","object":"text_completion","id":"c"}"#,
            r#"{"choices":[{"text":"","index":0,"logprobs":null,"finish_reason":"length"}],"created":1,"model":"m","object":"text_completion","usage":{"completion_tokens":1,"prompt_tokens":9,"total_tokens":10},"id":"c","timings":{"prompt_n":9,"predicted_ms":0.5}}"#,
        ],
    },
    Recorded {
        server: "Ollama, a chat",
        kind: UpstreamKind::Ollama,
        events: &[
            r#"{"model":"m","created_at":"2026-01-01T00:00:00Z","message":{"role":"assistant","content":"","thinking":"hm"},"done":false}"#,
            r#"{"model":"m","created_at":"2026-01-01T00:00:00Z","message":{"role":"assistant","content":"Hi"},"done":false}"#,
            r#"{"model":"m","created_at":"2026-01-01T00:00:00Z","message":{"role":"assistant","content":"","tool_calls":[{"id":"x","function":{"index":0,"name":"f","arguments":{"a":1}}}]},"done":false}"#,
            r#"{"model":"m","created_at":"2026-01-01T00:00:00Z","message":{"role":"assistant","content":""},"done":true,"done_reason":"stop","total_duration":5,"load_duration":1,"prompt_eval_count":9,"prompt_eval_duration":1,"eval_count":3,"eval_duration":1}"#,
        ],
    },
    Recorded {
        server: "Ollama, a plain completion",
        kind: UpstreamKind::Ollama,
        events: &[
            r#"{"model":"m","created_at":"2026-01-01T00:00:00Z","response":"Hi","done":false}"#,
            r#"{"model":"m","created_at":"2026-01-01T00:00:00Z","response":"","done":true,"done_reason":"length","context":[1,2],"prompt_eval_count":9,"eval_count":3}"#,
        ],
    },
];

/// Fields that hold text, calls or the end of a reply, or hold such fields.
const NEEDED: [&str; 20] = [
    "choices",
    "delta",
    "message",
    "content",
    "text",
    "thinking",
    "reasoning",
    "response",
    "refusal",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "finish_reason",
    "done",
    "done_reason",
    "annotations",
    "error",
    "object",
    "index",
];

/// A reply: its text and reasoning, its calls, and its end. `None`: it is no whole reply.
type Whole = Option<(String, Vec<ToolCallDelta>, FinishReason)>;

fn read(kind: UpstreamKind, events: &[Value]) -> Whole {
    let mut reader = kind.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), []));
    let mut out = Vec::new();
    events.iter().try_for_each(|event| reader.read(written(event).as_bytes(), &mut out)).ok()?;
    let end = reader.end(&mut out)?;
    let (mut text, mut calls) = (String::new(), Vec::new());
    for delta in out {
        match delta {
            TextDelta::Text { text: more, .. } => text += &more,
            TextDelta::Reasoning(more) => text += &format!("({more})"),
            TextDelta::Refusal(more) => text += &format!("!{more}"),
            TextDelta::Call(ToolCallDelta::Begin { index, name, .. }) => {
                calls.push(ToolCallDelta::Begin { index, id: String::new(), name });
            }
            TextDelta::Call(step) => calls.push(step),
            TextDelta::LeftOut(_) | TextDelta::Finished(_) => {}
        }
    }
    Some((text, calls, end.reason))
}

/// The place of every value in a tree, as JSON pointers.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    let inside: Vec<(String, &Value)> = match value {
        Value::Object(fields) => fields.iter().map(|(name, field)| (name.clone(), field)).collect(),
        Value::Array(items) => items.iter().enumerate().map(|(index, item)| (index.to_string(), item)).collect(),
        _ => Vec::new(),
    };
    for (name, value) in inside {
        let at = format!("{at}/{name}");
        // The model, and not the server, chooses the fields of arguments.
        if name != "arguments" {
            places(value, &at, found);
        }
        found.push(at);
    }
}

/// The innermost name of a place.
fn field(at: &str) -> &str {
    at.rsplit('/').find(|name| name.parse::<usize>().is_err()).unwrap_or_default()
}

/// The number of a choice.
fn is_choices_number(at: &str) -> bool {
    at.ends_with("/index") && !at.contains("tool_calls")
}

/// A place that nothing depends on: the usage and whatever Baton does not read. An unreadable number of a choice is none, while
/// that of a call is needed.
fn is_aside(at: &str) -> bool {
    let is_ollamas_number = at.ends_with("/function/index");
    is_choices_number(at) || is_ollamas_number || at.starts_with("/usage") || !NEEDED.contains(&field(at))
}

fn with(event: &Value, at: &str, value: Option<Value>) -> Value {
    let mut event = event.clone();
    let (parent, name) = at.rsplit_once('/').unwrap();
    match (event.pointer_mut(parent).unwrap(), value) {
        (Value::Object(fields), Some(value)) => _ = fields.insert(name.to_owned(), value),
        (Value::Object(fields), None) => _ = fields.remove(name),
        (Value::Array(items), Some(value)) => items[name.parse::<usize>().unwrap()] = value,
        (Value::Array(items), None) => _ = items.remove(name.parse().unwrap()),
        _ => unreachable!(),
    }
    event
}

/// Written for what no tree of values can hold.
const HUGE: &str = "<huge>";
const LONG: &str = "<long>";
const HALF: &str = "<half a character>";
const AGAIN: &str = "<again>";

/// An event as a server writes it.
fn written(event: &Value) -> String {
    let json = event.to_string().replace(&json!(HUGE).to_string(), "1e999");
    let json = json.replace(&json!(LONG).to_string(), &"9".repeat(400)).replace(AGAIN, "");
    json.replace(HALF, "\\ud800")
}

fn others() -> [Value; 13] {
    [
        json!(HUGE),
        json!(LONG),
        json!(HALF),
        json!(null),
        json!(true),
        json!(-1),
        json!(7.0),
        json!(1e300),
        json!("7"),
        json!([]),
        json!([7, "x"]),
        json!({}),
        json!({ "x": { "y": [1] } }),
    ]
}

#[test]
fn what_nothing_depends_on_spoils_no_reply() {
    for Recorded { server, kind, events } in RECORDED {
        let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        let whole = read(kind, &events);
        assert!(whole.is_some(), "{server}");
        for (i, event) in events.iter().enumerate() {
            let changed = |event: Value| {
                let mut events = events.clone();
                events[i] = event;
                read(kind, &events)
            };
            let mut all = vec![String::new()];
            places(event, "", &mut all);
            for at in &all {
                // A field that nobody knows, in every object.
                if event.pointer(at).unwrap().is_object() && field(at) != "arguments" {
                    for value in others() {
                        let added = with(event, &format!("{at}/x-new"), Some(value));
                        assert_eq!(changed(added.clone()), whole, "{server}: {added}");
                    }
                    let nameless = with(event, &format!("{at}/{HALF}"), Some(json!(1)));
                    assert_eq!(changed(nameless.clone()), whole, "{server}: {nameless}");
                }
                if at.is_empty() || !is_aside(at) {
                    continue;
                }
                for value in others().map(Some).into_iter().chain([None]) {
                    // Another number is another choice.
                    if is_choices_number(at) && Count::of(value.as_ref()).is_some() {
                        continue;
                    }
                    let other = with(event, at, value);
                    assert_eq!(changed(other.clone()), whole, "{server}: {other}");
                }
                // Items of lists have no names.
                let is_member = event.pointer(at.rsplit_once('/').unwrap().0).unwrap().is_object();
                for value in others().into_iter().filter(|_| is_member) {
                    if is_choices_number(at) && Count::of(Some(&value)).is_some() {
                        continue;
                    }
                    let twice = with(event, &format!("{at}{AGAIN}"), Some(value));
                    assert_eq!(changed(twice.clone()), whole, "{server}: {}", written(&twice));
                }
            }
        }
    }
}

/// A field without its content may be missing in the reply; but what cannot be read is an error, and never other text.
#[test]
fn what_a_reply_rests_on_is_read_or_is_an_error() {
    for Recorded { server, kind, events } in RECORDED {
        let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        let (text, ..) = read(kind, &events).unwrap();
        for (i, event) in events.iter().enumerate() {
            let mut all = Vec::new();
            places(event, "", &mut all);
            for at in all.iter().filter(|at| !is_aside(at)) {
                let before = event.pointer(at).unwrap();
                for value in others() {
                    let is_string_field = before.is_string() || before.is_null();
                    let may_be = matches!(field(at), "arguments") && (value.is_object() || value.is_string())
                        || is_string_field && value.is_string()
                        || before.is_object() && value.is_object()
                        || before.is_boolean() && value.is_boolean()
                        || matches!(field(at), "index" | "annotations" | "error" | "object")
                        || matches!(field(at), "content" | "text" | "thinking" | "response")
                            && (value.is_array() || value.is_string());
                    let is_empty_list = before.is_array() && value == json!({});
                    let is_nothing = value.is_null() || value == json!([]) || value == json!("") || is_empty_list;
                    let mut events = events.clone();
                    events[i] = with(event, at, Some(value.clone()));
                    let read = read(kind, &events);
                    assert!(read.is_none() || may_be || is_nothing, "{server}: {} as {read:?}", events[i]);
                    // Nothing that is no text becomes some.
                    if let Some((other, ..)) = read {
                        let kept = other.replace(['7', 'x', '!'], "");
                        assert!(text.contains(&kept) || is_subsequence(&kept, &text), "{server}: {other}");
                    }
                }
            }
        }
    }
}

fn is_subsequence(part: &str, whole: &str) -> bool {
    let mut rest = whole.chars();
    part.chars().all(|c| rest.any(|other| other == c))
}

#[test]
fn counts_are_read_in_every_form_or_unknown() {
    let count = |json: &str| serde_json::from_str::<Count>(json).unwrap().0;
    for (json, expected) in [
        ("7", Some(7)),
        ("7.0", Some(7)),
        ("\"7\"", Some(7)),
        ("4294967295", Some(u32::MAX)),
        ("4294967296", None),
        ("-1", None),
        ("7.5", None),
        ("1e300", None),
        ("1e999", None),
        ("1e2", Some(100)),
        ("-0", Some(0)),
        ("\"\\u0037 \"", Some(7)),
        ("\"\\ud800\"", None),
        ("\"many\"", None),
        ("null", None),
        ("true", None),
        ("[7]", None),
        ("{\"n\":7}", None),
    ] {
        assert_eq!(count(json), expected, "{json}");
        if let Ok(tree) = serde_json::from_str::<Value>(json) {
            assert_eq!(Count::of(Some(&tree)), expected, "{json} in a tree");
        }
    }
    assert_eq!(count(&"9".repeat(400)), None);
}
