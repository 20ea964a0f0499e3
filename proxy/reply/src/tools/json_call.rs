//! One call as a JSON object, read character by character: `{"name": "f", "arguments": {…}}`.
//!
//! Arguments are passed on while they arrive, exactly as the model writes them, once the name is known. Keys may stand in any
//! order. An object that turns out to be no call of a known tool is given back whole.

use baton_schemas::tools::Tool;

use super::ParsedPieces;

/// How far a call has been read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallProgress {
    /// Not to its end.
    Reading,
    /// The character was its last.
    Done,
    /// It is none. If it had begun by then, it ended with its arguments as they are.
    NotACall,
}

/// The keys that calls have in one format or another.
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

/// A JSON value's extent.
#[derive(Debug, Clone, Default)]
pub(super) struct Extent {
    depth: u32,
    in_string: bool,
    escaped: bool,
}

/// Where a character stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JsonPlace {
    /// In the value.
    Inside,
    /// It is the value's last.
    Last,
    /// It follows the value: only a number or a word ends so.
    Behind,
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
            '}' | ']' | ',' if self.depth == 0 => return JsonPlace::Behind,
            c if c.is_whitespace() && self.depth == 0 => return JsonPlace::Behind,
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

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct JsonCall {
    state: JsonCallState,
    extent: Extent,
    key: String,
    /// The value that is being read, where it is not passed on.
    raw: String,
    /// Arguments that came before the name.
    early: Option<String>,
    begun: bool,
    has_arguments: bool,
    passes_on: bool,
    /// All of it so far, as long as it may be no call.
    seen: String,
}

impl JsonCall {
    pub(super) fn new() -> Self {
        JsonCall {
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

    /// This is no call. The text that was read; after the beginning of a call, only the text that broke it off.
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

    /// Ends the text. Returns true if a call had begun, which ends as it is.
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
            JsonCallState::KeyOrEnd if c == '}' => return self.close(),
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

    fn close(&mut self) -> CallProgress {
        self.state = JsonCallState::Closed;
        if self.begun { CallProgress::Done } else { CallProgress::NotACall }
    }

    fn in_value(&mut self, c: char, tools: &[Tool], out: &mut ParsedPieces) -> CallProgress {
        let place = self.extent.take(c);
        if place != JsonPlace::Behind {
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
            JsonPlace::Behind if !c.is_whitespace() => self.step(c, tools, out),
            _ => CallProgress::Reading,
        }
    }

    /// A value is complete. Errors as `false`: this is no call.
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
            if !tools.iter().any(|tool| tool.name == name) {
                return false;
            }
            self.begun = true;
            self.seen.clear();
            out.begin(&name);
            if let Some(early) = self.early.take() {
                out.arguments(&early);
                self.has_arguments = true;
            }
        }
        true
    }
}

/// Arguments that some models write as a string that holds JSON, or as null.
fn normal(raw: &str) -> String {
    match serde_json::from_str::<serde_json::Value>(raw) {
        Ok(serde_json::Value::String(text)) if text.trim_start().starts_with('{') => text,
        Ok(serde_json::Value::Null) => "{}".to_owned(),
        _ => raw.to_owned(),
    }
}
