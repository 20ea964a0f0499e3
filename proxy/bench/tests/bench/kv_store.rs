//! `baton-bench kv-store` finds every prompt in every place, and the same reply.

use std::process::{Command, Stdio};

use harness::{BATON_BENCH, model};

use super::details;

#[test]
fn the_store_benchmark_finds_each_prompt_in_each_place_and_the_computed_reply() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("figures.json");
    let page = folder.path().join("page.md");
    std::fs::write(&page, "<!-- written by `baton-bench kv-store`: begin -->\n<!-- end -->\n").unwrap();
    let output = Command::new(&*BATON_BENCH)
        .args(["kv-store", "--quick", "--lengths", "100,300", "--threads", "1", "--models"])
        .arg(model())
        .arg("--disk")
        .arg(folder.path())
        .args(["--json".as_ref(), json.as_os_str(), "--page".as_ref(), page.as_os_str()])
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    println!("{table}");
    assert!(output.status.success());
    let figures = details(&json);
    let places = ["computed", "slot", "memory", "other_node", "warm_disk", "cold_disk"];
    for n_tokens in ["100", "300"] {
        let samples = figures["models"][0]["samples"][n_tokens].as_array().unwrap();
        assert_eq!(samples.iter().map(|sample| sample["from"].as_str().unwrap()).collect::<Vec<_>>(), places);
        for sample in samples {
            assert_eq!((&sample["is_whole"], &sample["is_equal"]), (&true.into(), &true.into()), "{sample}");
            assert!(sample["ttft_ms"].as_f64().unwrap() > 0.0, "{sample}");
        }
    }
    assert!(std::fs::read_to_string(page).unwrap().contains("| 300 tokens | disk, page cache cold |"));
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "the store's folder is gone: {left:?}");
    // A report is as fast as itself.
    let same = Command::new(&*BATON_BENCH).arg("compare").args([&json, &json]).output().unwrap();
    assert!(same.status.success(), "{}", String::from_utf8_lossy(&same.stderr));
}
