//! Writes a scripted model: `cargo run --release --locked -p baton-tiny-gguf --bin scripted-gguf -- SCRIPT.json MODEL.gguf`.
//!
//! The JSON has the fields of [`tiny_gguf::scripted::Script`].

use std::path::Path;

use tiny_gguf::scripted::Script;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [script, model] = &arguments[..] else { panic!("usage: scripted-gguf SCRIPT.json MODEL.gguf") };
    let text = std::fs::read_to_string(script).unwrap_or_else(|error| panic!("{script}: {error}"));
    let parsed: Script = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{script}: {error}"));
    parsed.write(Path::new(model));
}
