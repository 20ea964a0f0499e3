//! Reads one call as a JSON object, character by character: `{"name": "f", "arguments": {…}}`.
//!
//! Once the name is known, arguments are passed on as they arrive, exactly as the model writes them. Keys may have any
//! order. An object that is no call is given back whole. A name that is not among the tools makes a call if the object
//! stands between tags, or has arguments, too: `{"name": "Ann", "age": 3}` is an answer.

use baton_schemas::tools::Tool;

use super::{ParsedPieces, is_callable};

/// The progress of reading a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallProgress {
    /// The call is incomplete.
    Reading,
    /// The character was the call's last.
    Done,
    /// The text is not a call. A call that had begun ended with the arguments so far.
    NotACall,
}

/// The keys of calls in all formats.
const KEYS: [&str; 6] = ["name", "function", "arguments", "parameters", "id", "type"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JsonCallState {
    Open,
    KeyOrEnd,
    Key,
    Colon,
    Value,
    InValue,
    Closed,
}

/// Finds the end of a JSON value.
#[derive(Debug, Clone, Default)]
pub(super) struct Extent {
    depth: u32,
    in_string: bool,
    escaped: bool,
}

/// The place of a character relative to a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JsonPlace {
    /// In the value.
    Inside,
    /// The value's last character.
    Last,
    /// After the value, which is then a number or a word.
    After,
}

impl Extent {
    /// Takes the next character; the first is the value's first.
    pub(super) fn take(&mut self, c: char) -> JsonPlace {
        if self.in_string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => {
                    self.in_string = false;
                    return if self.depth == 0 { JsonPlace::Last } else { JsonPlace::Inside };
                }
                _ => {}
            }
            return JsonPlace::Inside;
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth = self.depth.saturating_add(1),
            '}' | ']' | ',' if self.depth == 0 => return JsonPlace::After,
            c if c.is_whitespace() && self.depth == 0 => return JsonPlace::After,
            '}' | ']' => {
                self.depth -= 1;
                if self.depth == 0 {
                    return JsonPlace::Last;
                }
            }
            _ => {}
        }
        JsonPlace::Inside
    }
}

#[derive(Debug, Clone)]
pub(super) struct JsonCall {
    state: JsonCallState,
    extent: Extent,
    key: String,
    /// The value that is being read, if it is not passed on.
    raw: String,
    /// The object stands between tags.
    is_marked: bool,
    /// A name that is not among the tools. It begins a call with its arguments, or at the end of a marked object.
    invented: Option<String>,
    /// Arguments that came before the call began.
    early: Option<String>,
    begun: bool,
    has_arguments: bool,
    passes_on: bool,
    /// All text so far, until it is certain to be a call.
    seen: String,
}

impl JsonCall {
    pub(super) fn new(is_marked: bool) -> Self {
        JsonCall {
            is_marked,
            invented: None,
            state: JsonCallState::Open,
            extent: Extent::default(),
            key: String::new(),
            raw: String::new(),
            early: None,
            begun: false,
            has_arguments: false,
            passes_on: false,
            seen: String::new(),
        }
    }

    /// Returns the text that is not a call; after the beginning of a call, only the text that broke it off.
    pub(super) fn give_back(&mut self) -> String {
        std::mem::take(&mut self.seen)
    }

    /// Takes the next character.
    pub(super) fn feed(&mut self, c: char, tools: &[Tool], out: &mut ParsedPieces) -> CallProgress {
        if !self.begun {
            self.seen.push(c);
        }
        let progress = self.step(c, tools, out);
        match progress {
            CallProgress::Reading => {}
            CallProgress::NotACall if self.begun => {
                self.seen.push(c);
                out.end();
            }
            CallProgress::NotACall => {}
            CallProgress::Done => {
                if !self.has_arguments {
                    out.arguments("{}");
                }
                out.end();
            }
        }
        progress
    }

    /// Ends the text. Returns true if a call had begun; it ends with the arguments so far.
    pub(super) fn finish(&mut self, out: &mut ParsedPieces) -> bool {
        if self.begun && self.state == JsonCallState::InValue && !self.passes_on && self.is_arguments() {
            out.arguments(&self.raw);
        }
        self.begun
    }

    /// Returns true once the call's name is known.
    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }

    fn is_arguments(&self) -> bool {
        matches!(self.key.as_str(), "arguments" | "parameters") && !self.has_arguments
    }

    fn step(&mut self, c: char, tools: &[Tool], out: &mut ParsedPieces) -> CallProgress {
        match self.state {
            JsonCallState::Open if c == '{' => self.state = JsonCallState::KeyOrEnd,
            JsonCallState::KeyOrEnd if c == '"' => {
                self.key.clear();
                self.state = JsonCallState::Key;
            }
            JsonCallState::KeyOrEnd if c == ',' => {}
            JsonCallState::KeyOrEnd if c == '}' => return self.close(out),
            JsonCallState::Key if c == '"' => {
                if !self.begun && !KEYS.contains(&self.key.as_str()) {
                    return CallProgress::NotACall;
                }
                self.state = JsonCallState::Colon;
            }
            JsonCallState::Key => self.key.push(c),
            JsonCallState::Colon if c == ':' => self.state = JsonCallState::Value,
            JsonCallState::Open | JsonCallState::KeyOrEnd | JsonCallState::Colon | JsonCallState::Value
                if c.is_whitespace() => {}
            JsonCallState::Value => {
                self.extent = Extent::default();
                self.raw.clear();
                self.state = JsonCallState::InValue;
                if c == '{' && self.is_arguments() {
                    self.begin_invented(out);
                }
                self.passes_on = self.begun && c == '{' && self.is_arguments();
                return self.in_value(c, tools, out);
            }
            JsonCallState::InValue => return self.in_value(c, tools, out),
            JsonCallState::Open | JsonCallState::KeyOrEnd | JsonCallState::Colon | JsonCallState::Closed => {
                return CallProgress::NotACall;
            }
        }
        CallProgress::Reading
    }

    fn close(&mut self, out: &mut ParsedPieces) -> CallProgress {
        self.state = JsonCallState::Closed;
        if self.is_marked {
            self.begin_invented(out);
        }
        if self.begun { CallProgress::Done } else { CallProgress::NotACall }
    }

    fn in_value(&mut self, c: char, tools: &[Tool], out: &mut ParsedPieces) -> CallProgress {
        let place = self.extent.take(c);
        if place != JsonPlace::After {
            if self.passes_on {
                out.arguments(c.encode_utf8(&mut [0; 4]));
            } else {
                self.raw.push(c);
            }
        }
        if place == JsonPlace::Inside {
            return CallProgress::Reading;
        }
        if !self.take_value(tools, out) {
            return CallProgress::NotACall;
        }
        self.state = JsonCallState::KeyOrEnd;
        match place {
            // The character belongs to the object.
            JsonPlace::After if !c.is_whitespace() => self.step(c, tools, out),
            _ => CallProgress::Reading,
        }
    }

    /// Uses a complete value. Returns false if this is not a call.
    fn take_value(&mut self, tools: &[Tool], out: &mut ParsedPieces) -> bool {
        if self.passes_on {
            self.has_arguments = true;
            self.passes_on = false;
        } else if self.is_arguments() {
            let arguments = normal(&self.raw);
            if self.begun {
                out.arguments(&arguments);
                self.has_arguments = true;
            } else {
                self.early = Some(arguments);
            }
        } else if matches!(self.key.as_str(), "name" | "function") && !self.begun {
            let Ok(name) = serde_json::from_str::<String>(&self.raw) else { return false };
            if !is_callable(&name, tools) {
                return false;
            }
            if self.early.is_some() || tools.iter().any(|tool| tool.name == name) {
                self.begin(&name, out);
            } else {
                self.invented = Some(name);
            }
        }
        true
    }

    /// Begins the call of an invented name, if one has come.
    fn begin_invented(&mut self, out: &mut ParsedPieces) {
        if let Some(name) = self.invented.take() {
            self.begin(&name, out);
        }
    }

    fn begin(&mut self, name: &str, out: &mut ParsedPieces) {
        self.begun = true;
        self.seen.clear();
        out.begin(name);
        if let Some(early) = self.early.take() {
            out.arguments(&early);
            self.has_arguments = true;
        }
    }
}

/// Normalizes arguments that some models write as a string that holds JSON, or as null.
fn normal(raw: &str) -> String {
    match serde_json::from_str::<serde_json::Value>(raw) {
        Ok(serde_json::Value::String(text)) if text.trim_start().starts_with('{') => text,
        Ok(serde_json::Value::Null) => "{}".to_owned(),
        _ => raw.to_owned(),
    }
}
