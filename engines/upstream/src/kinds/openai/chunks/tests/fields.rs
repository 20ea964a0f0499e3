//! Fields beside the text: those that cannot spoil it, and those in which some servers put what others write elsewhere.

use super::*;

/// The deltas and the end of a reply of these events, as they are written.
fn read_written(events: &[&str]) -> Result<(Vec<TextDelta>, Option<TextEnd>), UpstreamError> {
    let mut reader = ChunkReader::default();
    let mut out = Vec::new();
    events.iter().try_for_each(|event| reader.read(event.as_bytes(), &mut out))?;
    let end = reader.end(&mut out);
    Ok((out, end))
}

#[test]
fn a_usage_that_cannot_be_read_spoils_no_finished_reply() {
    let long = "9".repeat(400);
    for (usage, n_prompt) in [
        (r#""usage":{"prompt_tokens":1e999,"completion_tokens":2}"#, None),
        (&format!(r#""usage":{{"prompt_tokens":{long},"completion_tokens":2}}"#), None),
        (r#""usage":{"prompt_tokens":"\ud800","completion_tokens":2}"#, None),
        (r#""usage":{"prompt_tokens":1,"prompt_tokens":9,"completion_tokens":2}"#, Some(9)),
        (r#""usage":{"prompt_tokens":9,"prompt_tokens":null,"completion_tokens":2}"#, Some(9)),
        (r#""usage":{"prompt_tokens":1},"usage":{"prompt_tokens":9,"completion_tokens":2}"#, Some(9)),
        (r#""usage":{"prompt_tokens":9,"completion_tokens":2},"usage":null"#, Some(9)),
        (r#""usage":{"\ud800":1,"prompt_tokens":9,"completion_tokens":2}"#, Some(9)),
        (r#""usage":{"prompt_tokens_details":1e999,"prompt_tokens":9,"completion_tokens":2}"#, Some(9)),
    ] {
        let text = r#"{"choices":[{"delta":{"content":"Hi"},"finish_reason":"stop"}]}"#;
        let (deltas, end) = read_written(&[text, &format!(r#"{{"choices":[],{usage}}}"#)]).unwrap();
        let usage_read = end.unwrap().usage;
        assert_eq!(deltas, [super::text("Hi")], "{usage}");
        assert_eq!((usage_read.n_prompt, usage_read.n_completion), (n_prompt, Some(2)), "{usage}");
    }
    for aside in [
        r#""usage":"\ud800""#,
        r#""usage":1e999"#,
        r#""object":"a","object":"b""#,
        r#""object":1e999"#,
        r#""error":null,"error":null"#,
        r#""citations":null,"citations":null"#,
        r#""\ud800":1"#,
    ] {
        let of = |choice: &str| read_written(&[&format!(r#"{{"choices":[{choice}],{aside}}}"#)]);
        let (deltas, end) = of(r#"{"delta":{"content":"Hi"},"finish_reason":"stop"}"#).unwrap();
        assert_eq!((deltas, end.is_some()), (vec![super::text("Hi")], true), "{aside}");
    }
    for choice in [
        r#"{"index":1e999,"delta":{"content":"Hi"}}"#,
        r#"{"index":0,"index":0,"delta":{"content":"Hi"}}"#,
        r#"{"delta":{"content":"Hi","annotations":null,"annotations":null}}"#,
        r#"{"delta":{"content":"Hi","context":"\ud800","audio":1e999}}"#,
    ] {
        let (deltas, _) = read_written(&[&format!(r#"{{"choices":[{choice}]}}"#)]).unwrap();
        assert_eq!(deltas, [super::text("Hi")], "{choice}");
    }
    // Nothing that holds something is lost.
    for strict in [
        r#"{"choices":[{"delta":{"content":"a","content":"b"}}]}"#,
        r#"{"choices":[],"choices":[]}"#,
        r#"{"choices":[],"error":{"message":"x"},"error":null}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"index":1e999,"function":{"name":"f"}}]}}]}"#,
    ] {
        assert!(read_written(&[strict]).is_err(), "{strict}");
    }
}

/// In a stream, and in a whole reply.
fn in_both_forms(fields: &Value) -> [Result<Vec<TextDelta>, UpstreamError>; 2] {
    ["delta", "message"].map(|form| {
        let chunk = json!({ "choices": [{ "index": 0, form: fields, "finish_reason": "stop" }] });
        read(&[chunk]).map(|(deltas, _)| deltas)
    })
}

#[test]
fn reasoning_is_read_in_all_of_its_fields_and_once() {
    let blocks =
        json!([{ "type": "thinking", "thinking": "h", "signature": "s" }, { "type": "thinking", "thinking": "m" }]);
    let details = json!([
        { "type": "reasoning.summary", "summary": "h", "format": "x", "index": 0 },
        { "type": "reasoning.encrypted", "data": "abc" },
        { "type": "reasoning.text", "text": "m", "signature": null },
    ]);
    let expected = vec![TextDelta::Reasoning("hm".into()), text("Hi")];
    for fields in [
        json!({ "reasoning_text": "hm" }),
        json!({ "thinking": "hm" }),
        json!({ "thinking": blocks }),
        json!({ "thinking_blocks": blocks }),
        json!({ "reasoning_details": details }),
        json!({ "reasoning_content": "", "reasoning": null, "thinking": "hm", "thinking_blocks": null }),
        json!({ "reasoning": "hm", "reasoning_details": details }),
        json!({ "reasoning_content": "hm", "reasoning": "hm", "thinking": "hm", "thinking_blocks": blocks }),
        json!({ "thinking": { "type": "enabled" }, "reasoning_text": "hm", "reasoning_details": true }),
    ] {
        let mut fields = fields;
        fields["content"] = "Hi".into();
        for deltas in in_both_forms(&fields) {
            assert_eq!(deltas.unwrap(), expected, "{fields}");
        }
    }
    // Some servers repeat all of it in a list at the end.
    let pieces = [delta(json!({ "reasoning": "hm" })), delta(json!({ "content": "Hi", "reasoning_details": details }))];
    assert_eq!(read(&pieces).unwrap().0, expected);
    let pieces = [json!({ "thinking_blocks": [blocks[0]] }), json!({ "thinking_blocks": [blocks[1]] })].map(delta);
    assert_eq!(read(&pieces).unwrap().0, [TextDelta::Reasoning("h".into()), TextDelta::Reasoning("m".into())]);
}

#[test]
fn azures_citations_are_named_and_an_error_inside_a_choice_is_an_error() {
    let context = json!({ "citations": [{ "content": "x", "url": "y" }], "intent": "[]" });
    for deltas in in_both_forms(&json!({ "content": "Hi", "context": context })) {
        assert_eq!(deltas.unwrap(), [text("Hi"), TextDelta::LeftOut(LeftOut::Citations)]);
    }
    for reason in ["stop", "error", "length"] {
        for form in ["delta", "message"] {
            let of = |error: Value| {
                read(&[json!({ "choices": [{ form: { "content": "Hi" }, "finish_reason": reason, "error": error }] })])
            };
            let error = of(json!({ "code": 502, "message": "it broke" })).unwrap_err();
            assert!(matches!(&error, UpstreamError::Failed { failure: UpstreamFailure::ServerError, .. }), "{error}");
            assert!(error.to_string().contains("it broke"), "{error}");
            assert!(matches!(of(json!({ "code": 429, "message": "x" })), Err(UpstreamError::Busy { .. })));
            assert_eq!(of(Value::Null).is_ok(), reason != "error");
        }
    }
}
