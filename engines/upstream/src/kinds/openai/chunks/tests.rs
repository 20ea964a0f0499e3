use serde_json::{Value, json};

use super::*;

/// The deltas and the end of a reply with these chunks.
fn read(chunks: &[Value]) -> Result<(Vec<TextDelta>, Option<TextEnd>), UpstreamError> {
    let mut reader = ChunkReader::default();
    let mut out = Vec::new();
    for chunk in chunks {
        reader.read(chunk.to_string().as_bytes(), &mut out)?;
    }
    let end = reader.end(&mut out);
    Ok((out, end))
}

fn delta(delta: Value) -> Value {
    json!({ "choices": [{ "index": 0, "delta": delta, "finish_reason": null }] })
}

fn finish(reason: &str) -> Value {
    json!({ "choices": [{ "delta": {}, "finish_reason": reason }] })
}

fn text(text: &str) -> TextDelta {
    TextDelta::Text { text: text.into(), tokens: Vec::new() }
}

fn begin(index: u32, id: &str, name: &str) -> TextDelta {
    TextDelta::Call(ToolCallDelta::Begin { index, id: id.into(), name: name.into() })
}

fn arguments(index: u32, fragment: &str) -> TextDelta {
    TextDelta::Call(ToolCallDelta::Arguments { index, fragment: fragment.into() })
}

fn end_of_call(index: u32) -> TextDelta {
    TextDelta::Call(ToolCallDelta::End { index })
}

#[test]
fn text_reasoning_and_usage_are_read() {
    let usage = json!({
        "choices": [],
        "usage": { "prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": { "cached_tokens": 4 } },
    });
    let (deltas, end) = read(&[
        delta(json!({ "role": "assistant", "content": "" })),
        delta(json!({ "reasoning_content": "hm" })),
        delta(json!({ "reasoning": "m", "content": null })),
        delta(json!({ "content": "Hi" })),
        finish("stop"),
        usage,
    ])
    .unwrap();
    assert_eq!(deltas, [TextDelta::Reasoning("hm".into()), TextDelta::Reasoning("m".into()), text("Hi")]);
    let end = end.unwrap();
    assert_eq!((end.reason, end.usage.n_prompt, end.usage.n_cached), (FinishReason::Stop, Some(9), Some(4)));
}

#[test]
fn a_reply_without_a_reason_has_no_end() {
    let (_, end) = read(&[delta(json!({ "content": "Hi" }))]).unwrap();
    assert_eq!(end, None);
}

#[test]
fn calls_are_separated_however_they_are_numbered() {
    let piece = |index: Value, id: Value, name: Value, arguments: &str| {
        delta(
            json!({ "tool_calls": [{ "index": index, "id": id, "function": { "name": name, "arguments": arguments } }] }),
        )
    };
    let expected = [
        begin(0, "a", "f"),
        arguments(0, "{"),
        arguments(0, "}"),
        end_of_call(0),
        begin(1, "b", "g"),
        arguments(1, "{}"),
        end_of_call(1),
    ];
    let null = Value::Null;
    for (first, second) in [(json!(0), json!(1)), (json!(0), json!(0)), (null.clone(), null.clone())] {
        let (deltas, end) = read(&[
            piece(first.clone(), json!("a"), json!("f"), "{"),
            piece(first.clone(), null.clone(), null.clone(), "}"),
            piece(second, json!("b"), json!("g"), "{}"),
            finish("stop"),
        ])
        .unwrap();
        assert_eq!(deltas, expected);
        assert_eq!(end.unwrap().reason, FinishReason::ToolCalls);
    }
    // The id and the name in every piece.
    let (deltas, _) = read(&[
        piece(json!(0), json!("a"), json!("f"), "{"),
        piece(json!(0), json!("a"), json!("f"), "}"),
        finish("length"),
    ])
    .unwrap();
    assert_eq!(deltas, expected[..3], "cut off, so it does not end");
    assert!(read(&[piece(json!(0), null.clone(), null, "{")]).is_err(), "no call has begun");
}

#[test]
fn a_whole_reply_is_read_as_one_chunk() {
    let whole = |message: Value, reason: &str| {
        json!({
            "object": "chat.completion", "choices": [{ "index": 0, "message": message, "finish_reason": reason }],
            "usage": { "prompt_tokens": 9, "completion_tokens": 2 },
        })
    };
    let said = json!({ "role": "assistant", "content": "Hi \"you\"", "reasoning_content": "hm", "private": 1 });
    let (deltas, end) = read(&[whole(said, "length")]).unwrap();
    assert_eq!(deltas, [TextDelta::Reasoning("hm".into()), text("Hi \"you\"")]);
    let end = end.unwrap();
    assert_eq!((end.reason, end.usage.n_prompt, end.usage.n_completion), (FinishReason::Length, Some(9), Some(2)));
    let call = |id: &str, name: &str| json!({ "id": id, "function": { "name": name, "arguments": "{}" } });
    let called = json!({ "content": null, "tool_calls": [call("a", "f"), call("b", "g")] });
    let (deltas, end) = read(&[whole(called, "tool_calls")]).unwrap();
    let calls = |index, id, name| [begin(index, id, name), arguments(index, "{}"), end_of_call(index)];
    assert_eq!(deltas, [calls(0, "a", "f"), calls(1, "b", "g")].concat());
    assert_eq!(end.unwrap().reason, FinishReason::ToolCalls);
    let plain = json!({ "choices": [{ "text": "Hi", "finish_reason": "stop" }] });
    assert_eq!(read(&[plain]).unwrap().0, [text("Hi")]);
}

#[test]
fn log_probabilities_are_read_if_they_were_requested() {
    let chunk =
        |logprobs: Value| json!({ "choices": [{ "delta": { "content": "A" }, "logprobs": logprobs }] }).to_string();
    let read = |wants, logprobs| {
        let mut out = Vec::new();
        ChunkReader::new(wants).read(chunk(logprobs).as_bytes(), &mut out).map(|()| out)
    };
    let good = json!({ "content": [{ "token": "A", "logprob": -0.5 }] });
    let deltas = read(true, good.clone()).unwrap();
    assert!(matches!(&deltas[..], [TextDelta::Text { tokens, .. }] if tokens[0].logprobs.chosen == -0.5), "{deltas:?}");
    assert!(read(true, json!("many")).is_err());
    assert_eq!((read(false, good).unwrap(), read(false, json!("many")).unwrap()), (vec![text("A")], vec![text("A")]));
}

#[test]
fn errors_and_invalid_events_are_errors() {
    for event in [json!({ "error": { "message": "x" } }), json!({ "object": "error", "message": "x" }), json!([1])] {
        assert!(read(std::slice::from_ref(&event)).is_err(), "{event}");
    }
    assert!(ChunkReader::default().read(b"{", &mut Vec::new()).is_err());
}

#[test]
fn a_message_is_read_of_a_whole_reply_and_not_at_the_end_of_a_stream() {
    let message = json!({ "choices": [{ "message": { "content": "Hi" }, "finish_reason": "stop" }] });
    assert_eq!(read(std::slice::from_ref(&message)).unwrap().0, [text("Hi")]);
    let (deltas, end) = read(&[delta(json!({ "content": "Hi" })), message]).unwrap();
    assert_eq!((deltas, end.unwrap().reason), (vec![text("Hi")], FinishReason::Stop));
    let both = json!({ "choices": [{ "delta": { "content": "Hi" }, "message": null, "finish_reason": null }] });
    assert_eq!(read(&[both]).unwrap().0, [text("Hi")]);
}

/// Each event is read in the same way after others as by a reader that knows no other.
#[test]
fn an_event_means_the_same_whatever_came_before_it() {
    let chunk = |content: &str| {
        format!(r#"{{"id":"a","choices":[{{"index":0,"delta":{{"content":{content}}},"finish_reason":null}}],"x":1}}"#)
    };
    let mut events: Vec<Vec<u8>> = [
        r#""a""#,
        r#""""#,
        r#"" grün 🦀""#,
        r#""a\"b""#,
        r#""\u0041""#,
        r#""\\""#,
        r#""a","content":"b""#,
        "null",
        "7",
        r#""a","tool_calls":[]"#,
        r#""a","reasoning":"r""#,
        r#""a"},"logprobs":{"content":[]},"y":{"z":1"#,
        r#""\""#,
    ]
    .map(|content| chunk(content).into_bytes())
    .into();
    events.push(chunk("\"a\u{1}\"").into_bytes());
    events.push(chunk("\"aXa\"").into_bytes().iter().map(|&b| if b == b'X' { 0xFF } else { b }).collect());
    events.push(chunk(r#""a""#).replace("null", r#""stop""#).into_bytes());
    events.push(chunk(r#""a""#).replace("null", r#""""#).into_bytes());
    events.push(br#"{"choices":[{"text":"a"}]}"#.to_vec());
    events.push(br#"{"choices":[{"text":"b"}],"usage":{"prompt_tokens":3}}"#.to_vec());
    events.push(br#"{"object":"error","choices":[{"text":"b"}]}"#.to_vec());
    let read = |before: &[&[u8]], event: &[u8]| {
        let mut reader = ChunkReader::default();
        before.iter().for_each(|event| drop(reader.read(event, &mut Vec::new())));
        let mut out = Vec::new();
        let read = reader.read(event, &mut out).map_err(|error| error.to_string());
        (read, out)
    };
    for event in &events {
        let expected = read(&[], event);
        for before in &events {
            let has_ended = read(&[], before).0.is_err() || String::from_utf8_lossy(before).contains("tool_calls");
            if !has_ended {
                let text = String::from_utf8_lossy(event);
                assert_eq!(read(&[before], event), expected, "{text} after {}", String::from_utf8_lossy(before));
            }
        }
    }
    let mut reader = ChunkReader::default();
    reader.read(&events[0], &mut Vec::new()).unwrap();
    assert_eq!(reader.text_chunk.text(&events[2]), Some(" grün 🦀"), "it is not parsed");
    assert_eq!(reader.text_chunk.text(&events[3]), None);
}
