use super::*;
use crate::serve::settings::ReplyChecks;

const ROLE: &str = r#"data: {"id":"a","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#;
const HELLO: &str = r#"data: {"id":"a","choices":[{"index":0,"delta":{"content":"Hel\u006co"},"finish_reason":null}]}"#;
const STOP: &str = r#"data: {"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#;
const USAGE: &str =
    r#"data: {"id":"a","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}"#;
const DONE: &str = "data: [DONE]";

fn asked() -> RequestedReply {
    let checks = ReplyChecks { token_per_chunk: true, ..ReplyChecks::default() };
    RequestedReply { api: CalledApi::Chat, form: AskedForm::Stream, max_tokens: 4, ignore_eos: false, checks }
}

/// The names of the faults that a stream of these lines has.
fn faults_as(asked: RequestedReply, lines: &[&str]) -> Vec<&'static str> {
    let mut check = ReplyCheck::new(asked);
    for line in lines {
        check.line(line.as_bytes(), |_| ()).unwrap();
    }
    check.end(b"");
    check.faults.kinds.iter().map(|fault| fault.name()).collect()
}

fn faults(lines: &[&str]) -> Vec<&'static str> {
    faults_as(asked(), lines)
}

#[test]
fn a_correct_stream_has_no_fault() {
    assert_eq!(faults(&[ROLE, "", HELLO, "", STOP, "", USAGE, "", DONE, ""]), [""; 0]);
    assert_eq!(faults(&[": ping", "event: message", ROLE, HELLO, STOP, USAGE, DONE]), [""; 0]);
    // Ollama repeats the role.
    let both = r#"data:{"id":"a","choices":[{"delta":{"role":"assistant","content":"x"}}],"usage":null}"#;
    assert_eq!(faults(&[both, STOP, USAGE, DONE]), [""; 0]);
}

#[test]
fn every_fault_of_a_stream_is_found() {
    let check = |lines: &[&str], expected: &[&str]| assert_eq!(faults(lines), expected, "{lines:#?}");
    check(&[HELLO, ROLE, STOP, USAGE, DONE], &["no_role"]);
    check(&[ROLE, HELLO, STOP, HELLO, USAGE, DONE], &["text_after_finish", "usage_is_not_chunks"]);
    check(&[ROLE, HELLO, STOP, STOP, USAGE, DONE], &["finish_twice"]);
    check(&[ROLE, HELLO, USAGE, DONE], &["no_finish"]);
    check(&[ROLE, HELLO, STOP, DONE], &["no_usage"]);
    check(&[ROLE, HELLO, STOP, USAGE], &["no_done"]);
    check(&[ROLE, HELLO, STOP, DONE, USAGE], &["event_after_done"]);
    check(&[ROLE, HELLO, HELLO, STOP, USAGE, DONE], &["usage_is_not_chunks"]);
    check(&[ROLE, HELLO, STOP, USAGE, DONE, "hello"], &["invalid_line"]);
    check(&[ROLE, HELLO, "data: {\"choices\":[}", STOP, USAGE, DONE], &["invalid_json"]);
    check(&[ROLE, HELLO, r#"data: {"choices":[{"delta":{"content":3}}]}"#, STOP, USAGE, DONE], &["invalid_json"]);
    check(&[ROLE, HELLO, &STOP.replace("\"a\"", "\"b\""), USAGE, DONE], &["id_changed"]);
    check(&[ROLE, HELLO, &STOP.replace("stop", "eos"), USAGE, DONE], &["unknown_finish"]);
    // One token of four is not the requested length.
    check(&[ROLE, HELLO, &STOP.replace("stop", "length"), USAGE, DONE], &["wrong_finish"]);
    check(&[ROLE, HELLO, STOP, &USAGE.replace(":4}", ":5}"), DONE], &["wrong_usage"]);
    check(&[ROLE, STOP, &USAGE.replace(":1,", ":0,").replace(":4}", ":3}"), DONE], &["no_text"]);
    let no_eos = RequestedReply { ignore_eos: true, ..asked() };
    assert_eq!(faults_as(no_eos, &[ROLE, HELLO, STOP, USAGE, DONE]), ["wrong_finish"]);
}

#[test]
fn an_error_event_ends_a_stream() {
    let mut check = ReplyCheck::new(asked());
    let failed = check.line(br#"data: {"error":{"message":"out of memory"}}"#, |_| ());
    assert_eq!(failed, Err(RequestFailure::ErrorEvent));
}

#[test]
fn a_line_that_is_cut_off_is_no_end() {
    let mut check = ReplyCheck::new(asked());
    for line in [ROLE, HELLO, STOP, USAGE, DONE] {
        check.line(line.as_bytes(), |_| ()).unwrap();
    }
    check.end(b"data: {");
    assert!(check.faults.kinds.contains(&ReplyFault::NoDone));
    assert!(check.faults.example.unwrap().contains("data: {"));
}

#[test]
fn completions_and_json_replies_have_no_role_or_end() {
    let completions = RequestedReply { api: CalledApi::Completions, ..asked() };
    let text = r#"data: {"choices":[{"index":0,"text":" a"}]}"#;
    let end = r#"data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}"#;
    assert_eq!(faults_as(completions, &[text, end, USAGE.replace(r#""id":"a","#, "").as_str(), DONE]), [""; 0]);

    let json = RequestedReply { form: AskedForm::Json, ..asked() };
    let reply = r#"{"id":"a","choices":[{"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],
        "usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}"#;
    let of = |body: &str| {
        let mut check = ReplyCheck::new(json);
        check.content_type(b"Application/JSON; charset=utf-8");
        check.event(body.as_bytes(), |_| ()).unwrap();
        check.end(b"");
        check.faults.kinds.iter().map(|fault| fault.name()).collect::<Vec<_>>()
    };
    assert_eq!(of(reply), [""; 0]);
    assert_eq!(of(&reply[..40]), ["invalid_json", "no_finish", "no_usage", "no_text"]);
    assert_eq!(of(&reply.replace("Hello", "")), ["no_text"]);
}

#[test]
fn the_text_of_a_reply_is_compared_wherever_its_chunks_break() {
    let same = ReplyChecks { same_replies: true, ..ReplyChecks::default() };
    let digest = |texts: &[&str]| {
        let mut check = ReplyCheck::new(RequestedReply { checks: same, ..asked() });
        for text in texts {
            check.line(HELLO.replace("Hel\\u006co", text).as_bytes(), |_| ()).unwrap();
        }
        check.end(b"").unwrap()
    };
    assert_eq!(digest(&["Hello"]), digest(&["He", "llo"]));
    assert_ne!(digest(&["Hello"]), digest(&["He", "lo"]));
}

#[test]
fn a_lost_token_of_the_mock_is_a_fault() {
    let stamps = RequestedReply { checks: ReplyChecks { stamps: true, ..ReplyChecks::default() }, ..asked() };
    let text = |text: &str| HELLO.replace("Hel\\u006co", text);
    let stream = |texts: &[&str]| {
        let chunks: Vec<String> = texts.iter().map(|t| text(t)).collect();
        let usage = USAGE.replace(":1,", ":2,").replace(":4}", ":5}");
        let all: Vec<&str> =
            [ROLE].into_iter().chain(chunks.iter().map(String::as_str)).chain([STOP, &usage, DONE]).collect();
        faults_as(stamps, &all)
    };
    assert_eq!(stream(&["0:1 ", "1:2 "]), [""; 0]);
    assert_eq!(stream(&["0:1 1:2 "]), [""; 0]);
    assert_eq!(stream(&["0:1 ", "2:2 "]), ["text_lost"]);
    assert_eq!(stream(&["0:1 "]), ["text_lost"]);
}
