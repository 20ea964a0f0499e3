//! Custom tools: the model gives them one text, which may have to follow a grammar. Here such a tool is a function of one
//! string, [`INPUT`].

use serde_json::{Value, json};

use crate::grammar::{GrammarError, MAX_GRAMMAR, WriteBudget, pattern_of, whole};
use crate::held_schema::Unheld;
use crate::request::field::{Field, join, object};
use crate::request::schema::Variant;
use crate::request::{InvalidRequest, room};
use crate::tools::{Described, Strictness, Tool};

/// The argument that stands for the whole input of a custom tool.
pub(super) const INPUT: &str = "input";

object! {
    /// The form of the text that the model gives a custom tool: any text, or text that follows a grammar.
    pub(crate) struct CustomFormat {
        /// The kind of form.
        r#type: Field<String>,
        /// The grammar's notation: `lark`, or `regex` in the syntax of Rust's crate `regex`.
        #[schemars(extend("enum" = ["lark", "regex"]))]
        syntax: Field<String>,
        /// The grammar.
        definition: Field<String>,
    }
    by "type" {
        Variant { words: &["text"], is_default: true, ..Variant::NEW },
        Variant { words: &["grammar"], needs: &["syntax", "definition"], ..Variant::NEW },
    }
}

/// The form of a custom tool's input.
pub(super) struct CustomTool {
    /// The instructions to the model about the form.
    about: String,
    /// The regular expression of the whole input, if not every text is allowed.
    pattern: Option<String>,
}

impl CustomTool {
    /// Checks the form at the path `at`, and takes what its grammar is written as from the budget.
    pub(super) fn check(
        at: &str,
        format: Option<CustomFormat>,
        budget: &mut WriteBudget,
    ) -> Result<CustomTool, InvalidRequest> {
        let any = || CustomTool { about: format!("The argument `{INPUT}` is the whole input."), pattern: None };
        let Some(format) = format else { return Ok(any()) };
        match format.r#type.get(at)?.as_deref() {
            None | Some("text") => return Ok(any()),
            Some("grammar") => {}
            Some(_) => return Err(InvalidRequest::at(join(at, "type"), "must be text or grammar")),
        }
        let syntax = format.syntax.required("syntax", at)?;
        let definition = format.definition.required("definition", at)?;
        let (notation, pattern) = match syntax.as_str() {
            "lark" => ("follows this Lark grammar", pattern_of(&definition, budget)),
            "regex" if definition.len() > MAX_GRAMMAR => ("", Err(GrammarError::TooLong)),
            "regex" => ("matches this regular expression", Ok(whole(&definition).to_owned())),
            _ => return Err(InvalidRequest::at(join(at, "syntax"), "must be lark or regex")),
        };
        let pattern = pattern.map_err(|error| InvalidRequest::at(join(at, "definition"), error))?;
        let about = format!("The argument `{INPUT}` is the whole input, which {notation}:\n{definition}");
        Ok(CustomTool { about, pattern: Some(pattern) })
    }

    /// Returns the function that stands for the tool.
    pub(super) fn tool(self, name: String, description: Option<String>) -> Tool {
        let description = match description {
            Some(description) => format!("{description}\n\n{}", self.about),
            None => self.about,
        };
        // Grammars have a budget of their own, so this only notes what the pattern takes.
        room::take(self.pattern.as_ref().map_or(0, String::len));
        let parameters = |input: Value| json!({ "type": "object", "properties": { INPUT: input }, "required": [INPUT], "additionalProperties": false });
        Tool {
            name,
            description: Some(description),
            parameters: parameters(json!({ "type": "string" })),
            strict: if self.pattern.is_some() { Strictness::Strict } else { Strictness::IfKnown },
            unheld: Unheld::default(),
            held: self.pattern.map(|all| parameters(json!({ "type": "string", "pattern": format!("^(?:{all})$") }))),
            described: Described::InList,
        }
    }
}

/// Reads the input out of a call's arguments, which arrive in pieces: `{"input": "…"}`.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct InputReader {
    place: InputPlace,
    /// The text that is not understood yet.
    pending: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum InputPlace {
    /// Before the string.
    #[default]
    Before,
    /// In the string.
    Inside,
    /// After the string.
    After,
    /// The arguments have another form.
    Other,
}

impl InputReader {
    /// Takes the next piece of the arguments. Returns the next piece of the input.
    pub(super) fn feed(&mut self, fragment: &str) -> String {
        if self.place == InputPlace::After {
            return String::new();
        }
        self.pending.push_str(fragment);
        if self.place == InputPlace::Before {
            self.open();
        }
        let mut input = String::new();
        if self.place == InputPlace::Inside {
            self.read(&mut input);
        }
        input
    }

    /// Ends the arguments. Returns the rest of the input: a model that is not held to the form may write another one, and
    /// its text is the input then.
    pub(super) fn finish(&mut self) -> String {
        if matches!(self.place, InputPlace::Inside | InputPlace::After) {
            return String::new();
        }
        self.place = InputPlace::After;
        let text = std::mem::take(&mut self.pending);
        let only_string = |value: &Value| match value.as_object() {
            Some(fields) if fields.contains_key(INPUT) => fields[INPUT].as_str().map(str::to_owned),
            Some(fields) if fields.len() == 1 => fields.values().next()?.as_str().map(str::to_owned),
            _ => value.as_str().map(str::to_owned),
        };
        serde_json::from_str(&text).ok().as_ref().and_then(only_string).unwrap_or(text)
    }

    /// Looks for the beginning of the string.
    fn open(&mut self) {
        let mut rest = self.pending.as_str();
        for part in ["{", "\"input\"", ":", "\""] {
            rest = rest.trim_start();
            match rest.strip_prefix(part) {
                Some(after) => rest = after,
                None if part.starts_with(rest) => return,
                None => {
                    self.place = InputPlace::Other;
                    return;
                }
            }
        }
        self.pending = rest.to_owned();
        self.place = InputPlace::Inside;
    }

    /// Reads whole characters of the string.
    fn read(&mut self, input: &mut String) {
        let pending = std::mem::take(&mut self.pending);
        let mut rest = pending.as_str();
        while let Some(c) = rest.chars().next() {
            match c {
                '"' => {
                    self.place = InputPlace::After;
                    return;
                }
                '\\' => match unescaped(rest) {
                    Some((c, n_bytes)) => {
                        input.push(c);
                        rest = &rest[n_bytes..];
                    }
                    None => break,
                },
                c => {
                    input.push(c);
                    rest = &rest[c.len_utf8()..];
                }
            }
        }
        rest.clone_into(&mut self.pending);
    }
}

/// Returns the character of the escape at the start of a text, and the bytes of the escape. `None`: it is incomplete.
fn unescaped(text: &str) -> Option<(char, usize)> {
    let plain = |c| Some((c, 2));
    match *text.as_bytes().get(1)? {
        b'n' => plain('\n'),
        b't' => plain('\t'),
        b'r' => plain('\r'),
        b'b' => plain('\u{8}'),
        b'f' => plain('\u{c}'),
        b'u' => {
            let unit = |at: usize| u32::from_str_radix(text.get(at..at + 4).unwrap_or_default(), 16).ok();
            if text.len() < 6 {
                return None;
            }
            let first = unit(2).unwrap_or(REPLACEMENT);
            if !(0xD800..0xDC00).contains(&first) {
                return Some((char::from_u32(first).unwrap_or(char::REPLACEMENT_CHARACTER), 6));
            }
            // The first half of a pair.
            if text.len() < 12 && "\\u".starts_with(&text[6..text.len().min(8)]) {
                return None;
            }
            let second = text.get(6..8).filter(|mark| *mark == "\\u").and_then(|_| unit(8));
            match second.filter(|unit| (0xDC00..0xE000).contains(unit)) {
                Some(second) => {
                    let code = 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
                    Some((char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), 12))
                }
                None => Some((char::REPLACEMENT_CHARACTER, 6)),
            }
        }
        _ => text[1..].chars().next().map(|c| (c, 1 + c.len_utf8())),
    }
}

const REPLACEMENT: u32 = char::REPLACEMENT_CHARACTER as u32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_input_is_the_same_however_the_arguments_are_cut() {
        let text = "*** Begin Patch\n\"é\" \\ \u{1F600}\t\u{1}";
        let escaped = "{ \"input\" : \"*** Begin Patch\\n\\\"\\u00e9\\\" \\\\ \\uD83D\\ude00\\t\\u0001\"}";
        for arguments in [json!({ "input": text }).to_string(), escaped.to_owned()] {
            for at in (0..arguments.len()).filter(|at| arguments.is_char_boundary(*at)) {
                for step in [1, 3, arguments.len()] {
                    let mut reader = InputReader::default();
                    let mut input = reader.feed(&arguments[..at]);
                    let rest: Vec<char> = arguments[at..].chars().collect();
                    for piece in rest.chunks(step) {
                        input += &reader.feed(&piece.iter().collect::<String>());
                    }
                    assert_eq!(input + &reader.finish(), text, "{arguments} cut at {at}");
                }
            }
        }
    }

    #[test]
    fn arguments_of_another_form_are_the_input() {
        for (arguments, expected) in [
            ("{\"patch\": \"a\\nb\"}", "a\nb"),
            ("\"a\"", "a"),
            ("*** Begin Patch", "*** Begin Patch"),
            ("{\"other\": 1, \"input\": \"a\"}", "a"),
            ("{}", "{}"),
            ("", ""),
        ] {
            let mut reader = InputReader::default();
            let input = reader.feed(arguments);
            assert_eq!(input + &reader.finish(), expected, "{arguments}");
        }
        let mut lone = InputReader::default();
        assert_eq!(lone.feed("{\"input\": \"\\ud83dx\\q\"}"), "\u{fffd}xq");
    }
}
