//! Writes each target's seeds to `corpus/TARGET/`, where cargo-fuzz looks for them.

use std::{fs, io};

fn main() -> io::Result<()> {
    for target in baton_fuzz::bodies::TARGETS {
        let folder = format!("{}/corpus/{}", env!("CARGO_MANIFEST_DIR"), target.name);
        fs::create_dir_all(&folder)?;
        for (i, seed) in (target.seeds)().iter().enumerate() {
            fs::write(format!("{folder}/seed-{i}"), seed)?;
        }
    }
    Ok(())
}
