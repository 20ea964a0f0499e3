//! Writes a model again with its quantized tensors in Q8_0, which llama.cpp computes in half the time of Q4_1 on x86-64, and, if
//! LAYERS is given, with its first layers alone:
//! `cargo run --release --locked -p baton-tiny-gguf --bin q8-gguf -- MODEL.gguf Q8.gguf [LAYERS]`.

use std::path::Path;

use tiny_gguf::file::{Gguf, Precision, Value};

/// `LLAMA_FTYPE_MOSTLY_Q8_0` of llama.cpp's `llama.h`.
const Q8_0: u32 = 7;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (model, q8, n_layers) = match &arguments[..] {
        [model, q8] => (model, q8, None),
        [model, q8, layers] => (model, q8, Some(layers.parse().expect("LAYERS is a number"))),
        _ => panic!("usage: q8-gguf MODEL.gguf Q8.gguf [LAYERS]"),
    };
    let mut file = Gguf::read(Path::new(model));
    for (_, tensor) in &mut file.tensors {
        if tensor.precision == Precision::F16 {
            tensor.precision = Precision::Q8_0;
        }
    }
    for (key, value) in &mut file.metadata {
        if key == "general.file_type" {
            *value = Value::U32(Q8_0);
        }
    }
    if let Some(n_layers) = n_layers {
        keep_layers(&mut file, n_layers);
    }
    // Under its name it is whole.
    let part = format!("{q8}.part");
    file.write(Path::new(&part));
    std::fs::rename(part, q8).expect("the model gets its name");
}

/// Drops the layers from `n_layers` on. Llama.cpp names the tensors of layer `i` `blk.i.…`, and the output's have no number.
fn keep_layers(file: &mut Gguf, n_layers: u32) {
    let layer = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<u32>().ok();
    file.tensors.retain(|(name, _)| layer(name).is_none_or(|layer| layer < n_layers));
    let (_, count) =
        file.metadata.iter_mut().find(|(key, _)| key.ends_with(".block_count")).expect("a number of layers");
    *count = Value::U32(n_layers);
}
