//! Writes a tiny model with random weights: `cargo run --release --locked -p baton-tiny-gguf --features llama --bin random-gguf
//! -- Qwen35 MODEL.gguf`. The architecture is `Gemma3` or one of [`Architecture::DESCRIBED`].

use std::path::Path;

use tiny_gguf::Architecture;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, path] = &arguments[..] else { panic!("usage: random-gguf ARCHITECTURE MODEL.gguf") };
    let known = [&Architecture::DESCRIBED[..], &[Architecture::Gemma3]].concat();
    let architecture = known.iter().find(|architecture| format!("{architecture:?}") == *name);
    let architecture = *architecture.unwrap_or_else(|| panic!("{name}: one of {known:?}"));
    tiny_gguf::write_with_template(Path::new(path), architecture, 1);
}
