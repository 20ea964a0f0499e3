//! A `python3` for tests that does what a shell script says.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// The script, and the folder that it lives and dies with.
pub(super) struct FakePython {
    pub path: PathBuf,
    _folder: TempDir,
}

impl FakePython {
    pub(super) fn running(script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("python3");
        // Written by another process. A test that forks while this one has the file open for writing would inherit it,
        // and the system starts no program that is open for writing ("text file busy").
        let write = r#"printf '#!/bin/sh\n' > "$0" && cat >> "$0" && chmod 755 "$0""#;
        let mut child = Command::new("sh").args(["-c", write]).arg(&path).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
        FakePython { path, _folder: folder }
    }
}
