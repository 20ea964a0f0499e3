//! Grammars that clients write, in Lark's notation and in GBNF.

use baton_schemas::generate::GenerateRequest;
use baton_schemas::openai::{CompletionRequest, InvalidRequest, ResponsesRequest};
use serde_json::json;

/// The most bytes that a request's grammars may be written as take 1 MiB. A list may have as much unused space as it has
/// used.
const MAX_RULE_BYTES: usize = 3 << 20;

/// The most bytes of a custom tool: its grammar for the model, its pattern, and the schema around it.
const MAX_TOOL_BYTES: usize = 256 << 10;

/// A byte that says who sets the grammar, then the grammar: a custom tool, which takes Lark's notation, or a field, which
/// takes both.
pub(crate) fn grammars(input: &[u8]) -> bool {
    let [place, text @ ..] = input else { return false };
    let Ok(grammar) = std::str::from_utf8(text) else { return false };
    let request = match place % 2 {
        0 => {
            let request = parsed(CompletionRequest::parse(in_field(grammar).as_bytes(), 1));
            request.and_then(|request| request.prompts.into_iter().next())
        }
        _ => parsed(ResponsesRequest::parse(of_tool(grammar).as_bytes(), 1)).map(|request| request.generate),
    };
    request.is_some_and(|request| is_bounded(&request))
}

fn in_field(grammar: &str) -> String {
    json!({ "model": "m", "prompt": "a", "grammar": grammar }).to_string()
}

fn of_tool(grammar: &str) -> String {
    let format = json!({ "type": "grammar", "syntax": "lark", "definition": grammar });
    json!({ "model": "m", "input": "a", "tools": [{ "type": "custom", "name": "t", "format": format }] }).to_string()
}

fn parsed<T>(parsed: Result<T, InvalidRequest>) -> Option<T> {
    parsed.inspect_err(|refused| assert!(!refused.message.is_empty(), "a refusal without words")).ok()
}

/// Checks the size of what a grammar became. Always `true`.
fn is_bounded(request: &GenerateRequest) -> bool {
    let n_bytes = request.constraint.as_ref().map_or(0, |constraint| constraint.memory_bytes());
    assert!(n_bytes <= MAX_RULE_BYTES, "a rule of {n_bytes} bytes");
    for tool in request.tools.tools.iter() {
        let n_bytes = tool.memory_bytes();
        assert!(n_bytes <= MAX_TOOL_BYTES, "a tool of {n_bytes} bytes");
    }
    true
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let gbnf = [
        "# a list\nroot ::= \"(\" item{1,3} \")\"\nitem ::= word | root\nword ::= [^a-c\\]\\x41-]+ | \"x\\n\" . (\n \"y\" |\n word2 )?\nword2 ::= \"\\u00e4\"",
        "root ::= ws object\nobject ::= \"{\" (pair (\",\" ws pair)*)? \"}\" ws\npair ::= string \":\" ws value\nvalue ::= object | string | [0-9]+ ws\nstring ::= \"\\\"\" [^\"]* \"\\\"\" ws\nws ::= [ \\t\\n]*",
        "root ::= a-b{2,3} a-b{4} a-b*\na-b ::= [a-z]",
    ];
    let lark = [
        "%import common (INT, WS)\n%import common.CR -> END\n%ignore WS\n%ignore /#[^\\n]*/\n?start: sum -> whole\nsum.2: product (\"+\" product)*\nproduct: INT | \"A\"i..\"F\" | [INT] END~2..3 \"x\"{,3}",
        "start: line+\nline: NAME \"=\" /[a-z\\/]+/is \"\\n\"\nNAME: LETTER (LETTER | \"_\")*\nLETTER: \"a\"..\"z\" // one",
    ];
    let recursive = "%ignore \" \"\nstart: value\nvalue: \"[\" [value (\",\" value)*] \"]\" | NUMBER\nNUMBER: /[0-9]+/";
    let of = |place: u8, text: &&str| [&[place], text.as_bytes()].concat();
    let in_field = gbnf.iter().chain(&lark).chain([&recursive]).map(|text| of(0, text));
    in_field.chain(lark.iter().map(|text| of(1, text))).collect()
}
