//! `baton doctor` reports on this machine correctly, and fails if a check fails.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use harness::{BATON, BatonNode, CLUSTER_KEY, model};
use serde_json::Value;
use tiny_gguf::Architecture;
use tiny_gguf::file::Gguf;

fn doctor(key: &str, args: &[&str]) -> Output {
    examine(&model(), key, args)
}

fn examine(model: &Path, key: &str, args: &[&str]) -> Output {
    let sizes = ["--tokens", "64", "--new-tokens", "8", "--threads", "1"];
    let mut command = Command::new(&*BATON);
    command.env("BATON_CLUSTER_KEY", key).args(["doctor", "--model"]).arg(model).args(sizes).args(args);
    command.output().unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn on_one_device_a_handoff_changes_nothing() {
    let output = doctor("", &["--devices", "cpu", "--json"]);
    let report = json(&output);
    let handoff = &report["handoffs"][0];
    assert_eq!((&handoff["from"], &handoff["to"]), (&"cpu".into(), &"cpu".into()), "{report}");
    assert_eq!(handoff["verdict"], "exact", "{report}");
    assert_eq!(handoff["kv_distance"], 0.0, "{report}");
    assert!(handoff["n_bytes"].as_u64().unwrap() > 0, "{report}");
    assert!(report["speeds"][0]["prefill_tps"].as_f64().unwrap() > 0.0, "{report}");
    let drafters = report["speeds"][0]["drafters"].as_array().unwrap();
    let names: Vec<&Value> = drafters.iter().map(|speed| &speed["drafter"]).collect();
    assert_eq!(names, ["prompt_lookup", "prediction"]);
    assert!(drafters.iter().all(|speed| speed["without_tps"].as_f64().unwrap() > 0.0), "{report}");
    let restores = report["speeds"][0]["restores"].as_array().unwrap();
    let tiers: Vec<&Value> = restores.iter().map(|restore| &restore["from"]).collect();
    assert_eq!(tiers, ["memory", "disk"], "{report}");
    for restore in restores {
        assert_eq!((&restore["n_restored"], &restore["verdict"]), (&63.into(), &"exact".into()), "{report}");
        assert!(["restored_ttft_ms", "restore_tps"].iter().all(|key| restore[key].as_f64() > Some(0.0)), "{report}");
    }
    assert!(output.status.success());
}

#[test]
fn states_and_checkpoints_of_hybrid_and_recurrent_models_are_proven() {
    let folder = tempfile::tempdir().unwrap();
    for architecture in [Architecture::Qwen35, Architecture::Mamba2] {
        let path = folder.path().join(format!("{architecture:?}.gguf"));
        tiny_gguf::write(&path, architecture, 1);
        let output = examine(&path, "", &["--devices", "cpu", "--json"]);
        let report = json(&output);
        let (handoff, checkpoint) = (&report["handoffs"][0], &report["speeds"][0]["checkpoint"]);
        assert_eq!((&handoff["verdict"], &handoff["state_distance"]), (&"exact".into(), &0.0.into()), "{report}");
        assert!(handoff["state_bytes"].as_u64().unwrap() > 0, "{report}");
        assert_eq!((&checkpoint["n_prompt"], checkpoint["verdict"] == "failed"), (&64.into(), false), "{report}");
        assert!(checkpoint["n_kept"].as_u64().unwrap() > 0, "{report}");
        assert!(output.status.success());
        let output = examine(&path, "", &["--devices", "cpu"]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("\nstates cpu → cpu: ") && text.contains("\ncheckpoint on cpu: "), "{text}");
    }
}

#[test]
fn the_head_of_a_model_has_a_line_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("head.gguf");
    tiny_gguf::write_with_heads(&path, Architecture::Qwen35, 1, 1);
    let output = examine(&path, "", &["--devices", "cpu", "--json"]);
    let report = json(&output);
    let drafters = report["speeds"][0]["drafters"].as_array().unwrap();
    let names: Vec<&Value> = drafters.iter().map(|speed| &speed["drafter"]).collect();
    assert_eq!(names, ["prompt_lookup", "head", "prediction"], "{report}");
    assert!(output.status.success());
}

#[test]
fn a_draft_model_is_measured_beside_the_model_and_as_a_draft_node_here_and_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let [path, draft] = [("model.gguf", 1), ("draft.gguf", 2)].map(|(name, seed)| {
        let path = folder.path().join(name);
        tiny_gguf::write(&path, Architecture::Llama, seed);
        path
    });
    let elsewhere = BatonNode::with(&["--model", draft.to_str().unwrap(), "--role", "draft", "--threads", "1"]);
    let args = ["--devices", "cpu", "--draft", draft.to_str().unwrap(), "--prefill", &elsewhere.url];
    let output = examine(&path, CLUSTER_KEY, &[&args[..], &["--json"]].concat());
    let report = json(&output);
    assert_eq!(report["handoffs"].as_array().unwrap().len(), 1, "a draft node has no KV to hand over: {report}");
    let drafters = report["speeds"][0]["drafters"].as_array().unwrap();
    let named = |speed: &Value| (speed["drafter"].clone(), speed["at"].clone());
    let expected = [
        ("prompt_lookup".into(), Value::Null),
        ("prediction".into(), Value::Null),
        ("draft_model".into(), Value::Null),
        ("draft_node".into(), "cpu".into()),
        ("draft_node".into(), elsewhere.url.as_str().into()),
    ];
    assert_eq!(drafters.iter().map(named).collect::<Vec<_>>(), expected, "{report}");
    for speed in drafters {
        assert_eq!(speed["with_tps"].as_f64() > Some(0.0), speed["drafts"]["n"].as_u64() > Some(0), "{report}");
    }
    assert!(output.status.success());
}

/// How many of its guesses are verified follows from times.
#[test]
fn a_trained_draft_model_has_its_line_and_doctor_says_what_it_measures() {
    let model = std::env::var_os("BATON_TEST_CUT_MODEL").map_or_else(model, PathBuf::from);
    let output = examine(&model, "", &["--devices", "cpu", "--draft", model.to_str().unwrap(), "--json"]);
    let report = json(&output);
    let drafters = report["speeds"][0]["drafters"].as_array().unwrap();
    let of_model = drafters.iter().find(|speed| speed["drafter"] == "draft_model").unwrap();
    assert_eq!(of_model["with_tps"].as_f64() > Some(0.0), of_model["drafts"]["n"].as_u64() > Some(0), "{report}");
    assert!(of_model["failure"].is_null(), "{report}");
    let error = String::from_utf8(output.stderr).unwrap();
    let told =
        ["without guesses", "from the text", "of the draft model", "of a draft node"].map(|what| error.find(what));
    assert!(told.is_sorted() && told[0].is_some(), "it says what it measures: {error}");
    assert!(output.status.success());
}

#[test]
fn a_draft_model_with_states_is_measured_as_a_draft_node_alone() {
    let folder = tempfile::tempdir().unwrap();
    let [path, draft] = ["model.gguf", "hybrid.gguf"].map(|name| folder.path().join(name));
    tiny_gguf::write(&path, Architecture::Llama, 1);
    tiny_gguf::write(&draft, Architecture::Qwen35, 2);
    let output = examine(&path, "", &["--devices", "cpu", "--draft", draft.to_str().unwrap(), "--json"]);
    let report = json(&output);
    let drafters = report["speeds"][0]["drafters"].as_array().unwrap();
    let found = drafters.iter().map(|speed| (speed["drafter"].as_str().unwrap(), speed["failure"].is_string()));
    let expected = [("prompt_lookup", false), ("prediction", false), ("draft_node", false)];
    assert_eq!(found.collect::<Vec<_>>(), expected, "{report}");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("it can draft as a node") && error.contains("It is measured as one"), "{error}");
    assert!(output.status.success());
}

#[test]
fn a_draft_model_that_cannot_guess_for_the_model_ends_the_command_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let [path, other, none, text] =
        ["model.gguf", "other.gguf", "none.gguf", "text.gguf"].map(|name| folder.path().join(name));
    tiny_gguf::write(&path, Architecture::Llama, 1);
    tiny_gguf::write(&other, Architecture::Bert, 1);
    std::fs::write(&text, "no GGUF").unwrap();
    for (draft, why) in [(&other, "it generates no text"), (&none, "none.gguf"), (&text, "text.gguf")] {
        let output = examine(&path, "", &["--devices", "cpu", "--draft", draft.to_str().unwrap()]);
        let error = String::from_utf8(output.stderr).unwrap();
        let named = format!("--draft {} cannot be used: ", draft.display());
        assert!(error.contains(&named) && error.contains(why) && !error.contains("decode node"), "{error}");
        assert_eq!((output.status.code(), &*output.stdout), (Some(1), &b""[..]));
    }
}

#[test]
fn the_speeds_of_other_drafters_are_kept_if_a_draft_model_does_not_load() {
    let folder = tempfile::tempdir().unwrap();
    let [path, draft] = ["model.gguf", "draft.gguf"].map(|name| folder.path().join(name));
    tiny_gguf::write(&path, Architecture::Llama, 1);
    let mut file = Gguf::read(&path);
    file.tensors.retain(|(name, _)| name != "output_norm.weight");
    file.write(&draft);
    let output = examine(&path, "", &["--devices", "cpu", "--draft", draft.to_str().unwrap(), "--json"]);
    let report = json(&output);
    let drafters = report["speeds"][0]["drafters"].as_array().unwrap();
    let found = drafters.iter().map(|speed| (speed["drafter"].as_str().unwrap(), speed["failure"].is_string()));
    let expected = [("prompt_lookup", false), ("prediction", false), ("draft_model", true), ("draft_node", true)];
    assert_eq!(found.collect::<Vec<_>>(), expected, "{report}");
    assert!(drafters[1]["with_tps"].as_f64() > Some(0.0), "{report}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("2 of the checks failed"));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_remote_node_is_tested_and_its_fault_reported() {
    let node = BatonNode::with(&["--model", model().to_str().unwrap(), "--role", "prefill", "--threads", "1"]);
    let output = doctor(CLUSTER_KEY, &["--devices", "cpu", "--prefill", &node.url, "--json"]);
    let report = json(&output);
    assert_eq!(report["handoffs"][1]["from"], node.url.as_str(), "{report}");
    assert_eq!(report["handoffs"][1]["verdict"], "exact", "{report}");
    assert!(output.status.success());
    // With another key nothing is learned from the node, and the command fails.
    let output = doctor("another cluster key", &["--devices", "cpu", "--prefill", &node.url]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().any(|line| line.contains("FAILED") && line.contains("key")), "{text}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("1 of the checks failed"));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_layer_that_computes_other_states_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let [ours, theirs] = ["ours.gguf", "theirs.gguf"].map(|name| folder.path().join(name));
    tiny_gguf::write(&ours, Architecture::GraniteHybrid, 1);
    // The only layer of attention comes before it, so its rows are equal.
    let mut file = Gguf::read(&ours);
    let (_, kernel) = file.tensors.iter_mut().find(|(name, _)| name == "blk.3.ssm_conv1d.weight").unwrap();
    kernel.values.iter_mut().for_each(|value| *value = -*value);
    file.write(&theirs);
    let node = BatonNode::with(&["--model", theirs.to_str().unwrap(), "--role", "prefill", "--threads", "1"]);
    let args = ["--devices", "cpu", "--prefill", &node.url, "--max-canary-distance", "0.1"];
    let output = examine(&ours, CLUSTER_KEY, &[&args[..], &["--json"]].concat());
    let report = json(&output);
    let refused = &report["handoffs"][1];
    assert_eq!((&refused["verdict"], &refused["why"]), (&"failed".into(), &"canary_failed".into()), "{report}");
    assert_eq!((&refused["kv_distance"], refused.get("kv_layers")), (&0.0.into(), None), "{report}");
    let [layer] = &refused["state_layers"].as_array().unwrap()[..] else { panic!("{report}") };
    assert_eq!((&layer["layer"], &layer["tensor"]), (&3.into(), &"recurrence".into()), "{report}");
    assert!(layer["distance"].as_f64().unwrap() > 0.1, "{report}");
    let text = String::from_utf8(examine(&ours, CLUSTER_KEY, &args).stdout).unwrap();
    let named = format!("\nstates {} → cpu by layer: layer 3 recurrence ", node.url);
    assert!(text.contains(&named) && !text.contains("KV http"), "{text}");
}

#[test]
fn a_missing_device_is_named() {
    let output = doctor("", &["--devices", "cpu,Warp9"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("there is no device \"Warp9\" here; there is cpu"), "{error}");
    assert_eq!(output.status.code(), Some(1));
}

/// Handoffs between two backends, by `scripts/check-vulkan.sh`. Without a GPU Mesa's software driver is used.
#[cfg(feature = "vulkan")]
#[test]
fn kv_moves_between_the_processor_and_vulkan() {
    let output = doctor("", &["--json"]);
    let report = json(&output);
    let devices: Vec<&str> = report["devices"].as_array().unwrap().iter().filter_map(|d| d["name"].as_str()).collect();
    assert!(devices.contains(&"cpu") && devices.contains(&"Vulkan0"), "{report}");
    for (from, to) in [("cpu", "Vulkan0"), ("Vulkan0", "cpu")] {
        let of_pair = |h: &&Value| h["from"] == from && h["to"] == to;
        let handoff = report["handoffs"].as_array().unwrap().iter().find(of_pair).unwrap();
        println!("{handoff}");
        assert_eq!(handoff["verdict"], "close", "{report}");
        // The kernels differ. Results equal to the bit would mean that both ran on the processor.
        assert!(handoff["kv_distance"].as_f64().unwrap() > 0.0, "{report}");
    }
    assert!(output.status.success());
}
