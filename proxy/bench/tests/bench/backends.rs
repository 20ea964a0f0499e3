//! `baton-bench backends` measures the devices of this machine, with real models and with models that it makes up.

use std::path::Path;
use std::process::{Command, Output};

use harness::{BATON_BENCH, model};
use serde_json::Value;

use super::details;

/// The smallest run, with a cache folder of its own.
fn bench(cache: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(&*BATON_BENCH);
    command.env("BATON_CACHE", cache).args(["backends", "--quick", "--threads", "1", "--devices", "cpu"]);
    command.args(args);
    command
}

fn figures(output: &Output, json: &Path) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    details(json)
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_handoff_on_the_processor_is_exact_and_every_figure_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let [json, page] = ["figures.json", "page.md"].map(|name| folder.path().join(name));
    std::fs::write(&page, "# Page\n\n<!-- written by `baton-bench backends`: begin -->\n<!-- end -->\n").unwrap();
    let models = ["--models", model().to_str().unwrap()].map(str::to_owned);
    let files = ["--json", json.to_str().unwrap(), "--page", page.to_str().unwrap()].map(str::to_owned);
    let args: Vec<&str> = models.iter().chain(&files).map(String::as_str).collect();
    let output = bench(folder.path(), &args).output().unwrap();
    let report = figures(&output, &json);
    let model = &report["models"][0];
    let handoff = &model["handoffs"][0];
    assert_eq!((&handoff["from"], &handoff["to"]), (&"cpu".into(), &"cpu".into()), "{report}");
    assert_eq!(handoff["verdict"], "exact", "{report}");
    assert_eq!((handoff["kv_distance"].as_f64(), handoff["mean_kl"].as_f64()), (Some(0.0), Some(0.0)), "{report}");
    assert_eq!((&handoff["n_agreed"], &handoff["n_compared"]), (&8.into(), &8.into()), "{report}");
    // 63 tokens of KV, sent as they are.
    let n_bytes = handoff["n_bytes"].as_f64().unwrap();
    assert!((63.0 * 23_040.0..1.1 * 63.0 * 23_040.0).contains(&n_bytes), "{report}");
    let positive = |figures: &Value, name: &str, most: f64| {
        let value = figures[name].as_f64().unwrap_or(f64::NAN);
        assert!(value > 0.0 && value < most, "{name}: {report}");
    };
    positive(handoff, "prefill_tps", 1e5);
    positive(handoff, "export_gb_s", 1e3);
    positive(handoff, "import_gb_s", 1e3);
    positive(handoff, "ttft_ms", 60e3);
    // The only chunk may be imported before the prefill node's last word is read.
    assert!((0.0..60e3).contains(&handoff["after_prefill_ms"].as_f64().unwrap()), "{report}");
    assert!(handoff["hidden_share"].as_f64().is_none_or(|share| (0.0..=1.0).contains(&share)), "{report}");
    for (name, most) in [("prefill_tps", 1e5), ("decode_tps", 1e5), ("ttft_ms", 60e3)] {
        positive(&model["speeds"][0], name, most);
    }
    let table = String::from_utf8(output.stdout).unwrap();
    println!("{table}");
    assert!(table.contains("cpu → cpu") && table.contains("exact"), "{table}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("cpu → cpu | exact | 0.0e0 | 0.0e0 | 8/8 |"), "{page}");
}

#[test]
fn made_up_models_of_every_family_load_and_hand_over() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("models");
    let json = folder.path().join("figures.json");
    let models = "dense-tiny,moe-tiny,gpt-oss-tiny";
    let output = bench(&cache, &["--models", models, "--json", json.to_str().unwrap()]).output().unwrap();
    let report = figures(&output, &json);
    for (i, name) in models.split(',').enumerate() {
        let model = &report["models"][i];
        assert_eq!(model["name"], name, "{report}");
        let handoff = &model["handoffs"][0];
        // Where the cells of a sliding window lie moves the last digits.
        let may_be_close = name == "gpt-oss-tiny" && handoff["verdict"] == "close";
        assert!(handoff["verdict"] == "exact" || may_be_close, "{report}");
        assert!(handoff["n_bytes"].as_u64().unwrap() > 0, "{report}");
        let file = cache.join(format!("made-up-{name}-v1.gguf"));
        assert_eq!(std::fs::metadata(file).unwrap().len(), model["file_bytes"], "{report}");
    }
    // The next run uses the file again, and deletes it if it is told to.
    let again = bench(&cache, &["--models", "dense-tiny", "--delete"]).output().unwrap();
    assert!(again.status.success());
    assert!(!names(&cache).contains(&"made-up-dense-tiny-v1.gguf".to_owned()), "{:?}", names(&cache));
    assert!(names(&cache).contains(&"made-up-moe-tiny-v1.gguf".to_owned()), "{:?}", names(&cache));
}

#[test]
fn a_killed_run_leaves_no_file_that_passes_for_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let run = bench(folder.path(), &["--models", "dense-tiny"]);
    // The system ends a process that writes a file larger than this, after a few KiB of it.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -c 0; ulimit -f 16; exec \"$0\" \"$@\""]).arg(run.get_program()).args(run.get_args());
    let killed = limited.env("BATON_CACHE", folder.path()).output().unwrap();
    assert_eq!(killed.status.code(), None, "{}", String::from_utf8_lossy(&killed.stderr));
    let left = ["made-up-dense-tiny-v1.gguf.lock", "made-up-dense-tiny-v1.gguf.part"];
    assert_eq!(names(folder.path()), left);
    let output = bench(folder.path(), &["--models", "dense-tiny"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(names(folder.path()), ["made-up-dense-tiny-v1.gguf", "made-up-dense-tiny-v1.gguf.lock"]);
}

#[test]
fn a_mistake_is_named_before_anything_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.md");
    std::fs::write(&page, "# Page").unwrap();
    for (args, expected) in [
        (
            &["--models", "dense-9b"][..],
            "Shapes with made-up weights: dense-8b, dense-1b, mtp-1b, moe-30b-a3b, gpt-oss-20b",
        ),
        (&["--devices", "Warp9"], "there is no device \"Warp9\" here; there is cpu"),
        (&["--page", page.to_str().unwrap()], "it has no marked part"),
    ] {
        let output = bench(folder.path(), args).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(expected) && !error.contains("decode node"), "{args:?}: {error}");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{args:?}");
    }
}
