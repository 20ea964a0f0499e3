//! Writes a tiny model with random weights: `cargo run --release --locked -p baton-tiny-gguf --features llama --bin random-gguf
//! -- Qwen35 MODEL.gguf`. The architecture is one of [`Architecture::DESCRIBED`].

use std::path::Path;

use tiny_gguf::Architecture;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, path] = &arguments[..] else { panic!("usage: random-gguf ARCHITECTURE MODEL.gguf") };
    let architecture = Architecture::DESCRIBED.into_iter().find(|architecture| format!("{architecture:?}") == *name);
    let architecture = architecture.unwrap_or_else(|| panic!("{name}: one of {:?}", Architecture::DESCRIBED));
    tiny_gguf::write_with_template(Path::new(path), architecture, 1);
}
