//! Mistakes in `[model.engine.kv_store]` and around it are said before a start.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use harness::{BATON, BatonServer, eventually, long_prompt, model};

use super::{Store, ask};

/// `baton check-config` without a cluster's key, in this home.
fn checked(config: &Path, home: &Path) -> (bool, String) {
    let mut baton = Command::new(&*BATON);
    baton.env("XDG_CONFIG_HOME", home).env_remove("BATON_CLUSTER_KEY").env_remove("BATON_CLUSTER_FOLDER");
    let Output { status, stderr, .. } = baton.arg("check-config").arg(config).output().unwrap();
    (status.success(), String::from_utf8(stderr).unwrap())
}

#[test]
fn budgets_that_keep_nothing_and_more_memory_than_there_is_are_named_with_their_lines() {
    let home = tempfile::tempdir().unwrap();
    let config = home.path().join("baton.toml");
    let check = |keys: &str| {
        let (model, disk) = (model(), home.path().join("kv"));
        fs::write(&config, format!("[model]\nsource = {model:?}\n[model.engine.kv_store]\ndisk = {disk:?}\n{keys}\n"))
            .unwrap();
        checked(&config, home.path())
    };
    // A block of SmolLM2 has 256 × 23,040 bytes.
    let (is_fine, error) = check("memory = \"5MiB\"\ndisk_budget = 1000");
    assert!(!is_fine && error.lines().count() >= 2, "{error}");
    let line = |start: &str| error.lines().find(|line| line.contains(start)).unwrap_or_else(|| panic!("{error}"));
    let memory = line("line 5: model.engine.kv_store.memory");
    assert!(
        memory.contains("not be 5242880 bytes: one of this model has 5898240, so nothing would be kept"),
        "{error}"
    );
    assert!(line("line 6: model.engine.kv_store.disk_budget").contains("nothing on disk would be kept"), "{error}");
    let (is_fine, error) = check("memory = \"1000000GiB\"");
    let expected = "line 5: model.engine.kv_store.memory must be at most";
    assert!(!is_fine && error.contains(expected) && error.contains("not 1073741824000000"), "{error}");
    let (is_fine, error) = check("disk_writes = \"1MB\"");
    assert!(!is_fine && error.contains("line 5: model.engine.kv_store.disk_writes must have room for"), "{error}");
    let (is_fine, error) = check("memory = \"6MiB\"\ndisk_budget = \"6MiB\"");
    assert!(is_fine, "{error}");
}

#[test]
fn two_tables_that_share_a_folder_must_agree_about_its_budget() {
    let home = tempfile::tempdir().unwrap();
    let config = home.path().join("baton.toml");
    let check = |of_second: &str| {
        let (model, disk) = (model(), home.path().join("kv"));
        let table = |name: &str| format!("source = {model:?}\nname = {name:?}\n");
        let (first, second) = (table("one"), table("two"));
        fs::write(
            &config,
            format!(
                "[model]\n{first}[model.engine.kv_store]\ndisk = {disk:?}\ndisk_budget = \"1GiB\"\n[[models]]\n{second}\
                 [models.engine.kv_store]\ndisk = \"kv/\"\n{of_second}\n"
            ),
        )
        .unwrap();
        checked(&config, home.path())
    };
    let (is_fine, error) = check("disk_budget = \"2GiB\"");
    assert!(!is_fine, "{error}");
    assert!(error.contains("line 6: model.engine.kv_store.disk_budget is 1073741824 bytes, but 2147483648"), "{error}");
    assert!(
        error.contains("line 12: models[0].engine.kv_store.disk_budget is 2147483648 bytes, but 1073741824"),
        "{error}"
    );
    let (is_fine, error) = check("disk_budget = 1073741824");
    assert!(is_fine, "{error}");
}

#[tokio::test]
async fn a_damaged_secret_is_found_by_check_config_and_costs_the_disk_and_no_endpoint() {
    let store = Store::new();
    let home = tempfile::tempdir().unwrap();
    let config = home.path().join("baton.toml");
    let (model, folder) = (model(), store.folder());
    fs::write(
        &config,
        format!(
            "[model]\nsource = {model:?}\nname = \"smollm2\"\n[model.engine]\nthreads = 1\nctx_size = 2048\n[model.engine.kv_store]\ndisk = {folder:?}\n"
        ),
    )
    .unwrap();
    assert!(checked(&config, home.path()).0, "it is made at the start");
    let secret = home.path().join("baton/kv-store.key");
    // Each thing in its place, with the words for it.
    let damaged = || {
        fs::create_dir(home.path().join("baton")).unwrap();
        fs::write(&secret, "short").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    };
    // Reading it would wait for a writer.
    let pipe = || {
        fs::remove_file(&secret).unwrap();
        assert!(Command::new("mkfifo").args(["-m", "600"]).arg(&secret).status().unwrap().success());
    };
    let unmakable = || {
        fs::remove_dir_all(home.path().join("baton")).unwrap();
        fs::write(home.path().join("baton"), "a file").unwrap();
    };
    let cases: [(&dyn Fn(), &str); 3] = [
        (&damaged, "kv-store.key, cannot be used: it is damaged. Remove it"),
        (&pipe, "kv-store.key, cannot be used: it is no file"),
        (&unmakable, "cannot be kept in"),
    ];
    for (prepare, expected) in cases {
        prepare();
        let (is_fine, error) = checked(&config, home.path());
        assert!(!is_fine && error.contains("line 8: model.engine.kv_store.disk cannot be used: "), "{error}");
        assert!(error.contains(expected), "{error}");
        let log = tempfile::NamedTempFile::new().unwrap();
        let variables = [("XDG_CONFIG_HOME", home.path().to_str().unwrap()), ("BATON_CLUSTER_KEY", "")];
        let args = ["--config", config.to_str().unwrap()];
        let server = BatonServer::started(log.reopen().unwrap(), &args, &variables);
        let prompt = long_prompt("without a key", 100);
        let first = ask(&server, &prompt, None).await;
        assert_eq!(ask(&server, &prompt, None).await.text, first.text);
        let logged = eventually("a word of the key", || {
            let log = fs::read_to_string(log.path()).unwrap();
            log.contains(expected).then_some(log)
        });
        assert_eq!(logged.matches(expected).count(), 1, "it is said once: {logged}");
        assert!(logged.contains("KV is kept in memory alone"), "{logged}");
    }
}

#[test]
fn a_folder_with_other_files_is_refused_and_nothing_in_it_is_touched() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("letter.txt");
    fs::write(&path, "dear").unwrap();
    let config = folder.path().join("baton.toml");
    let disk = folder.path();
    fs::write(&config, format!("[model.engine]\nengine = \"sim\"\n[model.engine.kv_store]\ndisk = {disk:?}\n"))
        .unwrap();
    for command in [["check-config"].as_slice(), &["serve", "--listen", "127.0.0.1:0", "--config"]] {
        let output = Command::new(&*BATON).args(command).arg(&config).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && text.contains("line 4: model.engine.kv_store.disk cannot be used"),
            "{text}"
        );
        assert!(text.contains("has other files"), "{text}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}
