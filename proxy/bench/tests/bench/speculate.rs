//! `baton-bench speculate` asks every question without and with each drafter.

use std::path::Path;
use std::process::{Command, Stdio};

use harness::BATON_BENCH;
use serde_json::Value;
use tiny_gguf::Architecture;

use super::details;

/// What the benchmark prints, and its figures.
fn measured(args: &[&str], model: Option<&Path>) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("figures.json");
    let mut command = Command::new(&*BATON_BENCH);
    command.arg("speculate").args(args).arg("--json").arg(&json).stderr(Stdio::inherit());
    if let Some(model) = model {
        command.arg("--model").arg(model);
    }
    let output = command.output().unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    println!("{table}");
    assert!(output.status.success());
    (table, details(&json))
}

#[test]
fn the_speculation_benchmark_asks_with_every_drafter_and_counts_equal_replies() {
    let folder = tempfile::tempdir().unwrap();
    // Its replies are noise, but it gets the questions of a real model.
    let model = folder.path().join("tiny.gguf");
    tiny_gguf::write_with_template(&model, Architecture::Llama, 1);
    let args = ["--rounds", "2", "--tokens", "12", "--streams", "1,2", "--threads", "1", "--draft"];
    let (table, figures) = measured(&[&args[..], &[model.to_str().unwrap()]].concat(), Some(&model));
    let rows = figures["rows"].as_array().unwrap();
    let word = |row: &Value, field: &str| row[field].as_str().unwrap().to_owned();
    let guessers = ["nothing", "prompt_lookup", "draft_model", "draft_node", "prediction"];
    for n_streams in [1, 2] {
        for what in ["editing code", "summarising", "JSON by a schema", "free prose"] {
            let of = |row: &&Value| row["n_streams"] == n_streams && row["what"] == what;
            let of: Vec<&Value> = rows.iter().filter(of).collect();
            assert_eq!(of.iter().map(|row| word(row, "guesser")).collect::<Vec<_>>(), guessers);
            for row in of {
                assert!(row["tps"].as_f64().unwrap() > 0.0 && row["itl_p99_ms"].as_f64().is_some(), "{row}");
                assert_eq!(row["n_replies"], 2 * n_streams);
            }
        }
    }
    assert_eq!(rows.len(), 2 * 4 * guessers.len());
    assert!(table.contains("The lowest ratio of Baton's"), "{table}");
}

#[test]
fn the_speculation_benchmark_makes_up_a_model_and_predicts_its_replies() {
    let args = ["--rounds", "1", "--tokens", "48", "--streams", "1", "--threads", "1", "--model", "dense-tiny"];
    let (_, figures) = measured(&args, None);
    let rows = figures["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| row["what"] == "random weights" && row["tps"].as_f64().unwrap() > 0.0), "{rows:?}");
}

#[test]
fn the_speculation_benchmark_shows_what_the_head_of_a_model_costs_and_guesses() {
    let args = ["--rounds", "2", "--tokens", "24", "--streams", "1", "--threads", "1", "--model", "mtp-tiny"];
    let (table, figures) = measured(&args, None);
    let rows = figures["rows"].as_array().unwrap();
    let guessers: Vec<&Value> = rows.iter().map(|row| &row["guesser"]).collect();
    assert_eq!(guessers, ["nothing", "head", "prediction"]);
    let millis = |field: &str| figures["head"][field].as_f64().unwrap();
    assert!(millis("pass_ms") > 0.0 && millis("step_ms") > 0.0, "{figures}");
    assert!(table.contains("A pass of the model's own head takes"), "{table}");
}

#[test]
fn the_simulated_machines_are_printed_without_a_model() {
    let (table, figures) = measured(&["--simulate"], None);
    for part in ["Nothing was run on these machines", "DGX Spark", "M5 Max", "35B-A3B", "70B"] {
        assert!(table.contains(part), "{table}");
    }
    assert!(figures["regret_p95"].as_f64().unwrap() <= 0.05);
}
