//! A system message in mid-conversation keeps the prompt before it, with every template in `fixtures/templates` that
//! renders conversations, and with templates that move, drop or misrepresent it.

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use baton_model::template::{ChatTemplate, SpecialTokens, TemplateError};
use baton_schemas::generate::Conversation;
use serde_json::{Value, json};

fn prompt(template: &ChatTemplate, messages: Value, tools: &Value) -> Result<String, TemplateError> {
    let conversation: Conversation = serde_json::from_value(json!({ "messages": messages, "tools": tools })).unwrap();
    let pieces = template.render_pieces(&conversation, SystemTime::UNIX_EPOCH, 1 << 20)?;
    Ok(pieces.into_iter().map(|piece| piece.text).collect())
}

fn compile(source: &str) -> ChatTemplate {
    let special = SpecialTokens { bos: "<s>".into(), eos: "</s>".into(), ..SpecialTokens::default() };
    ChatTemplate::compile(source, special).unwrap()
}

fn fixture(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates");
    fs::read_to_string(folder.join(name).with_extension("jinja")).unwrap()
}

/// The prompt after the assistant's reply, once a system message and a question follow; the prompt up to the reply is
/// the same as without them.
#[track_caller]
fn added(name: &str, template: &ChatTemplate, tools: &Value) -> String {
    let mut messages = json!([
        { "role": "system", "content": "Be brief." },
        { "role": "user", "content": "Where is Oslo?" },
        { "role": "assistant", "content": "In Norway." },
        { "role": "user", "content": "And Rome?" },
    ]);
    let before = prompt(template, messages.clone(), tools).unwrap();
    let later = json!({ "role": "system", "content": "Answer in French." });
    messages.as_array_mut().unwrap().insert(3, later);
    let after = prompt(template, messages, tools).unwrap();
    let cached = &before[..before.find("In Norway.").unwrap() + "In Norway.".len()];
    let added = after.strip_prefix(cached).unwrap_or_else(|| panic!("{name}: the prompt changed: {after}"));
    assert_eq!(added.matches("Answer in French.").count(), 1, "{name}: {added}");
    assert!(added.find("French") < added.find("And Rome?"), "{name}: {added}");
    added.to_owned()
}

fn weather() -> Value {
    json!([{ "type": "function", "function": { "name": "weather", "description": "The weather", "parameters":
        { "type": "object", "properties": { "city": { "type": "string" } } } } }])
}

#[test]
fn the_prompt_before_a_later_system_message_stays() {
    let as_system = ["chatml", "llama3", "qwen2", "qwen3", "smollm2"];
    let as_user = ["deepseek", "gemma", "gemma3", "mistral"];
    for name in as_system.into_iter().chain(as_user) {
        let template = compile(&fixture(name));
        for tools in [json!([]), weather()] {
            // This template describes the tools in the last user message, wherever that is.
            if name == "mistral" && tools != json!([]) {
                continue;
            }
            let added = added(name, &template, &tools);
            let marked = "<system>\nAnswer in French.\n</system>\n\nAnd Rome?";
            assert_eq!(added.contains(marked), as_user.contains(&name), "{name}: {added}");
            assert_eq!(added.contains("system\n"), as_system.contains(&name) && name != "llama3", "{name}: {added}");
        }
    }
    let llama3 = added("llama3", &compile(&fixture("llama3")), &json!([]));
    assert!(llama3.contains("<|start_header_id|>system<|end_header_id|>\n\nAnswer in French.<|eot_id|>"), "{llama3}");
}

#[test]
fn a_template_is_judged_by_what_it_renders() {
    let frame = "'[' + m.role + ']' + m.content";
    let each = |body: &str| format!("{{% for m in messages %}}{body}{{% endfor %}}");
    let marked = "<system>\nAnswer in French.\n</system>";
    for (what, source, is_marked) in [
        ("renders every role", each(&format!("{{{{ {frame} }}}}")), false),
        ("drops it", each(&format!("{{% if loop.first or m.role != 'system' %}}{{{{ {frame} }}}}{{% endif %}}")), true),
        (
            "raises for it",
            each(&format!(
                "{{% if not loop.first and m.role == 'system' %}}{{{{ raise_exception('no') }}}}{{% endif %}}{{{{ {frame} }}}}"
            )),
            true,
        ),
        (
            "moves it to the front",
            format!(
                "{{% for m in messages if m.role == 'system' %}}{{{{ m.content }}}}{{% endfor %}}{}",
                each(&format!("{{% if m.role != 'system' %}}{{{{ {frame} }}}}{{% endif %}}"))
            ),
            true,
        ),
        ("shows it as the assistant's", each("{{ ('U:' if m.role == 'user' else 'A:') + m.content }}"), true),
        ("shows it as the user's", each("{{ ('A:' if m.role == 'assistant' else 'U:') + m.content }}"), true),
        (
            "shows it twice",
            each(&format!("{{{{ {frame} }}}}{{% if m.role == 'system' %}}{{{{ m.content }}}}{{% endif %}}")),
            true,
        ),
    ] {
        let added = added(what, &compile(&source), &json!([]));
        assert_eq!(added.contains(marked), is_marked, "{what}: {added}");
    }
}

#[test]
fn a_template_without_a_system_role_gets_its_text_in_a_user_message() {
    let gemma = compile(&fixture("gemma"));
    let messages = json!([{ "role": "system", "content": "Be brief." }, { "role": "user", "content": "Hi" }]);
    let text = prompt(&gemma, messages, &json!([])).unwrap();
    assert_eq!(text, "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n");
}

#[test]
fn neighbours_of_one_role_are_joined_where_the_template_requires_that_roles_alternate() {
    // What Codex sends first: context in a message of its own.
    let messages = json!([
        { "role": "system", "content": "Be brief." },
        { "role": "user", "content": "In Oslo." },
        { "role": "user", "content": "Hi" },
    ]);
    for (name, expected) in [
        ("gemma", "<start_of_turn>user\nBe brief.\n\nIn Oslo.\n\nHi<end_of_turn>\n"),
        ("mistral", "[INST] Be brief.\n\nIn Oslo.\n\nHi[/INST]"),
        ("qwen2", "<|im_start|>user\nIn Oslo.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"),
    ] {
        let text = prompt(&compile(&fixture(name)), messages.clone(), &json!([])).unwrap();
        assert!(text.contains(expected), "{name}: {text}");
    }
    // After a tool's result, the user's text joins it.
    let call = json!({ "id": "123456789", "type": "function", "function": { "name": "weather", "arguments": {} } });
    let messages = json!([
        { "role": "user", "content": "The weather?" },
        { "role": "assistant", "content": "", "tool_calls": [call] },
        { "role": "tool", "content": "4", "tool_call_id": "123456789" },
        { "role": "user", "content": "Go on." },
    ]);
    let text = prompt(&compile(&fixture("mistral")), messages, &weather()).unwrap();
    assert!(text.contains("4\n\nGo on."), "{text}");
    // A conversation that the template refuses for another reason is still refused.
    let answer_first = json!([{ "role": "assistant", "content": "Hi" }, { "role": "user", "content": "Hi" }]);
    let refused = prompt(&compile(&fixture("gemma")), answer_first, &json!([]));
    assert!(matches!(refused, Err(TemplateError::Rejected(why)) if why.contains("alternate")));
}

#[test]
fn a_conversation_that_the_template_rejects_in_every_place_has_its_system_text_first() {
    // After a tool's result this template takes no user message.
    let mistral = compile(&fixture("mistral"));
    let call = json!({ "id": "123456789", "type": "function", "function": { "name": "weather", "arguments": {} } });
    let messages = json!([
        { "role": "user", "content": "The weather?" },
        { "role": "assistant", "content": "", "tool_calls": [call] },
        { "role": "tool", "content": "4", "tool_call_id": "123456789" },
        { "role": "system", "content": "Answer in French." },
        { "role": "assistant", "content": "Froid." },
        { "role": "user", "content": "And tomorrow?" },
    ]);
    let text = prompt(&mistral, messages, &weather()).unwrap();
    assert!(text.contains("Answer in French.\n\nAnd tomorrow?"), "{text}");
}
