//! libFuzzer's entry: `BATON_FUZZ_TARGET` names the target. `BATON_FUZZ_SEEDS` is a folder for its seeds, from which
//! libFuzzer then starts. `scripts/fuzz.sh` calls this.
#![no_main]

use std::sync::LazyLock;
use std::{env, fs};

use baton_fuzz::{FuzzTarget, limits};

static TARGET: LazyLock<&FuzzTarget> = LazyLock::new(|| {
    let name = env::var("BATON_FUZZ_TARGET").expect("BATON_FUZZ_TARGET names a target");
    baton_fuzz::target(&name).unwrap_or_else(|| panic!("there is no target {name}"))
});

fn write_seeds() {
    let Some(folder) = env::var_os("BATON_FUZZ_SEEDS") else { return };
    for (i, seed) in (TARGET.seeds)().iter().enumerate() {
        fs::write(std::path::Path::new(&folder).join(format!("seed-{i}")), seed).expect("a seed can be written");
    }
}

libfuzzer_sys::fuzz_target!(
    init: write_seeds(),
    |input: &[u8]| {
        limits::run(&TARGET, input);
    }
);
