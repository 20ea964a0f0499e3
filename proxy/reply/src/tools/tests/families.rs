//! A reply of each family that people run, with its control tokens, cut at every place and read by the form that the
//! family's template gives it.

use baton_schemas::generate::{Conversation, GenerateRequest, Input};
use baton_schemas::openai::ChatRequest;
use baton_schemas::sequence::GeneratedToken;

use super::*;
use crate::choice::ChoiceReply;

struct Family {
    name: &'static str,
    /// The chat template, or the words of it that tell the family.
    template: &'static str,
    /// The end of the prompt.
    prompt_end: &'static str,
    /// Control tokens of the model that the reply has.
    control: &'static [&'static str],
    reply: &'static str,
    /// See [`show`].
    expected: &'static str,
}

macro_rules! template {
    ($name:literal) => {
        include_str!(concat!("../../../../../tests/fixtures/templates/", $name, ".jinja"))
    };
}

const FAMILIES: [Family; 8] = [
    Family {
        name: "Qwen3-Coder",
        template: template!("qwen3-coder"),
        prompt_end: "<|im_start|>assistant\n",
        control: &["<|im_end|>"],
        reply: "I look.\n\n<tool_call>\n<function=look>\n<parameter=place>\nKöln\n\"<b>\" 😀\n</parameter>\n\
            <parameter=days>\n3\n</parameter>\n<parameter=deep>\n{\"a\": [1, \"x\"]}\n</parameter>\n</function>\n</tool_call>\n\
            <tool_call>\n<function=stop>\n</function>\n</tool_call><|im_end|>",
        expected: "I look.[look({\"place\": \"Köln\\n\\\"<b>\\\" 😀\", \"days\": 3, \"deep\": {\"a\": [1, \"x\"]}})][stop({})]",
    },
    Family {
        name: "gpt-oss",
        template: template!("gpt-oss"),
        prompt_end: "<|start|>assistant",
        control: &["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"],
        reply: "<|channel|>analysis<|message|>Köln 😀? I look.<|end|><|start|>assistant<|channel|>commentary<|message|>\
            I look.<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>\
            {\"place\": \"Köln }\", \"days\": 3}<|call|>",
        expected: "{Köln 😀? I look.}I look.[look({\"place\": \"Köln }\", \"days\": 3})]",
    },
    Family {
        name: "gpt-oss, with the recipient before the channel",
        template: template!("gpt-oss"),
        prompt_end: "<|start|>assistant",
        control: &["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"],
        reply: " to=functions.look<|channel|>commentary json<|message|>{\"place\": \"Köln\"}<|call|>",
        expected: "[look({\"place\": \"Köln\"})]",
    },
    Family {
        name: "Gemma 3",
        template: "<start_of_turn>model",
        prompt_end: "<start_of_turn>model\n",
        control: &["<end_of_turn>"],
        reply: "I look.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"place\": \"Köln 😀\", \"days\": 3}}\n</tool_call>\n\
            <tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call><end_of_turn>",
        expected: "I look.[look({\"place\": \"Köln 😀\", \"days\": 3})][stop({})]",
    },
    Family {
        name: "Llama 3",
        template: "<|start_header_id|>\"parameters\"",
        prompt_end: "<|end_header_id|>\n\n",
        control: &["<|python_tag|>", "<|eot_id|>"],
        reply: "<|python_tag|>{\"name\": \"look\", \"parameters\": {\"place\": \"Köln \\\"}\\\" 😀\", \"days\": 3}}<|eot_id|>",
        expected: "[look({\"place\": \"Köln \\\"}\\\" 😀\", \"days\": 3})]",
    },
    Family {
        name: "Llama 4",
        template: "<|header_start|>\"parameters\"",
        prompt_end: "<|header_end|>\n\n",
        control: &["<|python_start|>", "<|python_end|>", "<|eot|>"],
        reply: "<|python_start|>I look in Köln 😀.<|python_end|>{\"name\": \"look\", \"parameters\": {\"place\": \"Köln\", \"days\": 3}}\
            {\"name\": \"stop\", \"parameters\": {}}<|eot|>",
        expected: "I look in Köln 😀.[look({\"place\": \"Köln\", \"days\": 3})][stop({})]",
    },
    Family {
        name: "Mistral",
        template: template!("mistral-small-3.2"),
        prompt_end: "[/INST]",
        control: &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "</s>"],
        reply: "I look.[TOOL_CALLS]look[CALL_ID]a1B2c3D4e[ARGS]{\"place\": \"Köln [ARGS] 😀\", \"days\": 3}[TOOL_CALLS]stop[ARGS]{}</s>",
        expected: "I look.[look({\"place\": \"Köln [ARGS] 😀\", \"days\": 3})][stop({})]",
    },
    Family {
        name: "DeepSeek V3.1",
        template: template!("deepseek-v3.1"),
        prompt_end: "<｜Assistant｜><think>",
        control: &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
            "<｜end▁of▁sentence｜>",
        ],
        reply: "Köln 😀? I look.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>\
            {\"place\": \"Köln }<｜\", \"days\": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜>\
            <｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        expected: "{Köln 😀? I look.}I look.[look({\"place\": \"Köln }<｜\", \"days\": 3})][stop({})]",
    },
];

/// A request for a chat with [`tools`].
fn request() -> GenerateRequest {
    let body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }] });
    let mut request = ChatRequest::parse(body.to_string().as_bytes(), 1).unwrap().generate;
    request.tools.tools = tools();
    request
}

impl Family {
    /// Reads the reply from tokens that end at these bytes and around control tokens.
    fn read(&self, form: &ReplyForm, cuts: &[usize]) -> String {
        let mut reply = ChoiceReply::new(form, &[]);
        let mut parts = Vec::new();
        let mut begun = 0;
        while begun < self.reply.len() {
            let rest = &self.reply.as_bytes()[begun..];
            let at_control = |at: usize| self.control.iter().find(|token| rest[at..].starts_with(token.as_bytes()));
            let (n_bytes, special) = match at_control(0) {
                Some(token) => (token.len(), true),
                None => {
                    let control = (1..rest.len()).find(|at| at_control(*at).is_some()).unwrap_or(rest.len());
                    let cut = cuts.iter().filter(|cut| **cut > begun).min().map_or(rest.len(), |cut| cut - begun);
                    (control.min(cut), false)
                }
            };
            let token =
                GeneratedToken { id: 0, bytes: rest[..n_bytes].to_vec(), special, logprobs: None, drafts: None };
            parts.extend(reply.feed(token).parts);
            begun += n_bytes;
        }
        parts.extend(reply.finish(FinishReason::Stop).parts);
        show(parts.into_iter().map(|part| part.content).collect())
    }
}

#[test]
fn a_reply_of_every_family_is_read_the_same_wherever_its_tokens_end() {
    for family in FAMILIES {
        let mut form = ReplyForm::of(&request(), family.template).unwrap();
        form.read_prompt_tail(family.prompt_end);
        let n = family.reply.len();
        let check = |cuts: &[usize]| {
            assert_eq!(family.read(&form, cuts), family.expected, "{} in pieces that end at {cuts:?}", family.name);
        };
        check(&[]);
        for first in 1..n {
            check(&[first]);
            // Every token alone, with one cut before it and one after it.
            (1..=24).for_each(|n_bytes| check(&[first, first + n_bytes]));
        }
        for n_bytes in 1..n {
            check(&(1..).map(|i| i * n_bytes).take_while(|cut| *cut < n).collect::<Vec<_>>());
        }
    }
}

/// The conversation that a template gets after a call with two calls and their results.
fn presented(template: &str) -> Conversation {
    let call = |id: &str, name: &str| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": { "days": 3 } } });
    let messages = json!([
        { "role": "user", "content": "hi" },
        { "role": "assistant", "content": "", "reasoning_content": "hm",
            "tool_calls": [call("a", "look"), call("b", "stop")] },
        { "role": "tool", "content": "4", "tool_call_id": "a" },
        { "role": "tool", "content": "5", "tool_call_id": "b" },
    ]);
    let mut request = request();
    let conversation: Conversation = serde_json::from_value(json!({ "messages": messages })).unwrap();
    request.input = Input::Chat(conversation.clone());
    ReplyForm::of(&request, template).unwrap().present(&conversation).into_owned()
}

#[test]
fn earlier_calls_have_the_form_that_the_familys_template_reads() {
    let roles = |conversation: &Conversation| -> String {
        conversation.messages.iter().map(|m| format!("{}{} ", m.role.as_str(), m.tool_calls.len())).collect()
    };
    for one_call in [template!("gpt-oss"), "<|start_header_id|>\"parameters\""] {
        assert_eq!(roles(&presented(one_call)), "user0 assistant1 tool0 assistant1 tool0 ");
    }
    for any_number in [template!("qwen3-coder"), template!("mistral-small-3.2"), "<|header_start|>\"parameters\""] {
        assert_eq!(roles(&presented(any_number)), "user0 assistant2 tool0 tool0 ");
    }
    let gpt_oss = presented(template!("gpt-oss"));
    assert_eq!((gpt_oss.messages[1].thinking.as_deref(), &gpt_oss.messages[3].thinking), (Some("hm"), &None));
    assert_eq!(gpt_oss.tools[0]["function"]["description"], "");
    let deepseek = presented(template!("deepseek-v3.1"));
    assert_eq!(deepseek.messages[2].tool_calls[0]["function"]["arguments"], "{\"days\":3}");
    assert!(deepseek.messages[0].content.contains("### look\n"), "its template does not describe the tools");
    let converting = presented(&template!("deepseek-v3.1").replace("['arguments']", "['arguments'] | tojson"));
    assert_eq!(converting.messages[2].tool_calls[0]["function"]["arguments"], json!({ "days": 3 }));
}
