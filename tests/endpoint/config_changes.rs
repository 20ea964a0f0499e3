//! The changes of a reload are said before it is done: by the endpoint, and by `baton check-config --against`.

use std::process::{Command, Output};
use std::{fs, io};

use harness::{BATON, BatonServer, TempConfigFile, eventually_async};
use serde_json::{Value, json};

const OWNER: &str = "the owner's long secret";
const OTHER: &str = "some other long secret";

fn text(listen: &str, max_waiting: u32, slots: u32, keys: &[&str]) -> String {
    let keys = json!(keys);
    format!(
        "listen = \"{listen}\"\nmax_waiting = {max_waiting}\napi_keys = {keys}\n[model]\nname = \"sim\"\ncalibrate = false\n\
         [model.engine]\nengine = \"sim\"\nslots = {slots}\n"
    )
}

/// Calls a route as the owner.
async fn get(server: &BatonServer, path: &str) -> (u16, Value) {
    let reply = reqwest::Client::new().get(format!("{}{path}", server.base)).bearer_auth(OWNER).send().await.unwrap();
    (reply.status().as_u16(), reply.json().await.unwrap())
}

async fn preview(server: &BatonServer) -> Value {
    let (status, preview) = get(server, "/baton/config/changes").await;
    assert_eq!(status, 200, "{preview}");
    preview
}

/// Each change in one line.
fn lines(preview: &Value) -> Vec<String> {
    let word = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let line =
        |change: &Value| ["key", "kind", "before", "after", "effect"].map(|field| word(&change[field])).join(" ");
    preview["changes"].as_array().unwrap().iter().map(line).collect()
}

fn check_config(args: &[&str]) -> Output {
    Command::new(&*BATON).arg("check-config").args(args).output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_is_told_what_a_file_would_change_before_it_is_in_place() -> io::Result<()> {
    let first = text("127.0.0.1:1", 7, 2, &[OWNER]);
    let config = TempConfigFile::new(&first);
    // A flag wins over the file's address.
    let server = config.serve();
    let now = preview(&server).await;
    assert_eq!((&now["changes"], &now["mistakes"]), (&json!([]), &json!([])), "{now}");

    let candidate = config.path().with_extension("toml.new");
    let second = text("127.0.0.1:2", 8, 3, &[OWNER, OTHER]);
    fs::write(&candidate, &second)?;
    eventually_async("the other file", async || preview(&server).await["changes"] != json!([])).await;
    let next = preview(&server).await;
    assert_eq!(next["path"].as_str(), candidate.to_str(), "{next}");
    let mut found = lines(&next);
    found.sort();
    let expected = [
        "api_keys changed - - reload",
        "listen changed \"127.0.0.1:1\" \"127.0.0.1:2\" overridden",
        "max_waiting changed 7 8 reload",
        "model.engine.slots changed 2 3 restart",
    ];
    assert_eq!(found, expected, "{next}");
    assert!(!next.to_string().contains("long secret"), "{next}");
    let (_, in_force) = get(&server, "/baton/config").await;
    assert!(in_force["settings"].to_string().contains("\"7\""), "nothing is applied: {in_force}");

    // What a reload refuses, with its line.
    for (wrong, words) in [
        (second.replace("max_waiting = 8", "max_waiting = -1"), "line 2: max_waiting"),
        (text("127.0.0.1:1", 7, 2, &[]), "the file has no keys any more"),
        (String::new(), "the file is empty"),
    ] {
        fs::write(&candidate, &wrong)?;
        eventually_async(words, async || preview(&server).await["mistakes"].to_string().contains(words)).await;
        assert_eq!(preview(&server).await["changes"], json!([]), "{words}");
    }

    // In its place: what needs a restart still differs, the rest is in force.
    fs::write(&candidate, &second)?;
    fs::rename(&candidate, config.path())?;
    let left = ["model.engine.slots changed 2 3 restart"];
    eventually_async("the reload", async || lines(&preview(&server).await) == left).await;
    let keyless = reqwest::get(format!("{}/baton/config/changes", server.base)).await.unwrap();
    assert_eq!(keyless.status(), 401);
    Ok(())
}

#[test]
fn two_files_are_compared_without_an_endpoint() {
    let (old, new) = (
        TempConfigFile::new(&text("127.0.0.1:1", 7, 2, &[OWNER])),
        TempConfigFile::new(&text("127.0.0.1:1", 8, 3, &[OTHER])),
    );
    let (old, new) = (old.path().display().to_string(), new.path().display().to_string());
    let output = check_config(&[&new, "--against", &old]);
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{printed}");
    let rows: Vec<String> = printed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for row in [
        "max_waiting 7 8 after a reload",
        "model.engine.slots 2 3 after a restart",
        "api_keys (not shown) (not shown) after a reload",
    ] {
        assert!(rows.iter().any(|found| found == row), "{row} in {printed}");
    }
    assert!(!printed.contains("long secret"), "{printed}");
    let same = check_config(&[&old, "--against", &old]);
    assert!(String::from_utf8(same.stdout).unwrap().contains("It sets what "));
    let wrong = TempConfigFile::new("max_wating = 1\n");
    let refused = check_config(&[&old, "--against", wrong.path().to_str().unwrap()]);
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && error.contains("line 1") && error.contains("max_wating"), "{error}");
}

#[test]
fn a_key_without_effect_is_named_and_refused_by_nobody() {
    let file = TempConfigFile::new("[model.engine]\nspeculation = \"off\"\ndraft = \"small.gguf\"\n");
    let output = check_config(&[&file.path().display().to_string()]);
    let [printed, notes] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    let remark = "line 3: model.engine.draft is not used, because speculation is off";
    assert!(output.status.success() && printed.ends_with(" is fine\n") && notes.contains(remark), "{printed}{notes}");
}
