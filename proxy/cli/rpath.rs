//! Tells a program with shared libraries where to find them: in `lib` beside it, or in `../lib/baton` once it is installed. The
//! build script of every package with such a program.

#![allow(clippy::print_stdout, reason = "a build script tells Cargo what it wants in this way")]

fn main() {
    // Without such a line every change of the package would run this again.
    println!("cargo::rerun-if-env-changed=CARGO_FEATURE_DYNAMIC_BACKENDS");
    if std::env::var_os("CARGO_FEATURE_DYNAMIC_BACKENDS").is_some() {
        println!("cargo::rustc-link-arg-bins=-Wl,-rpath,$ORIGIN/lib:$ORIGIN/../lib/baton");
    }
}
