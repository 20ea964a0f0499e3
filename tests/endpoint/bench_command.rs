//! `baton bench` starts the program with the benchmarks where it lies beside `baton`, and says how to get it where it does not.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use harness::BATON;

/// A folder with `baton` alone, on the file system of the build.
fn folder_with_baton() -> tempfile::TempDir {
    let folder = tempfile::tempdir_in(BATON.parent().unwrap()).unwrap();
    std::fs::hard_link(&*BATON, folder.path().join("baton")).unwrap();
    folder
}

fn run(folder: &Path, args: &[&str]) -> Output {
    Command::new(folder.join("baton")).args(args).output().unwrap()
}

#[test]
fn the_benchmarks_get_every_argument_and_their_exit_code_is_batons() {
    let folder = folder_with_baton();
    let bench = folder.path().join("baton-bench");
    std::fs::write(&bench, "#!/bin/sh\nprintf '[%s]' \"$@\"\nexit 7\n").unwrap();
    std::fs::set_permissions(&bench, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (args, passed) in [
        (&["bench", "serve", "--url", "a b", "--help"][..], "[serve][--url][a b][--help]"),
        (&["bench", "--help"], "[--help]"),
        (&["bench", "-V"], "[-V]"),
        (&["calibrate-codec", "smollm2", "--prompts", "2"], "[calibrate-codec][smollm2][--prompts][2]"),
    ] {
        let output = run(folder.path(), args);
        assert_eq!(String::from_utf8_lossy(&output.stdout), passed, "{args:?}");
        assert_eq!(output.status.code(), Some(7), "{args:?}");
    }
}

#[test]
fn without_the_benchmarks_beside_it_baton_says_how_to_build_them() {
    let folder = folder_with_baton();
    for args in [&["bench", "handoff"][..], &["calibrate-codec", "smollm2"]] {
        let output = run(folder.path(), args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains("baton-bench") && error.contains("`make bench` builds it"), "{error}");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{args:?}");
    }
}
