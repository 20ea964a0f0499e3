use baton_schemas::tools::ToolCallDelta;
use serde_json::{Value, json};

use super::*;
use crate::UpstreamFailure;

mod calls;
mod fields;

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
        r#""a","tool_calls":{}"#,
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
    assert_eq!(read(&[], chunk(r#""a","tool_calls":{}"#).as_bytes()), (Ok(()), vec![text("a")]));
    assert!(read(&[], chunk(r#""a","tool_calls":{"b":1}"#).as_bytes()).0.is_err());
}

/// A piece of a call of a stream.
fn piece(index: Value, id: Value, name: Value, arguments: Value) -> Value {
    json!({ "index": index, "id": id, "function": { "name": name, "arguments": arguments } })
}

fn calls(pieces: &[Value]) -> Value {
    delta(json!({ "tool_calls": pieces }))
}

/// The calls of a reply, each as `name(arguments)`, with `…` if it is left open. Checks that they follow one another, have
/// different ids, and are numbered.
fn called(chunks: &[Value]) -> String {
    let (deltas, _) = read(chunks).unwrap();
    let (mut shown, mut ids, mut n_ended) = (String::new(), std::collections::BTreeSet::new(), 0);
    for delta in deltas {
        let TextDelta::Call(step) = delta else { continue };
        match step {
            ToolCallDelta::Begin { index, id, name } => {
                assert!(index == n_ended && ids.insert(id), "{shown}");
                shown += &format!("{name}(");
            }
            ToolCallDelta::Arguments { index, fragment } => {
                assert_eq!(index, n_ended, "{shown}");
                shown += &fragment;
            }
            ToolCallDelta::End { index } => {
                assert_eq!(index, n_ended, "{shown}");
                n_ended += 1;
                shown += ")";
            }
        }
    }
    if ids.len() > n_ended as usize { shown + "…" } else { shown }
}

#[test]
fn streamed_calls_are_put_together_by_their_numbers() {
    let null = Value::Null;
    let begin = |index: u32, name: &str, arguments: &str| {
        piece(json!(index), json!(format!("id{index}")), json!(name), json!(arguments))
    };
    let more = |index: u32, arguments: &str| piece(json!(index), null.clone(), null.clone(), json!(arguments));
    let whole = "f({\"a\":1})g({\"b\":2})";
    let interleaved = [
        calls(&[begin(0, "f", "{\"a\":")]),
        calls(&[begin(1, "g", "{\"b\":")]),
        calls(&[more(0, "1}")]),
        calls(&[more(1, "2}")]),
        finish("tool_calls"),
    ];
    assert_eq!(called(&interleaved), whole);
    let at_once = [
        calls(&[begin(0, "f", ""), begin(1, "g", "")]),
        calls(&[more(1, "{\"b\":2}"), more(0, "{\"a\":1}")]),
        finish("tool_calls"),
    ];
    assert_eq!(called(&at_once), whole);
    // Without numbers, those of one event have different places.
    let unnumbered = |name: &str, arguments: &str| piece(null.clone(), null.clone(), json!(name), json!(arguments));
    let places = [
        calls(&[unnumbered("f", "{\"a\":"), unnumbered("g", "{\"b\":")]),
        calls(&[unnumbered("f", "1}"), unnumbered("g", "2}")]),
        finish("stop"),
    ];
    assert_eq!(called(&places), whole);
    // The name in every piece, without an id or with an empty one.
    let named =
        |index: u32, id: Value, name: &str, arguments: &str| piece(json!(index), id, json!(name), json!(arguments));
    let names = [
        calls(&[named(0, null.clone(), "f", "{\"a\":")]),
        calls(&[named(0, null.clone(), "f", "1}")]),
        calls(&[named(1, json!(""), "g", "{\"b\":")]),
        calls(&[named(1, json!(""), "g", "2}")]),
        finish("tool_calls"),
    ];
    assert_eq!(called(&names), whole);
    let ids = [
        calls(&[begin(0, "f", "{\"a\":")]),
        calls(&[piece(json!(0), json!("other"), null.clone(), json!("1}"))]),
        calls(&[begin(1, "g", "{\"b\":2}")]),
        finish("tool_calls"),
    ];
    assert_eq!(called(&ids), whole);
    // Whole calls that all have number 0 and no id, or the same.
    for id in [null.clone(), json!("id")] {
        let same = [
            calls(&[named(0, id.clone(), "f", "{\"a\":1}")]),
            calls(&[named(0, id.clone(), "f", "{\"a\":2}")]),
            finish("tool_calls"),
        ];
        assert_eq!(called(&same), "f({\"a\":1})f({\"a\":2})");
    }
    // The id, then the name; the older form; no arguments.
    let slow = [
        calls(&[piece(json!(0), json!("id"), null.clone(), null.clone())]),
        calls(&[piece(json!(0), null.clone(), json!("f"), null.clone())]),
        calls(&[more(0, "{\"a\":1}")]),
        finish("tool_calls"),
    ];
    assert_eq!(called(&slow), "f({\"a\":1})");
    let older = |function: Value| delta(json!({ "function_call": function }));
    let older = [older(json!({ "name": "f" })), older(json!({ "arguments": "{\"a\":1}" })), finish("function_call")];
    assert_eq!(called(&older), "f({\"a\":1})");
    assert_eq!(called(&[calls(&[begin(0, "f", ""), begin(1, "g", "")]), finish("stop")]), "f({})g({})");
    // The first call streams while it is made.
    let (deltas, _) = read(&interleaved[..1]).unwrap();
    let expected = [
        TextDelta::Call(ToolCallDelta::Begin { index: 0, id: "id0".into(), name: "f".into() }),
        arguments(0, "{\"a\":"),
    ];
    assert_eq!(deltas, expected);
}

#[test]
fn a_call_is_one_however_its_name_and_ids_are_repeated() {
    let part = |index: Value, id: &str, name: &str, arguments: &str| {
        calls(&[piece(index, json!(id), json!(name), json!(arguments))])
    };
    let of = |parts: &[(&str, &str, &str)], index: Value| {
        let chunks = parts.iter().map(|(id, name, arguments)| part(index.clone(), id, name, arguments));
        called(&chunks.chain([finish("tool_calls")]).collect::<Vec<_>>())
    };
    for index in [json!(0), json!(null)] {
        let of = |parts: &[(&str, &str, &str)]| of(parts, index.clone());
        assert_eq!(of(&[("a", "f", "{\"a\":"), ("b", "f", "1"), ("c", "f", "}")]), "f({\"a\":1})");
        assert_eq!(of(&[("a", "f", ""), ("b", "f", "{\"a\":"), ("c", "f", "1}")]), "f({\"a\":1})");
        // After whole arguments another one begins.
        assert_eq!(of(&[("a", "f", "{\"a\":1}"), ("b", "f", ""), ("b", "f", "{}")]), "f({\"a\":1})f({})");
        assert_eq!(of(&[("a", "f", ""), ("b", "g", "")]), "f({})g({})");
        // So does one after a call that has none, if it has none either.
        assert_eq!(of(&[("a", "f", ""), ("b", "f", "")]), "f({})f({})");
        assert_eq!(of(&[("a", "f", ""), ("b", "f", " "), ("c", "f", "")]), "f({})f({})f({})");
        assert_eq!(of(&[("a", "f", ""), ("a", "f", "")]), "f({})");
        assert_eq!(of(&[("a", "f", "{}"), ("b", "f", ""), ("c", "f", "")]), "f({})f({})f({})");
        assert_eq!(of(&[("a", "", ""), ("b", "f", ""), ("b", "", "{}")]), "f({})");
        // Until arguments follow, under another id: all were pieces of one call.
        let one = "f({\"x\":1})";
        assert_eq!(of(&[("a", "f", ""), ("b", "f", "{\"x\":1}")]), one);
        assert_eq!(of(&[("a", "f", ""), ("b", "f", ""), ("c", "f", "{\"x\":1}")]), one);
        assert_eq!(of(&[("a", "f", " "), ("b", "f", ""), ("c", "f", "{\"x\""), ("d", "f", ":1}")]), one);
        assert_eq!(of(&[("a", "f", "{}"), ("b", "f", ""), ("c", "f", ""), ("d", "f", "{}")]), "f({})f({})");
        // An id that comes again is its call's.
        let two = "f({})f({\"x\":1})";
        assert_eq!(of(&[("a", "f", ""), ("b", "f", ""), ("b", "f", "{\"x\":1}")]), two);
        assert_eq!(of(&[("a", "f", ""), ("b", "f", ""), ("b", "", "{\"x\":1}")]), two);
        assert_eq!(of(&[("a", "f", ""), ("a", "f", ""), ("b", "f", "{\"x\":1}")]), two);
        assert_eq!(of(&[("a", "get_", ""), ("a", "weather", ""), ("a", "", "{}")]), "get_weather({})");
    }
    assert_eq!(of(&[("a", "get_", ""), ("", "weather", ""), ("", "", "{}")], json!(0)), "get_weather({})");
    assert_eq!(of(&[("", "get_", ""), ("", "weather", "{}")], json!(0)), "get_weather({})");
    assert_eq!(of(&[("", "f", ""), ("", "f", "{}")], json!(0)), "f({})");
    // Pieces of one event are of different calls.
    let at_once = ["a", "b"].map(|id| piece(json!(0), json!(id), json!("f"), json!("")));
    assert_eq!(called(&[calls(&at_once), finish("stop")]), "f({})f({})");
    let long = vec![part(json!(0), "a", &"n".repeat(1_000), ""), part(json!(0), "a", &"m".repeat(1_000), "")];
    assert!(read(&long).unwrap_err().to_string().contains("too long"));
}

#[test]
fn calls_are_in_the_order_of_their_numbers_unless_a_later_one_streams_already() {
    let begin = |index: u32, name: &str, arguments: &str| {
        piece(json!(index), json!(format!("id{index}")), json!(name), json!(arguments))
    };
    let more = |index: u32, arguments: &str| piece(json!(index), json!(null), json!(null), json!(arguments));
    let of = |events: &[&[Value]]| {
        let chunks = events.iter().map(|pieces| calls(pieces)).chain([finish("tool_calls")]);
        called(&chunks.collect::<Vec<_>>())
    };
    assert_eq!(of(&[&[begin(1, "g", "{}"), begin(0, "f", "{}")]]), "f({})g({})");
    assert_eq!(of(&[&[begin(1, "g", "")], &[begin(0, "f", "")], &[more(1, "{}")], &[more(0, "{}")]]), "f({})g({})");
    assert_eq!(of(&[&[begin(1, "g", "{")], &[begin(0, "f", "{}")], &[more(1, "}")]]), "g({})f({})");
    assert_eq!(
        of(&[&[begin(0, "f", "{")], &[begin(2, "h", "{}")], &[begin(1, "g", "{}")], &[more(0, "}")]]),
        "f({})g({})h({})"
    );
    let message = json!({ "tool_calls": [begin(2, "h", "{}"), begin(0, "f", "{}"), begin(1, "g", "")] });
    let whole = json!({ "choices": [{ "message": message, "finish_reason": "tool_calls" }] });
    assert_eq!(called(&[whole]), "f({})g({})h({})");
}

#[test]
fn the_worst_of_several_reasons_counts() {
    let end = |first: &str, second: &str| {
        read(&[delta(json!({ "content": "Hi" })), finish(first), finish(second)]).unwrap().1.unwrap().reason
    };
    assert_eq!(end("content_filter", "stop"), FinishReason::ContentFilter);
    assert_eq!(end("length", "stop"), FinishReason::Length);
    assert_eq!(end("stop", "length"), FinishReason::Length);
    assert_eq!(end("out_of_luck", "stop"), FinishReason::Length);
}

#[test]
fn one_choice_is_read_and_others_are_named_once() {
    let of = |index: Value, content: &str| json!({ "index": index, "delta": { "content": content } });
    let chunk = |choices: Value| json!({ "choices": choices });
    let others = TextDelta::LeftOut(LeftOut::OtherChoices);
    let (deltas, end) = read(&[
        chunk(json!([of(json!(0), "a")])),
        chunk(json!([of(json!(1), "x")])),
        chunk(json!([of(json!(1), "y"), of(json!(0), "b"), of(json!(2), "z")])),
        chunk(json!([of(json!(null), "c")])),
        chunk(json!([{ "index": 1, "delta": {}, "finish_reason": "length" }])),
        finish("stop"),
    ])
    .unwrap();
    assert_eq!(deltas, [text("a"), others.clone(), text("b"), text("c")]);
    assert_eq!(end.unwrap().reason, FinishReason::Stop);
    // Some count from 1.
    assert_eq!(read(&[chunk(json!([of(json!(1), "a")]))]).unwrap().0, [text("a")]);
    let whole = |index: u32| json!({ "index": index, "message": { "content": index.to_string() } });
    assert_eq!(read(&[chunk(json!([whole(0), whole(1)]))]).unwrap().0, [others, text("0")]);
}

#[test]
fn chunks_that_count_themselves_are_one_choice() {
    let of = |index: u32, content: &str| json!({ "choices": [{ "index": index, "delta": { "content": content } }] });
    let end =
        |index: u32| json!({ "choices": [{ "index": index, "delta": { "content": "!" }, "finish_reason": "stop" }] });
    for n in 1..6_u32 {
        let mut chunks: Vec<Value> = (0..n).map(|index| of(index, "a")).collect();
        chunks.push(end(n));
        let (deltas, end) = read(&chunks).unwrap();
        assert_eq!(deltas, [&vec![text("a"); n as usize][..], &[text("!")]].concat(), "{n} and the last one");
        assert_eq!(end.unwrap().reason, FinishReason::Stop);
    }
    let others = TextDelta::LeftOut(LeftOut::OtherChoices);
    let (deltas, end) = read(&[of(0, "a"), of(1, "x"), of(0, "b"), of(1, "y"), of(2, "z"), end(0)]).unwrap();
    assert_eq!((deltas, end.is_some()), (vec![text("a"), others, text("b"), text("!")], true));
}

#[test]
fn a_reason_that_is_the_word_null_is_none() {
    let (_, end) = read(&[finish("null"), finish("NULL"), finish("stop"), finish("null")]).unwrap();
    assert_eq!(end.map(|end| (end.reason, end.unknown)), Some((FinishReason::Stop, None)));
    assert!(read(&[finish("null")]).unwrap().1.is_none());
}

#[test]
fn calls_that_a_limit_cuts_stay_open_and_broken_ones_are_errors() {
    let named =
        |index: u32, name: &str, arguments: &str| piece(json!(index), json!(null), json!(name), json!(arguments));
    let cut = |second: &str| [calls(&[named(0, "f", "{}"), named(1, "g", second)]), finish("length")];
    assert_eq!(called(&cut("{\"a\"")), "f({})g({\"a\"…");
    assert_eq!(called(&[calls(&[named(0, "f", "{"), named(1, "g", "{}")]), finish("content_filter")]), "f({…");
    let broken = |pieces: &[Value]| read(&[calls(pieces), finish("stop")]).unwrap_err();
    let late = calls(&[piece(json!(0), json!(null), json!(null), json!("{}"))]);
    assert!(read(&[calls(&[named(0, "f", "{}"), named(1, "g", "{}")]), late]).is_err());
    for pieces in [
        &[piece(json!(0), json!("a"), json!(null), json!("{}"))],
        &[piece(json!("first"), json!("a"), json!("f"), json!("{}"))],
        &[piece(json!(0), json!("a"), json!("f"), json!([1]))],
        &[piece(json!(0), json!("a"), json!(7), json!("{}"))],
        &[json!("f")],
    ] {
        assert!(
            matches!(broken(pieces), UpstreamError::Failed { failure: UpstreamFailure::Malformed, .. }),
            "{pieces:?}"
        );
    }
    let waiting = [calls(&[named(0, "f", "{")]), calls(&[named(1, "g", &"x".repeat(5 << 20))])];
    assert!(read(&waiting).is_err(), "what waits is bounded");
}

/// Empty objects in one line take many times the memory of their text.
#[test]
fn countless_calls_in_one_event_are_refused_before_they_are_kept() {
    let countless = format!(r#"{{"choices":[{{"delta":{{"tool_calls":[{{}}{}]}}}}]}}"#, ",{}".repeat(300_000));
    let refused = ChunkReader::default().read(countless.as_bytes(), &mut Vec::new()).unwrap_err();
    assert!(refused.to_string().contains("more than 128 items"), "{refused}");
    let few = delta(json!({ "tool_calls": vec![json!({}); 128] }));
    assert_eq!(read(&[few, finish("stop")]).unwrap().0, []);
}

#[test]
fn a_call_whose_id_or_name_is_too_long_is_refused() {
    for field in [json!({ "id": "a".repeat(2_000) }), json!({ "function": { "name": "a".repeat(2_000) } })] {
        let refused = read(&[delta(json!({ "tool_calls": [field] }))]).unwrap_err();
        assert!(refused.to_string().contains("too long"), "{refused}");
    }
}

#[test]
fn a_reason_that_is_not_known_ends_a_reply_as_a_limit_does() {
    let end = |reason: &str| {
        let end = read(&[delta(json!({ "content": "Hi" })), finish(reason)]).unwrap().1.unwrap();
        (end.reason, end.unknown)
    };
    assert_eq!(end("content_filter"), (FinishReason::ContentFilter, None));
    assert_eq!(end("model_length"), (FinishReason::Length, None));
    assert_eq!(end("out_of_luck"), (FinishReason::Length, Some("out_of_luck".into())));
    assert_eq!(end("end_turn"), (FinishReason::Stop, None));
    assert!(read(&[json!({ "choices": [{ "delta": {}, "finish_reason": 7 }] })]).is_err());
}

#[test]
fn texts_come_in_parts_and_arguments_as_objects() {
    let parts = json!([
        { "type": "thinking", "thinking": [{ "type": "text", "text": "h" }, { "type": "text", "text": "m" }] },
        { "type": "text", "text": "So " },
        "it ",
        { "type": "reference", "reference_ids": [1] },
        { "text": "is" },
        { "type": "reasoning", "text": "!" },
        { "type": "refusal", "refusal": "No." },
        null,
    ]);
    let said = [
        TextDelta::Reasoning("hm".into()),
        TextDelta::LeftOut(LeftOut::Citations),
        text("So it is"),
        TextDelta::Reasoning("!".into()),
        TextDelta::Refusal("No.".into()),
    ];
    assert_eq!(read(&[delta(json!({ "content": parts }))]).unwrap().0, said);
    assert_eq!(read(&[json!({ "choices": [{ "message": { "content": parts } }] })]).unwrap().0, said);
    let raw = r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":7,"function":{"name":"f","arguments":{"a": 12345678901234567890123}}}]}}]}"#;
    let mut out = Vec::new();
    ChunkReader::default().read(raw.as_bytes(), &mut out).unwrap();
    assert_eq!(out, [begin(0, "7", "f"), arguments(0, "{\"a\": 12345678901234567890123}")]);
    for other in [json!(7), json!({ "text": "a" }), json!(true), json!([7])] {
        assert!(read(&[delta(json!({ "content": other }))]).is_err(), "{other}");
    }
}

#[test]
fn refusals_and_transcripts_are_read_and_what_is_lost_is_named_once() {
    let annotation = json!([{ "type": "url_citation", "url_citation": { "url": "x" } }]);
    let searched = json!({ "choices": [{ "delta": { "content": "a" } }], "citations": ["x"], "search_results": [] });
    let (deltas, _) = read(&[
        delta(json!({ "refusal": "I can", "content": null })),
        delta(json!({ "refusal": "not." })),
        delta(json!({ "annotations": annotation, "content": "b" })),
        delta(json!({ "annotations": annotation, "images": [], "audio": { "id": "x", "transcript": "heard" } })),
        searched.clone(),
        searched,
    ])
    .unwrap();
    let left_out = TextDelta::LeftOut;
    assert_eq!(
        deltas,
        [
            TextDelta::Refusal("I can".into()),
            TextDelta::Refusal("not.".into()),
            text("b"),
            left_out(LeftOut::Annotations),
            left_out(LeftOut::Audio),
            text("heard"),
            left_out(LeftOut::Citations),
            text("a"),
            text("a"),
        ]
    );
}
