use std::time::Duration;

use baton_schemas::image::Image;
use baton_schemas::tools::ToolCallDelta;
use baton_schemas::{FinishReason, GenerateRequest};

use super::*;
use crate::kinds::openai::tests::{request, settings};
use crate::{StrictGap, TextDelta, TextEnd, UpstreamFailure, UpstreamKind};

fn asked<'a>(request: &'a GenerateRequest, model: &'a str) -> ChoiceRequest<'a> {
    ChoiceRequest { request, choice: 0, model, n_left: None, gap: StrictGap::of(request) }
}

fn call(change: impl FnOnce(&mut GenerateRequest)) -> Result<Value, UpstreamError> {
    let settings = UpstreamSettings { num_ctx: Some(8192), ..settings(UpstreamKind::Ollama) };
    let mut request = request();
    change(&mut request);
    let call = Ollama.generate_call(&asked(&request, "llama3.2"), &settings)?;
    assert!(matches!(request.input, Input::Chat(_)) == (call.path == ApiPath::Api("api/chat")));
    Ok(call.body.into())
}

fn read(lines: &[Value]) -> Result<(Vec<TextDelta>, Option<TextEnd>), UpstreamError> {
    let mut reader = LineReader::default();
    let mut out = Vec::new();
    for line in lines {
        reader.read(line.to_string().as_bytes(), &mut out)?;
    }
    let end = reader.end(&mut out);
    Ok((out, end))
}

#[test]
fn a_chat_has_its_options_and_its_context() {
    let body = call(|request| request.max_tokens = Some(5)).unwrap();
    assert_eq!((&body["model"], &body["stream"]), (&json!("llama3.2"), &json!(true)));
    let options = &body["options"];
    assert_eq!(
        (&options["num_ctx"], &options["num_predict"], &options["temperature"]),
        (&json!(8192), &json!(5), &json!(0.8))
    );
    assert_eq!(body["messages"][0], json!({ "role": "user", "content": "hi" }));
    assert_eq!((&body["truncate"], &body["shift"]), (&json!(false), &json!(false)), "nothing is cut in silence");
    let within = |num_ctx| call(|request| request.num_ctx = Some(num_ctx)).unwrap()["options"]["num_ctx"].clone();
    assert_eq!((within(4096), within(16_384)), (json!(8192), json!(8192)), "another size would load the model again");
    assert_eq!(body.get("keep_alive"), None);
    let none = call(|request| request.max_tokens = Some(0)).unwrap();
    assert_eq!(none["options"]["num_predict"], 1, "0 is no limit to it");
    let kept = call(|request| request.keep_alive = Some(KeepAlive::Forever)).unwrap();
    assert_eq!(kept["keep_alive"], -1);
}

#[test]
fn images_come_before_the_text_that_follows_them() {
    let [a, b] = [&b"\xff\xd8\xffa"[..], b"\xff\xd8\xffb"].map(|bytes| Image::new(bytes, "f"));
    let sent = |role: MessageRole, content: String| {
        let images = vec![a.clone(), b.clone()];
        let messages = vec![Message::new(role, content)];
        let conversation = Conversation { messages, images, ..Conversation::default() };
        call(|request| request.input = Input::Chat(conversation)).unwrap()["messages"].clone()
    };
    let (first, second) = (a.mark(), b.mark());
    let user = |content: &str, images: &[&Image]| {
        let images: Vec<String> = images.iter().map(|image| image.in_base64()).collect();
        json!({ "role": "user", "content": content, "images": images })
    };
    let whole = [user("What?", &[&a, &b])];
    assert_eq!(sent(MessageRole::User, format!("What?{first}{second}")), json!(whole));
    assert_eq!(sent(MessageRole::User, format!("{first}What?{second}")), json!(whole));
    let divided = json!([user("x", &[&a]), user("y", &[&b])]);
    assert_eq!(sent(MessageRole::User, format!("{first}x{second}y")), divided);
    let divided = json!([{ "role": "user", "content": "x" }, user("y", &[&a, &b])]);
    assert_eq!(sent(MessageRole::User, format!("x{first}{second}y")), divided);
    let result = sent(MessageRole::Tool, format!("x{first}y{second}"));
    assert_eq!((&result[0]["content"], result.as_array().unwrap().len()), (&json!("xy"), 1));
}

#[test]
fn what_ollama_cannot_do_is_refused() {
    let refused = |change: fn(&mut GenerateRequest), field: &str| match call(change) {
        Err(UpstreamError::Unsupported { field: named }) => assert_eq!(named, field),
        other => panic!("{field}: {other:?}"),
    };
    refused(|r| r.top_logprobs = Some(2), "logprobs");
    refused(|r| r.sampling.logit_bias = vec![(1, 1.0)].into(), "logit_bias");
    refused(|r| r.ignore_eos = true, "ignore_eos");
    refused(|r| r.input = Input::Tokens(vec![1]), "prompt");
    refused(|r| r.tools.choice = baton_schemas::tools::ToolChoice::Required, "tool_choice");
}

#[test]
fn lines_are_read() {
    let call = json!({ "function": { "name": "f", "arguments": { "a": 1 } } });
    let (deltas, end) = read(&[
        json!({ "message": { "role": "assistant", "content": "", "thinking": "hm" }, "done": false }),
        json!({ "message": { "content": "Hi" }, "done": false }),
        json!({ "message": { "content": "", "tool_calls": [call] }, "done": false }),
        json!({ "message": { "content": "" }, "done": true, "done_reason": "stop", "prompt_eval_count": 7, "eval_count": 3 }),
    ])
    .unwrap();
    assert_eq!(deltas[0], TextDelta::Reasoning("hm".into()));
    assert_eq!(deltas[1], TextDelta::Text { text: "Hi".into(), tokens: Vec::new() });
    assert!(matches!(&deltas[2], TextDelta::Call(ToolCallDelta::Begin { index: 0, name, .. }) if name == "f"));
    assert_eq!(deltas[3], TextDelta::Call(ToolCallDelta::Arguments { index: 0, fragment: r#"{"a":1}"#.into() }));
    let end = end.unwrap();
    assert_eq!((end.reason, end.usage.n_prompt, end.usage.n_completion), (FinishReason::ToolCalls, Some(7), Some(3)));
}

#[test]
fn log_probabilities_are_requested_where_the_configuration_says_so() {
    let mut settings = settings(UpstreamKind::Ollama);
    let mut request = request();
    settings.fields.insert(UpstreamField::Logprobs);
    request.top_logprobs = Some(2);
    let call = Ollama.generate_call(&asked(&request, "m"), &settings).unwrap();
    let body = Value::from(call.body.clone());
    assert_eq!((&body["logprobs"], &body["top_logprobs"]), (&json!(true), &json!(2)));
    assert!(body["options"].get("logprobs").is_none());

    let read = |lines: &[Value]| {
        let mut reader = Ollama.delta_reader(&call);
        let mut out = Vec::new();
        lines.iter().try_for_each(|line| reader.read(line.to_string().as_bytes(), &mut out)).map(|()| out)
    };
    let entry = |token: &str, logprob: f64| json!({ "token": token, "logprob": logprob, "bytes": token.as_bytes() });
    let mut first = entry("H", -0.25);
    first["top_logprobs"] = json!([entry("H", -0.25), entry("J", -2.0)]);
    let deltas = read(&[
        json!({ "message": { "content": "", "thinking": "hm" }, "logprobs": [entry("hm", -1.0)] }),
        // Ollama holds text back until it is clear that it is not a call.
        json!({ "message": { "content": "" }, "logprobs": [first] }),
        json!({ "message": { "content": "Hi" }, "logprobs": [entry("i", -0.5)] }),
    ])
    .unwrap();
    assert_eq!(deltas[0], TextDelta::Reasoning("hm".into()));
    let TextDelta::Text { text, tokens } = &deltas[1] else { panic!("{deltas:?}") };
    let spelled: Vec<&[u8]> = tokens.iter().map(|token| token.bytes.as_slice()).collect();
    assert_eq!((text.as_str(), spelled), ("Hi", vec![&b"H"[..], &b"i"[..]]));
    assert_eq!((tokens[0].logprobs.chosen, tokens[0].logprobs.top.len()), (-0.25, 2));
    assert_eq!(tokens[0].logprobs.top[1].logprob, -2.0);

    // The tags around reasoning are in no text.
    let deltas = read(&[
        json!({ "message": { "content": "", "thinking": "hm" }, "logprobs": [entry("hm", -1.0)] }),
        json!({ "message": { "content": "" }, "logprobs": [entry("</think>", -0.1)] }),
        json!({ "message": { "content": "Hi" }, "logprobs": [entry("H", -0.25), entry("i", -0.5)] }),
    ])
    .unwrap();
    let TextDelta::Text { tokens, .. } = &deltas[1] else { panic!("{deltas:?}") };
    assert_eq!(tokens.iter().map(|token| token.logprobs.chosen).collect::<Vec<_>>(), [-0.25, -0.5]);

    // An older Ollama sends none, which must not look like a complete reply.
    let silent = read(&[json!({ "message": { "content": "Hi" } })]);
    assert!(matches!(silent, Err(UpstreamError::Unsupported { field: "logprobs" })), "{silent:?}");
}

#[test]
fn refusals_are_read_and_an_end_without_a_reason_is_not_a_whole_reply() {
    let line = |message: Value| json!({ "message": message, "done": false });
    let (deltas, end) = read(&[
        line(json!({ "content": "", "refusal": "I will " })),
        line(json!({ "content": [{ "type": "refusal", "refusal": "not." }], "refusal": null })),
        json!({ "message": { "content": "" }, "done": true }),
    ])
    .unwrap();
    assert_eq!(deltas, ["I will ", "not."].map(|text| TextDelta::Refusal(text.into())));
    let end = end.unwrap();
    assert_eq!((end.reason, end.unknown.as_deref()), (FinishReason::Length, Some("(none)")));
}

#[test]
fn a_stream_without_done_has_no_end_and_an_error_is_one() {
    assert_eq!(read(&[json!({ "message": { "content": "Hi" }, "done": false })]).unwrap().1, None);
    assert!(read(&[json!({ "error": "model runner has stopped" })]).is_err());
    assert!(LineReader::default().read(b"{\"done\":", &mut Vec::new()).is_err());
}

#[test]
fn a_model_is_loaded_and_unloaded() {
    let settings = settings(UpstreamKind::Ollama);
    let of = |keep_alive| Value::from(Ollama.keep_call(&settings, "m", keep_alive).unwrap().unwrap().body);
    assert_eq!(of(None), json!({ "model": "m", "stream": false }));
    assert_eq!(of(Some(KeepAlive::For(Duration::ZERO)))["keep_alive"], "0s");
    assert_eq!(of(Some(KeepAlive::For(Duration::from_millis(1500))))["keep_alive"], "1.5s");
    assert_eq!(of(Some(KeepAlive::Forever))["keep_alive"], -1);
}

#[test]
fn tokens_without_their_text_are_bounded() {
    let line = json!({ "logprobs": vec![json!({ "token": "", "logprob": -1 }); 10_000] }).to_string();
    let read = |reader: &mut LineReader| reader.read(line.as_bytes(), &mut Vec::new());
    let mut reader = LineReader::new(true);
    assert!((0..6).all(|_| read(&mut reader).is_ok()));
    let refused = read(&mut reader);
    assert!(matches!(refused, Err(UpstreamError::Failed { failure: UpstreamFailure::Malformed, .. })));
    // Some servers write them always.
    let mut reader = LineReader::new(false);
    assert!((0..9).all(|_| read(&mut reader).is_ok()));
}
