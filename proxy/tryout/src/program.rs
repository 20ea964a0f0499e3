//! The program that children run: `baton`.

use std::io::{Error, ErrorKind};
use std::path::PathBuf;
use std::sync::OnceLock;

/// `None`: this program is `baton`.
static BESIDE: OnceLock<PathBuf> = OnceLock::new();

/// Makes all children run the `baton` that lies beside this program. For a program that is not `baton` itself.
pub fn run_children_beside_this() -> std::io::Result<()> {
    let beside = std::env::current_exe()?.with_file_name("baton");
    // A second call names the same file.
    let _ = BESIDE.set(beside);
    Ok(())
}

/// Errors: there is no `baton` beside this program.
pub(crate) fn program() -> std::io::Result<PathBuf> {
    let Some(beside) = BESIDE.get() else { return std::env::current_exe() };
    if beside.is_file() {
        return Ok(beside.clone());
    }
    let missing = format!("there is no {}: `cargo build --release` builds it", beside.display());
    Err(Error::new(ErrorKind::NotFound, missing))
}
