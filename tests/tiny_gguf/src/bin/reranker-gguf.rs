//! Writes a tiny reranker with random weights:
//! `cargo run --release --locked -p baton-tiny-gguf --bin reranker-gguf -- MODEL.gguf`.

use std::path::Path;

use tiny_gguf::Architecture;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path] = &arguments[..] else { panic!("usage: reranker-gguf MODEL.gguf") };
    tiny_gguf::write_reranker(Path::new(path), Architecture::Bert, 3);
}
