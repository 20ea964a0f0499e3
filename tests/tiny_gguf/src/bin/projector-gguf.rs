//! Writes a projector with random weights, for models with rows of N_EMBD values:
//! `cargo run --release --locked -p baton-tiny-gguf --bin projector-gguf -- N_EMBD PROJECTOR.gguf`.

use std::path::Path;

use tiny_gguf::projector::{self, TinyProjector};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [n_embd, path] = &arguments[..] else { panic!("usage: projector-gguf N_EMBD PROJECTOR.gguf") };
    let n_embd = n_embd.parse().unwrap_or_else(|error| panic!("N_EMBD: {error}"));
    projector::write(Path::new(path), TinyProjector::Mlp, n_embd, 1);
}
