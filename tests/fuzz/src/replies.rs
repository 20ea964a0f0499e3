//! Text that a model writes, in the form of each family: reasoning, calls, stop strings.

use std::sync::LazyLock;

use baton_reply::tools::{PartContent, ReplyForm};
use baton_reply::{ChoiceReply, ReplyPart};
use baton_schemas::FinishReason;
use baton_schemas::openai::ChatRequest;
use baton_schemas::sequence::GeneratedToken;
use baton_schemas::tools::ToolCallDelta;

/// What makes a template one of each family.
const TEMPLATES: [&str; 9] = [
    "<|channel|><|message|>",
    "<function= <parameter=",
    "[TOOL_CALLS] [ARGS]",
    "[TOOL_CALLS]",
    "<|start_header_id|> \"parameters\"",
    "<tool_call> arguments",
    "<tool_call> arguments </think>",
    "",
    "[TOOL_CALLS] [/THINK]",
];

/// Requests that a reply may answer: with free calls, forced ones, one at most, and without tools.
static REQUESTS: LazyLock<[ChatRequest; 4]> = LazyLock::new(|| {
    let tools = r#""tools":[{"type":"function","function":{"name":"look","parameters":{"type":"object","properties":{"place":{"type":"string"},"days":{"type":"integer"},"deep":{"type":"object"}}}}},{"type":"function","function":{"name":"stop"}}]"#;
    let more = [
        format!(r#"{tools},"stop":["END","a stop"]"#),
        format!(r#"{tools},"tool_choice":"required""#),
        format!(r#"{tools},"parallel_tool_calls":false"#),
        r#""stop":["END"]"#.to_owned(),
    ];
    more.map(|more| {
        let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],{more}}}"#);
        ChatRequest::parse(body.as_bytes(), 1).expect("a valid request")
    })
});

/// A byte that names the family, one with the request and the end, then the reply. However it is cut into tokens, it says
/// the same.
pub(crate) fn model_replies(input: &[u8]) -> bool {
    let [family, how, reply @ ..] = input else { return false };
    let template = TEMPLATES[usize::from(*family) % TEMPLATES.len()];
    let request = &REQUESTS[usize::from(how & 3)].generate;
    let mut form = ReplyForm::of(request, template).expect("the request does not ask for thinking");
    form.read_prompt_tail(if how & 4 != 0 { "<think>" } else { "" });
    let reason = if how & 8 != 0 { FinishReason::Length } else { FinishReason::Stop };
    let at_once = read(&form, &request.stop, reason, std::iter::once(reply));
    let size = reply.len() % 5 + 1;
    assert_eq!(read(&form, &request.stop, reason, reply.chunks(size)), at_once, "where tokens end makes a difference");
    true
}

/// The parts of a reply, joined, without ids, and why it ended.
fn read<'a>(
    form: &ReplyForm,
    stops: &[String],
    reason: FinishReason,
    tokens: impl Iterator<Item = &'a [u8]>,
) -> (Vec<PartContent>, FinishReason) {
    let mut reply = ChoiceReply::new(form, stops);
    let mut seen = Parts::default();
    let mut is_stopped = false;
    for bytes in tokens {
        let token = GeneratedToken { id: 1, bytes: bytes.to_vec(), special: false, logprobs: None, drafts: None };
        let step = reply.feed(token);
        seen.add(step.parts);
        is_stopped = step.stopped;
        if is_stopped {
            break;
        }
    }
    if !is_stopped {
        seen.add(reply.finish(reason).parts);
    }
    (seen.parts, reply.reason(reason))
}

#[derive(Default)]
struct Parts {
    parts: Vec<PartContent>,
    n_begun: u32,
    is_open: bool,
}

impl Parts {
    fn add(&mut self, parts: impl IntoIterator<Item = ReplyPart>) {
        for ReplyPart { content, .. } in parts {
            self.part(content);
        }
    }

    fn part(&mut self, part: PartContent) {
        match (self.parts.last_mut(), part) {
            (Some(PartContent::Text(last)), PartContent::Text(text))
            | (Some(PartContent::Reasoning(last)), PartContent::Reasoning(text)) => last.push_str(&text),
            (last, PartContent::Call(ToolCallDelta::Arguments { index, fragment })) => {
                assert!(self.is_open && index + 1 == self.n_begun, "arguments outside of their call");
                match last {
                    Some(PartContent::Call(ToolCallDelta::Arguments { fragment: last, .. })) => {
                        last.push_str(&fragment)
                    }
                    _ => self.parts.push(PartContent::Call(ToolCallDelta::Arguments { index, fragment })),
                }
            }
            (_, PartContent::Call(ToolCallDelta::Begin { index, name, .. })) => {
                assert!(!self.is_open && index == self.n_begun, "calls are numbered and do not overlap");
                self.is_open = true;
                self.n_begun += 1;
                self.parts.push(PartContent::Call(ToolCallDelta::Begin { index, id: String::new(), name }));
            }
            (_, PartContent::Call(ToolCallDelta::End { index })) => {
                assert!(self.is_open && index + 1 == self.n_begun, "an end without a call");
                self.is_open = false;
                self.parts.push(PartContent::Call(ToolCallDelta::End { index }));
            }
            (_, PartContent::Text(text)) if text.is_empty() => {}
            (_, part) => self.parts.push(part),
        }
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let all: [(u8, u8, &str); 11] = [
        (0, 0, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>é END x"),
        (0, 1, "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{\"place\":\"x\"}<|call|>"),
        (
            1,
            0,
            "<tool_call>\n<function=look>\n<parameter=place>\na\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        ),
        (2, 0, "[TOOL_CALLS]look[ARGS]{\"place\":\"x\"}[TOOL_CALLS]stop[ARGS]{}"),
        (3, 8, "[TOOL_CALLS][{\"name\": \"look\", \"arguments\": {\"days\": 1}}, {\"name\": \"stop\", \"argu"),
        (4, 0, "{\"name\": \"look\", \"parameters\": {\"place\": \"x\\n\"}}"),
        (4, 0, "<|python_tag|>{\"name\": \"stop\", \"parameters\": {}}"),
        (
            5,
            2,
            "I look. <tool_call>\n{\"name\": \"look\", \"arguments\": {\"deep\": {\"a\": [1]}}}\n</tool_call>\n<tool_call>",
        ),
        (6, 4, "hm</think>\n\nA text with a stop and more"),
        (7, 0, "```json\n{\"name\": \"stop\"}\n```"),
        (8, 3, "[THINK]hm[/THINK]text END"),
    ];
    all.iter().map(|(family, how, reply)| [&[*family, *how], reply.as_bytes()].concat()).collect()
}
