//! Writes a projector with random weights, for models with rows of N_EMBD values:
//! `cargo run --release --locked -p baton-tiny-gguf --bin projector-gguf -- N_EMBD PROJECTOR.gguf [KIND]`. The kind is one of
//! [`TinyProjector`]'s, `Mlp` by default.

use std::path::Path;

use tiny_gguf::projector::{self, TinyProjector};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (n_embd, path, name) = match &arguments[..] {
        [n_embd, path] => (n_embd, path, "Mlp"),
        [n_embd, path, name] => (n_embd, path, name.as_str()),
        _ => panic!("usage: projector-gguf N_EMBD PROJECTOR.gguf [KIND]"),
    };
    let n_embd = n_embd.parse().unwrap_or_else(|error| panic!("N_EMBD: {error}"));
    let others = [TinyProjector::Mlp, TinyProjector::Gemma3];
    let kind = others.into_iter().chain(TinyProjector::SHARING).find(|kind| format!("{kind:?}") == name);
    projector::write(Path::new(path), kind.unwrap_or_else(|| panic!("{name} is no kind")), n_embd, 1);
}
