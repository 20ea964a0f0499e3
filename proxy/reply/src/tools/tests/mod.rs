//! What each format's replies are read as, however they are cut.

mod cut;
mod families;

use baton_schemas::FinishReason;
use baton_schemas::constraint::Constraint;
use baton_schemas::openai::ResponsesRequest;
use baton_schemas::thinking::ThinkTags;
use baton_schemas::tools::{Described, Strictness, ToolCallDelta};
use proptest::prelude::*;
use serde_json::json;

use super::reader::Holds;
use super::thought::Thought;
use super::*;

const THINK: ThinkTags = ThinkTags { open: "<think>", close: "</think>" };

fn tools() -> Arc<[Tool]> {
    let tool = |name: &str, parameters| Tool {
        name: name.into(),
        description: None,
        parameters,
        strict: Strictness::Loose,
        held: None,
        unheld: Default::default(),
        described: Described::InList,
    };
    let look = json!({ "type": "object", "properties": {
        "place": { "type": "string" }, "days": { "type": "integer" }, "deep": { "type": "object" } } });
    [tool("look", look), tool("stop", Tool::no_parameters())].into()
}

#[test]
fn free_calls_are_held_as_strictly_as_their_function_says() {
    let held = |said: &str| {
        let body = format!(
            r#"{{"model": "m", "input": "hi", "tools": [{{"type": "function", "name": "f",
            "parameters": {{"type": "object", "properties": {{"a": {{"const": 7}}}}}} {said}}}]}}"#
        );
        let request = ResponsesRequest::parse(body.as_bytes(), 1).unwrap().generate;
        match ReplyForm::of(&request, "").unwrap().constraint(&request).as_deref() {
            Some(Constraint::Grammar { rule, .. }) => {
                Some((rule.has_alternatives(), format!("{rule:?}").contains("const")))
            }
            Some(other) => panic!("{other:?}"),
            None => None,
        }
    };
    assert_eq!(held(""), Some((true, true)), "OpenAI's functions are strict by themselves");
    assert_eq!((held(r#", "strict": true"#), held(r#", "strict": false"#)), (Some((false, true)), None));
}

/// A reader for a format, with reasoning between tags if `thinks`.
fn reader(format: &dyn ToolFormat, thinks: bool, stops: &[&str]) -> ReplyReader {
    let thought = thinks.then(|| Thought::new(THINK, false));
    let stops = stops.iter().map(ToString::to_string).collect();
    ReplyReader::new(thought, Some(format.parser(&tools())), stops, Holds::default())
}

/// A reply in one line: text as it is, `{reasoning}`, and `name(arguments)` with `…` where a call is not complete.
fn show(parts: Vec<PartContent>) -> String {
    let mut shown = String::new();
    let mut open = false;
    let mut thinking = false;
    let mut n_calls = 0;
    for part in parts {
        if thinking && !matches!(part, PartContent::Reasoning(_)) {
            shown.push('}');
            thinking = false;
        }
        match part {
            PartContent::Text(text) => shown += &text,
            PartContent::Refusal(_) => unreachable!("only upstreams report one"),
            PartContent::Reasoning(text) => {
                if !std::mem::replace(&mut thinking, true) {
                    shown.push('{');
                }
                shown += &text;
            }
            PartContent::Call(ToolCallDelta::Begin { index, id, name }) => {
                assert!(!open && index == n_calls && id.starts_with("call_"));
                open = true;
                shown += &format!("[{name}(");
            }
            PartContent::Call(ToolCallDelta::Arguments { index, fragment }) => {
                assert!(open && index == n_calls && !fragment.is_empty());
                shown += &fragment;
            }
            PartContent::Call(ToolCallDelta::End { index }) => {
                assert!(open && index == n_calls);
                open = false;
                n_calls += 1;
                shown += ")]";
            }
        }
    }
    shown + if thinking { "}" } else { "" } + if open { "…" } else { "" }
}

fn read(mut reader: ReplyReader, pieces: &[&str], is_cut: bool) -> String {
    let mut parts = Vec::new();
    for piece in pieces {
        if !reader.is_stopped() {
            parts.extend(reader.feed((*piece).to_owned()));
        }
    }
    if !reader.is_stopped() {
        parts.extend(reader.finish(is_cut));
    }
    show(parts)
}

/// Checks a reply, in one piece and character by character.
fn check(format: &dyn ToolFormat, reply: &str, expected: &str) {
    let characters: Vec<String> = reply.chars().map(String::from).collect();
    let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
    assert_eq!(read(reader(format, true, &[]), &[reply], false), expected, "{reply}");
    assert_eq!(read(reader(format, true, &[]), &characters, false), expected, "in characters: {reply}");
}

#[test]
fn hermes() {
    let check = |reply: &str, expected: &str| check(&hermes::Hermes, reply, expected);
    check("Hello  there\n", "Hello  there\n");
    check(
        "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"place\": \"a } \\\" b\"}}\n</tool_call>",
        "[look({\"place\": \"a } \\\" b\"})]",
    );
    check(
        "Let me see.\n\n<tool_call>{\"name\":\"look\",\"arguments\":{}}</tool_call>\n<tool_call>\n{\"arguments\": {\"a\": [1, {}]}, \"name\": \"stop\"}\n</tool_call>\n",
        "Let me see.[look({})][stop({\"a\": [1, {}]})]",
    );
    check(
        "<tool_call>[{\"name\": \"stop\"}, {\"name\": \"look\", \"arguments\": null}]</tool_call>",
        "[stop({})][look({})]",
    );
    check(
        "<tool_call>{\"name\": \"stop\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call> Done.",
        "[stop({\"a\": 1})] Done.",
    );
    check("<think>\nhm, so\n</think>\n\n<tool_call>{\"name\": \"stop\"}</tool_call>", "{hm, so}[stop({})]");
    check("<think>hm</think>\n\nYes.", "{hm}Yes.");
    check("A <think> in the middle", "A <think> in the middle");
    // What is no call is text, to the letter.
    for text in [
        "<tool_call>{\"name\": \"r m\"}</tool_call>",
        "<tool_call>{\"name\": \"Ann\", \"age\": 3}</tool_call>",
        "<tool_call>{\"colour\": 1}",
        "<tool_call> [1]",
        "a <tool_call",
        "<tool_call>{\"na",
    ] {
        check(text, text);
    }
    // A call that is cut off by a limit stays open; one that the model left open ends as it is.
    let cut = "<tool_call>{\"name\": \"look\", \"arguments\": {\"place\": \"Ber";
    assert_eq!(read(reader(&hermes::Hermes, false, &[]), &[cut], true), "[look({\"place\": \"Ber…");
    check(cut, "[look({\"place\": \"Ber)]");
    for before_its_arguments in ["", ", \"arg", ", \"arguments\": "] {
        let cut = format!("So.<tool_call>{{\"name\": \"look\"{before_its_arguments}");
        assert_eq!(read(reader(&hermes::Hermes, false, &[]), &[&cut], true), "So.", "{cut}");
    }
    check("<tool_call>{\"name\": \"look\", \"arguments\": {\"a\": 1}", "[look({\"a\": 1})]");
    check("<tool_call>{\"name\": \"look\"", "[look({})]");
}

#[test]
fn qwen_xml() {
    let check = |reply: &str, expected: &str| check(&qwen_xml::QwenXml, reply, expected);
    check(
        "Sure.\n<tool_call>\n<function=look>\n<parameter=place>\nBerlin \"Mitte\"\n, here\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=deep>\n{\"a\": [1]}\n</parameter>\n</function>\n</tool_call>",
        "Sure.[look({\"place\": \"Berlin \\\"Mitte\\\"\\n, here\", \"days\": 3, \"deep\": {\"a\": [1]}})]",
    );
    // A string stays one, whatever it looks like; what is no JSON becomes one.
    check(
        "<function=look><parameter=place>5</parameter><parameter=days>many</parameter><parameter=x>True</parameter></function>",
        "[look({\"place\": \"5\", \"days\": \"many\", \"x\": true})]",
    );
    check("<tool_call>\n<function=stop>\n</function>\n</tool_call>\n", "[stop({})]");
    check("<function=look><parameter=place>Ber", "[look({\"place\": \"Ber)]");
    check("<function=r m>\n<parameter=x>", "<function=r m>\n<parameter=x>");
    check("1 < 2 <tool_call> x", "1 < 2 <tool_call>x");
}

#[test]
fn llama3() {
    let check = |reply: &str, expected: &str| check(&llama3::LlamaVersion::V3, reply, expected);
    check("{\"name\": \"look\", \"parameters\": {\"place\": \"x\"}}", "[look({\"place\": \"x\"})]");
    check("<|python_tag|>{\"type\": \"function\", \"name\": \"stop\", \"parameters\": {}}", "[stop({})]");
    check("{\"name\": \"stop\"}; {\"name\": \"look\", \"parameters\": {}}", "[stop({})][look({})]");
    for text in [
        "{\"city\": \"Rome\"}",
        " {\"name\": \"rm\"}",
        "{\"name\": \"Ann\", \"age\": 3}",
        "{\"name\": \"Ann\", \"parameters\": \"none\"}",
        "Hello {\"name\": \"look\"}",
        "{",
        " {}",
        "{\"name\": 3}",
        "Write <|python_tag|>{\"name\": \"stop\"} or <|python_start|>{\"name\": \"stop\"}.",
    ] {
        check(text, text);
    }
}

#[test]
fn llama4() {
    let check = |reply: &str, expected: &str| check(&llama3::LlamaVersion::V4, reply, expected);
    check("<|python_start|>{\"name\": \"stop\", \"parameters\": {}}<|python_end|>", "[stop({})]");
    check("I look.<|python_start|>{\"name\": \"stop\"}<|python_end|>Done.", "I look.[stop({})]Done.");
    check("<|python_start|>print(1)<|python_end|>", "print(1)");
    check("a <|python_", "a <|python_");
}

#[test]
fn deepseek() {
    let check = |reply: &str, expected: &str| check(&deepseek::DeepSeek, reply, expected);
    let calls = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{\"days\": 2}<｜tool▁call▁end｜>\
        <｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(&format!("<think>hm</think>I look.\n{calls}"), "{hm}I look.[look({\"days\": 2})][stop({})]");
    check(&format!("{calls}Done."), "[look({\"days\": 2})][stop({})]Done.");
    check("<｜tool▁call▁begin｜>stop<｜tool▁sep｜><｜tool▁call▁end｜>", "[stop({})]");
    for fenced in ["```json\n{\"days\": 2}\n```", "\n```\n{\"days\": 2}```\n"] {
        let call = format!("<｜tool▁call▁begin｜>look<｜tool▁sep｜>{fenced}<｜tool▁call▁end｜>");
        check(&format!("{call}{call}<｜tool▁calls▁end｜>Done."), "[look({\"days\": 2})][look({\"days\": 2})]Done.");
    }
    check("<｜tool▁call▁begin｜>look<｜tool▁sep｜>{\"place\": \"Ber", "[look({\"place\": \"Ber)]");
    for text in [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>r m<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>no",
        "a <｜tool",
        "<｜tool▁calls▁begin｜>",
    ] {
        check(text, text);
    }
}

#[test]
fn mistral() {
    let check = |reply: &str, expected: &str| check(&mistral::Mistral, reply, expected);
    check(
        "[TOOL_CALLS] [{\"name\": \"look\", \"arguments\": {\"days\": 2}, \"id\": \"123456789\"}, {\"name\": \"stop\", \"arguments\": {}}]",
        "[look({\"days\": 2})][stop({})]",
    );
    check(
        "I look.[TOOL_CALLS]look[CALL_ID]123456789[ARGS]{\"place\": \"}\"}[TOOL_CALLS]stop{}",
        "I look.[look({\"place\": \"}\"})][stop({})]",
    );
    check("[TOOL_CALLS]look[ARGS]{\"place\": ", "[look({\"place\": )]");
    check("a [1] b", "a [1] b");
}

#[test]
fn harmony() {
    let check = |reply: &str, expected: &str| check(&harmony::Harmony, reply, expected);
    check(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>",
        "{Hm.}Hello",
    );
    check(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{\"place\":\"x\"}<|call|>",
        "{Hm.}[look({\"place\":\"x\"})]",
    );
    check(
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.stop<|channel|>commentary<|message|>",
        "I look.[stop({})]",
    );
    // A model that does not follow its format is still heard.
    check("Hello", "Hello");
    check("<|channel|>commentary to=functions.r/m<|message|>{}", "{}");
}

#[test]
fn a_call_of_a_tool_that_was_not_offered_is_passed_on() {
    let families: [(&dyn ToolFormat, &str); 9] = [
        (&hermes::Hermes, "<tool_call>{\"name\": \"rm\", \"arguments\": {\"a\": 1}}</tool_call>"),
        (&hermes::Hermes, "<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"rm\"}</tool_call>"),
        (&generic::Generic, "<tool_call>{\"name\": \"rm\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>"),
        (&qwen_xml::QwenXml, "<function=rm><parameter=a>1</parameter></function>"),
        (&llama3::LlamaVersion::V3, "{\"name\": \"rm\", \"parameters\": {\"a\": 1}}"),
        (&deepseek::DeepSeek, "<｜tool▁call▁begin｜>rm<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>"),
        (&mistral::Mistral, "[TOOL_CALLS][{\"name\": \"rm\", \"arguments\": {\"a\": 1}}]"),
        (&mistral_args::MistralArgs, "[TOOL_CALLS]rm[ARGS]{\"a\": 1}"),
        (&harmony::Harmony, "<|channel|>commentary to=functions.rm<|message|>{\"a\": 1}<|call|>"),
    ];
    for (format, reply) in families {
        check(format, reply, "[rm({\"a\": 1})]");
        // No tool was offered, so it is no call.
        let parser = Some(format.parser(&Arc::default()));
        let shown = read(ReplyReader::new(None, parser, Vec::new(), Holds::default()), &[reply], false);
        assert!(!shown.contains("[rm("), "{shown}");
    }
    check(&hermes::Hermes, "<tool_call>{\"name\": \"rm\"}</tool_call>", "[rm({})]");
}

#[test]
fn stop_strings_are_found_in_text_alone() {
    let call = "<tool_call>{\"name\": \"stop\", \"arguments\": {\"a\": \"END\"}}</tool_call>";
    let read = |reply: &str| read(reader(&hermes::Hermes, true, &["END"]), &[reply], false);
    assert_eq!(read(&format!("<think>END?</think>go{call}")), "{END?}go[stop({\"a\": \"END\"})]");
    assert_eq!(read(&format!("go E{call}")), "go E[stop({\"a\": \"END\"})]");
    assert_eq!(read(&format!("go END{call}")), "go ");
}

#[test]
fn a_reply_that_may_hold_one_call_ends_with_it() {
    let mut one = ReplyReader::new(
        None,
        Some(hermes::Hermes.parser(&tools())),
        Vec::new(),
        Holds { one_call: true, ..Holds::default() },
    );
    let calls = "<tool_call>{\"name\": \"stop\"}</tool_call><tool_call>{\"name\": \"look\"}</tool_call>";
    assert_eq!(show(one.feed(calls.to_owned()).into_vec()), "[stop({})]");
    assert!(one.is_stopped() && one.reason(FinishReason::Stop) == FinishReason::ToolCalls);
}

#[test]
fn templates_tell_their_format() {
    let fixture = |name: &str| {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../engines/tests/fixtures/templates");
        format_of(&std::fs::read_to_string(format!("{folder}/{name}.jinja")).unwrap()).name()
    };
    assert_eq!(fixture("qwen2"), "hermes");
    assert_eq!(fixture("qwen3"), "hermes");
    assert_eq!(fixture("llama3"), "llama3");
    assert_eq!(fixture("mistral"), "mistral");
    assert_eq!(fixture("tool_schema"), "qwen-xml");
    for unknown in ["smollm2", "gemma", "gemma3", "chatml", "deepseek"] {
        assert_eq!(fixture(unknown), "generic", "{unknown}");
    }
    assert_eq!(format_of("[TOOL_CALLS]{{ name }}[ARGS]").name(), "mistral-args");
    assert_eq!(format_of("<|start|>assistant<|channel|>final<|message|>").name(), "harmony");
    assert_eq!(format_of("<tool_call>{{ arguments }}<arg_key>").name(), "generic");
    assert_eq!(format_of("<|header_start|>{{ '\"parameters\"' }}").name(), "llama4");
    assert_eq!(format_of("<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>").name(), "deepseek");
}

/// Fragments of valid and invalid replies.
const BITS: [&str; 40] = [
    "<tool_call>",
    "</tool_call>",
    "<function=look>",
    "<parameter=place>",
    "<parameter=days>",
    "</parameter>",
    "</function>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "look",
    "<|channel|>",
    "analysis",
    "<|message|>",
    "<|end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<|start|>assistant",
    " to=functions.look",
    "{\"name\": \"look\", ",
    "\"arguments\": ",
    "\"parameters\": ",
    "{}",
    "{\"a\": \"é}\\\"\"}",
    "}",
    "[",
    "]",
    ", ",
    "\n",
    " ",
    "hello",
    "<",
    "<think>",
    "</think>",
    "END",
    "7",
    "😀",
];

proptest! {
    #[test]
    fn however_a_reply_is_cut_it_is_read_the_same(
        bits in prop::collection::vec(prop::sample::select(BITS.to_vec()), 0..80),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        is_cut in any::<bool>(),
        thinks in any::<bool>(),
    ) {
        let reply = bits.concat();
        let boundaries: Vec<usize> = reply.char_indices().map(|(at, _)| at).chain([reply.len()]).collect();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| *cut.get(&boundaries)).collect();
        cuts.extend([0, reply.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|pair| &reply[pair[0]..pair[1]]).collect();
        for format in FORMATS.into_iter().chain([&generic::Generic as &dyn ToolFormat]) {
            let whole = read(reader(format, thinks, &["END"]), &[&reply], is_cut);
            let cut = read(reader(format, thinks, &["END"]), &pieces, is_cut);
            prop_assert_eq!(&whole, &cut, "{}: {}", format.name(), reply);
        }
    }

    #[test]
    fn arguments_come_through_to_the_letter(
        text in "[ -~é😀\\n]{0,30}",
        n in any::<i32>(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let arguments = json!({ "place": text, "days": n, "deep": { "x": [text, null] } });
        let call = |before: &str, between: &str, after: &str| format!("{before}look{between}{arguments}{after}");
        let replies: [(&dyn ToolFormat, String); 5] = [
            (&hermes::Hermes, call("<tool_call>\n{\"name\": \"", "\", \"arguments\": ", "}\n</tool_call>")),
            (&llama3::LlamaVersion::V3, call("{\"name\": \"", "\", \"parameters\": ", "}")),
            (&mistral::Mistral, call("[TOOL_CALLS][{\"name\": \"", "\", \"arguments\": ", "}]")),
            (&mistral_args::MistralArgs, call("[TOOL_CALLS]", "[ARGS]", "")),
            (&harmony::Harmony, call("<|channel|>commentary to=functions.", "<|constrain|>json<|message|>", "<|call|>")),
        ];
        for (format, reply) in replies {
            let boundaries: Vec<usize> = reply.char_indices().map(|(at, _)| at).chain([reply.len()]).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| *cut.get(&boundaries)).collect();
            cuts.extend([0, reply.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|pair| &reply[pair[0]..pair[1]]).collect();
            prop_assert_eq!(read(reader(format, false, &[]), &pieces, false), format!("[look({arguments})]"));
        }
    }
}
