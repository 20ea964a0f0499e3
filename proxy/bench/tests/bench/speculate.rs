//! `baton-bench speculate` asks every question without and with speculation.

use std::process::{Command, Stdio};

use harness::{BATON_BENCH, model};
use serde_json::Value;

#[test]
fn the_speculation_benchmark_asks_both_nodes_and_counts_equal_replies() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("figures.json");
    let output = Command::new(&*BATON_BENCH)
        .args(["speculate", "--rounds", "1", "--tokens", "24", "--streams", "1,2", "--threads", "1", "--model"])
        .arg(model())
        .arg("--json")
        .arg(&json)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    println!("{table}");
    assert!(output.status.success());
    let figures: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let rows = figures["rows"].as_array().unwrap();
    let count = |row: &Value, field: &str| row[field].as_u64().unwrap();
    let asked: Vec<_> = rows.iter().map(|row| (count(row, "n_streams"), count(row, "n_replies"))).collect();
    assert_eq!(asked, [1, 1, 1, 1, 2, 2, 2, 2].map(|n| (n, n)));
    for row in rows {
        assert!(row["without_tps"].as_f64().unwrap() > 0.0 && row["with_tps"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert!(table.contains("editing code") && table.contains("free prose"), "{table}");
}
