//! `baton bundle`: one file installs program and model in a home folder, and they work from there.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use harness::lab::{Lab, with_namespaces};
use harness::{BATON, Process};
use rustix::process::Signal;
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

/// Two machines on a switch, and nothing else: the second one has neither Baton nor a way to any other network.
#[test]
fn a_machine_without_a_route_is_installed_from_another_one_and_joins_its_cluster() {
    with_namespaces("bundle::a_machine_without_a_route_is_installed_from_another_one_and_joins_its_cluster", || {
        let lab = Lab::new(&[1, 1]);
        let routes = Command::new("ip").args(["-n", lab.name(1), "route"]).output().unwrap();
        assert!(!String::from_utf8_lossy(&routes.stdout).contains("default"), "{routes:?}");
        let folder = tempfile::tempdir_in(BATON.parent().unwrap()).unwrap();
        let path = |name: &str| folder.path().join(name);
        let model = path("tiny.gguf");
        tiny_gguf::write_with_template(&model, Architecture::Llama, 7);

        let mut offer = lab.on(0, &BATON);
        offer.arg("bundle").arg(path("b.tar")).arg("--model").arg(&model).arg("--offer").stdout(Stdio::piped());
        let mut offer = Process(offer.spawn().unwrap());
        let mut lines = BufReader::new(offer.stdout.take().unwrap()).lines().map(Result::unwrap);
        let command = lines.find(|line| line.contains("curl --noproxy")).expect("a command for the other machine");
        let url = command.split_whitespace().find(|word| word.starts_with("http://10.77.0.1:")).expect("an address");

        let home = path("home");
        fs::create_dir(&home).unwrap();
        let there = |program: &Path| {
            let mut command = lab.on(1, program);
            command.env("HOME", &home).env_remove("XDG_CACHE_HOME").env_remove("BATON_CACHE").current_dir(&home);
            command
        };
        // Only who has the whole address gets the file, and no other file than the one on the first machine's screen is installed.
        let guessed = url.replace("baton.tar", "b.tar");
        assert!(!there(Path::new("curl")).args(["-sfo", "x", &guessed]).status().unwrap().success());
        let changed = command.replace("echo '", "echo '0");
        assert!(!there(Path::new("sh")).args(["-c", &changed]).status().unwrap().success());
        assert!(!home.join("baton-bundle").exists());

        let installed = there(Path::new("sh")).args(["-c", command.trim()]).output().unwrap();
        assert!(installed.status.success(), "{}", String::from_utf8_lossy(&installed.stderr));
        offer.signal(Signal::INT);
        lines.for_each(drop);
        assert!(offer.wait().unwrap().success());

        let program = home.join(".local/bin/baton");
        let models = if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" };
        let model = home.join(models).join("baton/models/tiny.gguf");
        let mut chat = there(&program);
        chat.args(["chat", "--own"]).arg(&model).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut chat = chat.spawn().unwrap();
        chat.stdin.take().unwrap().write_all(b"hello").unwrap();
        let answered = chat.wait_with_output().unwrap();
        assert!(answered.status.success() && !answered.stdout.is_empty(), "{answered:?}");

        let mut first = lab.on(0, &BATON);
        first.args(["pair", "--name", "first", "--expect", "1"]).stdout(Stdio::piped());
        let mut first = Process(first.spawn().unwrap());
        let mut lines = BufReader::new(first.stdout.take().unwrap()).lines().map(Result::unwrap);
        let code = lines.find_map(|line| line.trim().strip_prefix("baton pair ").map(str::to_owned)).expect("a code");
        assert!(there(&program).args(["pair", &code, "--name", "second"]).status().unwrap().success());
        lines.for_each(drop);
        assert!(first.wait().unwrap().success());
    });
}
