use serde_json::json;

use super::*;

const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe helpful<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn conversation(value: serde_json::Value) -> Conversation {
    serde_json::from_value(value).unwrap()
}

fn user(content: &str) -> Conversation {
    conversation(json!({ "messages": [{ "role": "user", "content": content }] }))
}

fn render(source: &str, conversation: &Conversation) -> Result<String, TemplateError> {
    let special = SpecialTokens { bos: "<s>".into(), eos: "</s>".into(), ..SpecialTokens::default() };
    ChatTemplate::compile(source, special)?.render(conversation, SystemTime::UNIX_EPOCH)
}

#[track_caller]
fn check(source: &str, conversation: serde_json::Value, expected: &str) {
    let conversation = self::conversation(conversation);
    assert_eq!(render(source, &conversation).as_deref(), Ok(expected), "{source}");
}

#[test]
fn chatml_with_its_default_system_prompt() {
    assert_eq!(
        render(CHATML, &user("Hi")).unwrap(),
        "<|im_start|>system\nBe helpful<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
}

#[test]
fn what_templates_in_the_wild_use() {
    let chat = || {
        json!({ "messages": [
            { "role": "user", "content": " a " },
            { "role": "assistant", "content": "<think>t</think>\n\nb" },
            { "role": "user", "content": "c" },
        ]})
    };
    // Loop controls, slices, reversed lists, namespaces, Python's string methods, tests.
    check(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
        chat(),
        " a c",
    );
    check("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", chat(), " a ");
    check("{% for m in messages[1:] %}{{ loop.index0 }}{{ m['role'] }};{% endfor %}", chat(), "0assistant;1user;");
    check("{% for m in messages[::-1] %}{{ m.content[:1] }}{% endfor %}", chat(), "c< ");
    check(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        chat(),
        "3",
    );
    check(
        "{{ messages[1].content.split('</think>')[-1].lstrip('\\n') }}|{{ messages[0].content.strip() }}",
        chat(),
        "b|a",
    );
    check("{{ messages[0].content | trim }}{{ messages[-1]['content'].startswith('c') }}", chat(), "aTrue");
    check(
        "{% if messages[0] is mapping and messages[0].content is string and nothing is not defined %}ok{% endif %}",
        chat(),
        "ok",
    );
    check("{% for k, v in messages[2].items() %}{{ k }}={{ v }};{% endfor %}", chat(), "role=user;content=c;");
    check("{{ messages[0].get('name', 'none') }}{{ messages[0].tool_calls is defined }}", chat(), "noneFalse");
    check("{% macro shout(x) %}{{ x | upper }}!{% endmacro %}{{ shout('a') }}", chat(), "A!");
    check(
        "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ none }}{{ true }}{{ missing }}",
        chat(),
        "<s></s>TrueNoneTrue",
    );
    check("{%- generation -%} x {%- endgeneration -%}{% generation %}y{% endgeneration %}", chat(), "xy");
    check("{{ strftime_now('%d %b %Y') }}", chat(), &strftime("%d %b %Y", SystemTime::UNIX_EPOCH).unwrap());
}

#[test]
fn blocks_leave_no_lines_behind() {
    check("a\n  {% if true %}\nb\n  {% endif %}\nc", json!({ "messages": [] }), "a\nb\nc");
}

#[test]
fn tojson_writes_what_python_writes() {
    let tools = json!({ "messages": [], "tools": [{ "z": 1, "a": "<é>", "l": [1, 2], "e": {}, "n": null }] });
    check("{{ tools[0] | tojson }}", tools.clone(), r#"{"z": 1, "a": "<é>", "l": [1, 2], "e": {}, "n": null}"#);
    check(
        "{{ tools[0] | tojson(indent=2) }}",
        tools,
        "{\n  \"z\": 1,\n  \"a\": \"<é>\",\n  \"l\": [\n    1,\n    2\n  ],\n  \"e\": {},\n  \"n\": null\n}",
    );
}

#[test]
fn a_template_may_refuse_messages() {
    let alternation = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}";
    let twice = conversation(json!({ "messages": [{ "role": "user" }, { "role": "user" }] }));
    assert_eq!(render(alternation, &twice), Err(TemplateError::Rejected("Roles must alternate".into())));
    assert!(render(alternation, &user("x")).is_ok());
}

#[test]
fn arguments_reach_the_template_but_replace_nothing() {
    let args = json!({ "enable_thinking": false, "messages": [], "bos_token": "x", "add_generation_prompt": false });
    let mut chat = user("hi");
    chat.template_args = args.as_object().unwrap().clone();
    let text = render("{{ enable_thinking }}{{ messages | length }}{{ bos_token }}{{ add_generation_prompt }}", &chat);
    assert_eq!(text.as_deref(), Ok("False1<s>False"));
}

#[test]
fn both_names_of_the_switch_for_thinking_are_set() {
    for (args, expected) in [
        (json!({}), ""),
        (json!({ "enable_thinking": true }), "True"),
        (json!({ "enable_thinking": false, "reasoning_effort": "high" }), "False"),
        (json!({ "reasoning_effort": "low" }), "True"),
        (json!({ "reasoning_effort": "none" }), "False"),
        (json!({ "enable_thinking": true, "thinking": false }), "False"),
    ] {
        let mut chat = user("hi");
        chat.template_args = args.as_object().unwrap().clone();
        assert_eq!(render("{{ thinking }}", &chat).as_deref(), Ok(expected), "{args}");
    }
}

#[test]
fn a_template_cannot_run_for_ever_or_write_without_end() {
    let endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}";
    assert!(matches!(render(endless, &user("x")), Err(TemplateError::Failed(_))));
    let wide = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}";
    assert!(matches!(render(wide, &user(&"x".repeat(1 << 20))), Err(TemplateError::Failed(_))));
    let deep = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(matches!(render(deep, &user("x")), Err(TemplateError::Failed(_))));
}

#[test]
fn a_broken_template_is_named_when_it_is_compiled() {
    let broken = ChatTemplate::compile("{% if %}", SpecialTokens::default());
    assert!(matches!(broken, Err(TemplateError::Failed(message)) if message.contains("syntax")));
    assert!(ChatTemplate::compile(&" ".repeat(MAX_SOURCE_BYTES + 1), SpecialTokens::default()).is_err());
}

#[test]
fn numbers_of_calls_tools_and_variables_are_rendered_as_they_were_written() {
    let arguments = r#"{"id":12345678901234567890123,"list":[-98765432109876543210,{"a":18446744073709551616}],"n":5}"#;
    let long = r#"{"b":1e999,"a":[1e-400,0.1234567890123456789,-1234567890123456789012345678901234567890123]}"#;
    let call = format!(r#"{{"id":"c","function":{{"name":"f","arguments":{arguments}}}}}"#);
    let tool =
        format!(r#"{{"type":"function","function":{{"name":"f","parameters":{{"type":"object","default":{long}}}}}}}"#);
    let body = format!(
        r#"{{"model":"m","messages":[{{"role":"assistant","tool_calls":[{call}]}}],"tools":[{tool}],"chat_template_kwargs":{{"x":{long}}}}}"#
    );
    let request = baton_schemas::openai::ChatRequest::parse(body.as_bytes(), 0).unwrap().generate;
    let baton_schemas::generate::Input::Chat(mut conversation) = request.input else { panic!("no chat") };
    conversation.tools = request.tools.offered().iter().map(|tool| tool.definition()).collect();
    // As it crosses to a node.
    let conversation: Conversation = serde_json::from_str(&serde_json::to_string(&conversation).unwrap()).unwrap();
    let spaced = |json: &str| json.replace(':', ": ").replace(',', ", ");
    let [arguments, long] = [arguments, long].map(spaced);
    let (b, a) = long[1..long.len() - 1].split_at(long.find(", \"a\"").unwrap() - 1);
    let sorted = format!("{{{}, {b}}}", a.trim_start_matches(", "));
    for (template, expected) in [
        ("{{ messages[0].tool_calls[0].function.arguments | tojson }}", arguments.as_str()),
        ("{{ messages[0].tool_calls[0].function.arguments.id }}", "12345678901234567890123"),
        (
            "{% for k, v in messages[0].tool_calls[0].function.arguments | items %}{{ k }}={{ v }} {% endfor %}",
            "id=12345678901234567890123 list=[-98765432109876543210, {'a': 18446744073709551616}] n=5 ",
        ),
        (
            "{{ messages[0].tool_calls[0] | tojson }}",
            &format!(r#"{{"id": "c", "type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}"#),
        ),
        ("{{ x | tojson }}", &long),
        ("{{ x | tojson(sort_keys=true) }}", &sorted),
        ("{{ x.b }} {{ x.b | string }} {{ x.a }}", &format!("1e999 1e999 {}", &a[a.find('[').unwrap()..])),
        ("{{ tools[0].function.parameters.default | tojson }}", &long),
    ] {
        assert_eq!(render(template, &conversation).as_deref(), Ok(expected), "{template}");
    }
    // Also where a part of a key, or of a number, is spelled like a control token.
    let special = SpecialTokens { control: vec!["id".into(), "9".into()], ..SpecialTokens::default() };
    let template = "{{ messages[0].tool_calls[0].function.arguments | tojson }} {{ x | tojson }}";
    let template = ChatTemplate::compile(template, special).unwrap();
    let pieces = template.render_pieces(&conversation, SystemTime::UNIX_EPOCH, 10_000).unwrap();
    let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
    assert_eq!(text, format!("{arguments} {long}"));
}
