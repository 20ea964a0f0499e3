//! A model in several files is all of them: its weights, its size, and what is wrong with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use harness::{BATON, BatonNode, BatonServer, CLUSTER_KEY, TempConfigFile};
use serde_json::{Value, json};
use tempfile::TempDir;
use tiny_gguf::Architecture;
use tiny_gguf::file::Gguf;

struct Split {
    folder: TempDir,
    /// The model in one file.
    whole: PathBuf,
    parts: Vec<PathBuf>,
}

fn split() -> Split {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole.gguf");
    tiny_gguf::write(&whole, Architecture::Llama, 1);
    let parts = tiny_gguf::split::write(&Gguf::read(&whole), folder.path(), "model", 3);
    Split { folder, whole, parts }
}

fn bytes(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

const ENGINE: [&str; 6] = ["--threads", "1", "--ctx-size", "512", "--slots", "2"];

/// A decode node's endpoint with one prefill node: the route, and the reply to a prompt.
async fn reply(prefill: &Path, decode: &Path) -> (String, Value) {
    let node = BatonNode::with(&[&ENGINE[..], &["--model", prefill.to_str().unwrap(), "--role", "prefill"]].concat());
    let links = ["--model", decode.to_str().unwrap(), "--name", "m", "--prefill", &node.url];
    let handoff = ["--no-calibration", "--policy", "always_handoff"];
    let server = BatonServer::with(&[&ENGINE[..], &links, &handoff].concat());
    let body = json!({
        "model": "m", "prompt": "All of it counts. ".repeat(10), "max_tokens": 8, "temperature": 0, "logprobs": 1,
    });
    let call = reqwest::Client::new().post(format!("{}/v1/completions", server.base)).json(&body);
    let reply = call.send().await.unwrap();
    let route = reply.headers()["x-baton-route"].to_str().unwrap().to_owned();
    (route, reply.json().await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_with_the_same_first_part_prefills_nothing_for_another() {
    let Split { folder, whole, .. } = split();
    let [a, b] = tiny_gguf::split::write_twins(folder.path(), &whole);
    assert_eq!(fs::read(&a).unwrap(), fs::read(&b).unwrap());
    let (route, joined) = reply(&whole, &a).await;
    assert!(route.starts_with("handoff; ") && !route.contains("failure"), "the same model, joined: {route}");
    let (route, own) = reply(&b, &a).await;
    assert!(route.starts_with("direct; ") && route.contains("reason=other_weights"), "{route}");
    assert_eq!(own["choices"][0]["text"], joined["choices"][0]["text"], "no other model's KV is in it");
    let (_, other) = reply(&b, &b).await;
    assert_ne!(other["choices"][0]["logprobs"], own["choices"][0]["logprobs"], "the models differ");
}

#[tokio::test(flavor = "multi_thread")]
async fn sizes_and_digests_are_those_of_all_parts() {
    let Split { folder, whole, parts } = split();
    let [a, b] = tiny_gguf::split::write_twins(folder.path(), &whole);
    let listed = async |path: &Path| {
        let server = BatonServer::with(&[&ENGINE[..], &["--model", path.to_str().unwrap(), "--name", "m"]].concat());
        let tags = server.get("/api/tags").await;
        (tags["models"][0]["size"].as_u64().unwrap(), tags["models"][0]["digest"].as_str().unwrap().to_owned())
    };
    let (size, digest) = listed(&a).await;
    assert_eq!(size, parts.iter().map(|part| bytes(part)).sum::<u64>());
    assert_eq!(listed(&whole).await, (bytes(&whole), digest.clone()));
    let (other_size, other_digest) = listed(&b).await;
    assert_eq!(other_size, size);
    assert_ne!(other_digest, digest);

    // The same before the model is loaded.
    let entry = format!("[[models]]\nname = \"m\"\nsource = {a:?}\n[models.engine]\nctx_size = 512\nkv_cells = 512\n");
    let config = TempConfigFile::new(&entry);
    let server = config.serve();
    assert_eq!(server.get("/api/tags").await["models"][0]["size"], size);
    assert!(server.children().is_empty(), "a query does not load the model");
}

/// Zeros in the last part, without data on the disk.
fn lengthen(part: &Path, n_bytes: u64) {
    fs::File::options().write(true).open(part).unwrap().set_len(bytes(part) + n_bytes).unwrap();
}

#[test]
fn memory_is_estimated_for_all_parts() {
    let Split { folder: _folder, parts, .. } = split();
    lengthen(&parts[2], 200 << 20);
    let entry = format!("[[models]]\nsource = {:?}\n[models.engine]\nctx_size = 512\nkv_cells = 512\n", parts[0]);
    let config = TempConfigFile::new(&(entry + "[loading]\nmemory_budget = \"400MiB\"\n"));
    let output = Command::new(&*BATON).arg("check-config").arg(config.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("needs about 45") && said.contains("400 MiB"), "{said}");
}

#[test]
fn a_split_model_is_not_converted_by_its_first_part() {
    let Split { folder, parts, .. } = split();
    let to = folder.path().join("converted");
    let output = Command::new(&*BATON).args(["mlx", "convert"]).args([&parts[0], &to]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("llama-gguf-split --merge"), "{said}");
    assert!(!to.exists());
}

#[test]
fn a_part_that_is_missing_or_of_another_model_is_named_by_each_command() {
    let check = |damage: &dyn Fn(&Split) -> PathBuf, expected: &str| {
        let split = split();
        let path = damage(&split);
        let path = path.to_str().unwrap();
        let config = TempConfigFile::new(&format!("[model]\nsource = {path:?}\n"));
        let config = config.path();
        let commands: [&[&str]; 3] = [
            &["check-config", config.to_str().unwrap()],
            &["serve", "--listen", "127.0.0.1:0", "--model", path],
            &["node", "--listen", "127.0.0.1:0", "--model", path],
        ];
        for command in commands {
            let output = Command::new(&*BATON).args(command).env("BATON_CLUSTER_KEY", CLUSTER_KEY).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && said.contains(expected), "{command:?}: {said}");
        }
    };
    let first = |split: &Split| split.parts[0].clone();
    check(
        &|split| {
            fs::remove_file(&split.parts[1]).unwrap();
            first(split)
        },
        "part 2 of 3 of the split model is missing: there is no file at",
    );
    check(
        &|split| {
            let other = split.folder.path().join("other.gguf");
            tiny_gguf::write(&other, Architecture::Qwen2, 1);
            let others = tiny_gguf::split::write(&Gguf::read(&other), split.folder.path(), "other", 3);
            fs::copy(&others[2], &split.parts[2]).unwrap();
            first(split)
        },
        "model-00003-of-00003.gguf is not part 3 of 3 of this model",
    );
    check(
        &|split| {
            let renamed = split.folder.path().join("model-00001-of-00004.gguf");
            fs::rename(&split.parts[0], &renamed).unwrap();
            renamed
        },
        "its name must end with -00001-of-00003.gguf",
    );
    check(
        &|split| {
            let joined = split.folder.path().join("joined.gguf");
            let all: Vec<u8> = split.parts.iter().flat_map(|part| fs::read(part).unwrap()).collect();
            fs::write(&joined, all).unwrap();
            joined
        },
        "has several parts of a split model one after another",
    );
    check(&|split| split.parts[1].clone(), "is part 2 of 3 of a split model: name its first part");
}
