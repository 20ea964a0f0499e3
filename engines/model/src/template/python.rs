//! Makes minijinja behave like Python's Jinja2, for which Hugging Face's templates are written.

use std::io;

use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use serde::Serialize;
use serde_json::ser::Formatter;

use super::values::Json;

/// Adds Python's filters, tests and methods.
pub(super) fn extend(environment: &mut Environment) {
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", str_of);
    for name in ["length", "count"] {
        environment.add_filter(name, length);
    }
    environment.add_test("sequence", is_sequence);
}

/// Formats a value like Python's `str`: `True`, `None`, and strings inside containers in single quotes.
pub(super) fn str_of(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => value.to_string(),
        ValueKind::Undefined => String::new(),
        _ => repr(value),
    }
}

fn repr(value: &Value) -> String {
    let list = |value: &Value| -> Vec<String> {
        value.try_iter().map(|items| items.map(|item| repr(&item)).collect()).unwrap_or_default()
    };
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::String => repr_str(value.as_str().unwrap_or_default()),
        ValueKind::Seq => format!("[{}]", list(value).join(", ")),
        ValueKind::Map => {
            let entry = |key: Value| format!("{}: {}", repr(&key), repr(&value.get_item(&key).unwrap_or_default()));
            let entries: Vec<String> = value.try_iter().map(|keys| keys.map(entry).collect()).unwrap_or_default();
            format!("{{{}}}", entries.join(", "))
        }
        _ => value.to_string(),
    }
}

/// Python's `repr` of a string: in single quotes, or in double quotes if it contains single quotes only.
fn repr_str(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if u32::from(c) < 0x20 || c == '\x7f' => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// The length of a value. As in Jinja2, an undefined value has length 0; minijinja refuses that.
fn length(value: &Value) -> Result<usize, Error> {
    let uncountable =
        || Error::new(ErrorKind::InvalidOperation, format!("a value of type {} has no length", value.kind()));
    if value.is_undefined() { Ok(0) } else { value.len().ok_or_else(uncountable) }
}

/// Returns true for values that have a length and items by index or key. As in Jinja2, these include strings and
/// mappings.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
}

/// Implements the methods that minijinja-contrib lacks.
fn method(state: &State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let missing = || Error::new(ErrorKind::InvalidOperation, "substring or item not found");
    if let Some(text) = value.as_str() {
        match method {
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(args)?;
                return Ok(text.strip_prefix(prefix).unwrap_or(text).into());
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(args)?;
                return Ok(text.strip_suffix(suffix).unwrap_or(text).into());
            }
            "rsplit" if !args.is_empty() => {
                let (separator, max): (&str, Option<usize>) = from_args(args)?;
                let n_pieces = max.map_or(usize::MAX, |max| max.saturating_add(1));
                let mut pieces: Vec<String> = text.rsplitn(n_pieces, separator).map(String::from).collect();
                pieces.reverse();
                return Ok(pieces.into());
            }
            "partition" => {
                let (separator,): (&str,) = from_args(args)?;
                let (before, after) = text.split_once(separator).unwrap_or((text, ""));
                let found = if text.contains(separator) { separator } else { "" };
                return Ok([before, found, after].map(String::from).to_vec().into());
            }
            "index" => {
                let (wanted,): (&str,) = from_args(args)?;
                return text.find(wanted).map(|at| text[..at].chars().count().into()).ok_or_else(missing);
            }
            _ => {}
        }
    }
    if value.kind() == ValueKind::Seq && method == "index" {
        let (wanted,): (&Value,) = from_args(args)?;
        return value.try_iter()?.position(|item| item == *wanted).map(Value::from).ok_or_else(missing);
    }
    if value.kind() == ValueKind::Map && method == "copy" {
        return Ok(value.clone());
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// Python's `json.dumps(value, ensure_ascii=False, …)`, with which Hugging Face replaces Jinja2's filter, which escapes
/// HTML.
fn to_json(value: &Value, args: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = args.get("indent")?;
    let separators: Option<Vec<String>> = args.get("separators")?;
    let ensure_ascii = args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sorts_keys = args.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    args.assert_all_used()?;

    let wrong = |cause| Error::new(ErrorKind::InvalidOperation, "cannot be written as JSON").with_source(cause);
    // Python's defaults: with an indent, there is no space after the comma.
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson takes two separators")),
        None => (if indent.is_some() { "," } else { ", " }.into(), ": ".into()),
    };
    let style =
        PythonStyle { item, key, indent: indent.map(|n| n.min(MAX_INDENT)), ensure_ascii, depth: 0, empty: true };
    let mut out = Vec::new();
    let mut out_as_python = serde_json::Serializer::with_formatter(&mut out, style);
    Json { value, sorts_keys }.serialize(&mut out_as_python).map_err(wrong)?;
    Ok(Value::from_safe_string(String::from_utf8_lossy(&out).into_owned()))
}

/// The most spaces of indent in each level, so that a template cannot request a gigabyte of them.
const MAX_INDENT: usize = 16;

struct PythonStyle {
    item: String,
    key: String,
    indent: Option<usize>,
    ensure_ascii: bool,
    depth: usize,
    /// The container that was opened last has no items yet.
    empty: bool,
}

impl PythonStyle {
    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.empty = true;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.empty {
            self.new_line(writer)?;
        }
        self.empty = false;
        writer.write_all(bracket)
    }

    fn next<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.empty = false;
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.new_line(writer)
    }

    fn new_line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(n_spaces) => write!(writer, "\n{:1$}", "", n_spaces * self.depth),
            None => Ok(()),
        }
    }
}

impl Formatter for PythonStyle {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, text: &str) -> io::Result<()> {
        if !self.ensure_ascii {
            return writer.write_all(text.as_bytes());
        }
        for unit in text.encode_utf16() {
            match u8::try_from(unit) {
                Ok(ascii) if ascii.is_ascii() => writer.write_all(&[ascii])?,
                _ => write!(writer, "\\u{unit:04x}")?,
            }
        }
        Ok(())
    }

    /// Python pads the exponent to two digits: `1e-07`.
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let json = serde_json::to_string(&value)?;
        match json.split_once("e-") {
            Some((mantissa, exponent)) if exponent.len() == 1 => write!(writer, "{mantissa}e-0{exponent}"),
            _ => writer.write_all(json.as_bytes()),
        }
    }
}
