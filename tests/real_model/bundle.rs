//! `baton bundle`: one file installs program and model in a home folder, and they work from there.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use harness::BATON;
use tiny_gguf::Architecture;

#[test]
fn a_bundle_brings_program_and_model_to_a_home_folder_where_they_answer() {
    // On the file system of the build, because the program is large.
    let folder = tempfile::tempdir_in(BATON.parent().unwrap()).unwrap();
    let path = |name: &str| folder.path().join(name);
    let model = path("tiny model.gguf");
    tiny_gguf::write_with_template(&model, Architecture::Llama, 7);
    let bundle = path("b.tar");
    let made = Command::new(&*BATON).arg("bundle").arg(&bundle).arg("--model").arg(&model).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let said = String::from_utf8(made.stdout).unwrap();
    assert!(said.contains("libstdc++6") || !cfg!(target_os = "linux"), "what the other machine needs: {said}");

    assert!(Command::new("tar").arg("-xf").arg(&bundle).arg("-C").arg(folder.path()).status().unwrap().success());
    let home = path("home");
    let mut install = Command::new(path("baton-bundle/install.sh"));
    install.env("HOME", &home).env_remove("XDG_CACHE_HOME").env_remove("BATON_CACHE");
    let installed = install.output().unwrap();
    assert!(installed.status.success(), "{}", String::from_utf8_lossy(&installed.stderr));
    let models = if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" };
    let there = home.join(models).join("baton/models/tiny model.gguf");
    assert_eq!(fs::read(&there).unwrap(), fs::read(&model).unwrap());

    let mut chat = Command::new(home.join(".local/bin/baton"));
    chat.args(["chat", "--own"]).arg(&there).env("HOME", &home).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut chat = chat.spawn().unwrap();
    chat.stdin.take().unwrap().write_all(b"hello").unwrap();
    let answered = chat.wait_with_output().unwrap();
    assert!(answered.status.success() && !answered.stdout.is_empty(), "{answered:?}");
}
