//! Forced replies that a limit cuts, at every byte of them.

use super::*;

/// A format, see [`FORCED`], and a call.
type Written = (&'static dyn ToolFormat, Option<(&'static str, &'static str)>, &'static str);

/// What replies of calls alone are made of: what stands before the first of them and between two, if a reply can hold two,
/// and a call.
const FORCED: [Written; 8] = [
    (&hermes::Hermes, Some(("", "\n")), "<tool_call>\n{\"name\": \"NAME\", \"arguments\": ARGUMENTS}\n</tool_call>"),
    (&generic::Generic, Some(("", "\n")), "<tool_call>\n{\"name\": \"NAME\", \"arguments\": ARGUMENTS}\n</tool_call>"),
    (&qwen_xml::QwenXml, Some(("", "\n")), "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>"),
    (&mistral::Mistral, Some(("[TOOL_CALLS][", ", ")), "{\"name\": \"NAME\", \"arguments\": ARGUMENTS}"),
    (&mistral_args::MistralArgs, Some(("", "")), "[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
    (
        &deepseek::DeepSeek,
        Some(("<｜tool▁calls▁begin｜>", "")),
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
    ),
    (&llama3::LlamaVersion::V3, None, "{\"name\": \"NAME\", \"parameters\": ARGUMENTS}"),
    (&harmony::Harmony, None, "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS"),
];

proptest! {
    #[test]
    fn a_forced_reply_that_a_limit_cuts_anywhere_has_no_markup_for_text(
        text in "[ -~é😀\\n]{0,12}",
        n in any::<i32>(),
        n_space in 0..3_usize,
        thinks in any::<bool>(),
    ) {
        let arguments = json!({ "place": text, "days": n }).to_string();
        let xml = format!("<parameter=place>\n{text}\n</parameter>\n<parameter=days>\n{n}\n</parameter>\n");
        for (format, between, call) in FORCED {
            let arguments = if call.contains("<function=") { &xml } else { &arguments };
            let one = call.replace("ARGUMENTS", arguments);
            let first = one.replace("NAME", "look");
            let second = one.replace("NAME", "stop");
            let tags = thinks && format.name() != "harmony";
            let reply = match between {
                Some((before, between)) => format!("{before}{first}{between}{second}"),
                None => first,
            };
            let thought = if tags { "<think>\nhm\n</think>\n" } else { "" };
            let reply = format!("{thought}{}{reply}", "\n".repeat(n_space));
            for (cut, _) in reply.char_indices() {
                let reply = &reply[..cut];
                let forced = Holds { only_calls: true, ..Holds::default() };
                let thought = tags.then(|| Thought::new(THINK, false));
                let mut reader = ReplyReader::new(thought, Some(format.parser(&tools())), Vec::new(), forced);
                let mut parts = reader.feed(reply.to_owned());
                parts.extend(reader.finish(true));
                let texts = parts.iter().filter(|part| matches!(part, PartContent::Text(_))).count();
                prop_assert_eq!(texts, 0, "{}: {:?} is read as {:?}", format.name(), reply, parts);
                let last = parts.iter().rev().find_map(|part| match part {
                    PartContent::Call(step) => Some(step),
                    _ => None,
                });
                let is_bare = matches!(last, Some(ToolCallDelta::Begin { .. }));
                prop_assert!(!is_bare, "{}: {:?} is read as {:?}", format.name(), reply, parts);
            }
        }
    }
}
