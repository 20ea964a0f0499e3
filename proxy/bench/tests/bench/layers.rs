//! `baton-bench layers` measures a real worker, and computes published machines.

use std::process::Command;

use harness::{BATON_BENCH, model};
use serde_json::Value;

use super::{details, succeed};

/// The table and the figures of a run.
fn run(args: &[&str]) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("figures.json");
    let table = succeed(Command::new(&*BATON_BENCH).arg("layers").args(args).arg("--json").arg(&json));
    (table, details(&json))
}

#[cfg(target_os = "linux")]
#[test]
fn lent_layers_are_measured_with_the_memory_of_both_sides() {
    let model = model();
    let sizes = ["--lent", "0,12", "--lengths", "300", "--rounds", "1", "--no-auto"];
    let (_, figures) = run(&[&["--model", model.to_str().unwrap()], &sizes[..]].concat());
    let rows = figures["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["n_lent"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 12]);
    let mib = |row: usize, side: &str| rows[row][side].as_f64();
    assert!(rows.iter().all(|row| row["ttft"][0][0].as_f64() > Some(0.0)), "{figures}");
    // Other tests may map the same file, and then share its pages.
    assert!(mib(0, "own_mib") > Some(0.0) && mib(0, "worker_mib").is_none(), "{figures}");
    // 12 of 30 layers, without the vocabulary, which has a fifth of the weights.
    let weights = figures["weights_mib"].as_f64().unwrap();
    assert!(mib(1, "own_mib") > Some(0.0) && mib(1, "worker_mib") > Some(0.25 * weights), "{figures}");
}

#[test]
fn published_machines_are_marked_as_simulated() {
    let (table, figures) = run(&["--simulate"]);
    assert_eq!(figures["note"], "simulation");
    assert!(table.contains("Nothing was run on these machines"), "{table}");
    let links = figures["links"].as_array().unwrap();
    assert!(links.iter().all(|link| link["rows"].as_array().unwrap().len() == 33), "0 to 32 layers: {figures}");
}
