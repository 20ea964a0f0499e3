//! Tells a program with shared libraries where to find them: in `lib` beside it, or in `../lib/baton` once it is installed.

fn main() {
    println!("cargo::rerun-if-changed=proxy/cli/rpath.rs");
    if std::env::var_os("CARGO_FEATURE_DYNAMIC_BACKENDS").is_some() {
        println!("cargo::rustc-link-arg-bins=-Wl,-rpath,$ORIGIN/lib:$ORIGIN/../lib/baton");
    }
}
