//! `baton-bench handoff` and `workers` measure, and fill their tables, files and charts.

use std::process::{Command, Stdio};

use harness::{BATON_BENCH, model};

use super::{details, succeed};

#[test]
fn the_handoff_benchmark_fills_its_table_its_file_and_its_charts() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("figures.json");
    let output = Command::new(&*BATON_BENCH)
        .args(["handoff", "--quick", "--only", "overlap,codecs", "--lengths", "48", "--model"])
        .arg(model())
        .arg("--json")
        .arg(&json)
        .arg("--svg")
        .arg(folder.path())
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success());
    let table = String::from_utf8(output.stdout).unwrap();
    println!("{table}");
    let figures = details(&json);
    let rows = figures["overlap"]["rows"].as_array().unwrap();
    // Five codecs over three links.
    assert_eq!(rows.len(), 15);
    for row in rows {
        assert_eq!(row["n_tokens"], 48);
        // 47 tokens of KV; the most a codec does to them is to quarter them.
        assert!(row["n_bytes"].as_f64().unwrap() > 47.0 * 23_040.0 / 5.0, "{row}");
        assert!(row["prefill_ms"].as_f64().unwrap() > 0.0 && row["after_prefill_ms"].is_number(), "{row}");
    }
    // As behind an endpoint, which lets a decode node measure its links: the length of a last chunk follows from that.
    let measured = |link: &str| {
        let of_link = rows.iter().filter(|row| row["link"] == link).map(|row| row["measured_rate"].as_f64().unwrap());
        of_link.fold(0.0, f64::max)
    };
    assert!(measured("share200") > 0.0 && measured("share200") < measured("loopback"), "{figures}");
    // Moving KV after the prefill takes at least the wire's time.
    let shaped = rows.iter().find(|row| row["codec"] == "none" && row["link"] == "share60").unwrap();
    let wire_ms = shaped["n_bytes"].as_f64().unwrap() / shaped["rate"].as_f64().unwrap() * 1e3;
    let after_ms = shaped["after_ms"].as_f64().unwrap();
    assert!(after_ms > 0.9 * wire_ms, "{after_ms} ms for {wire_ms} ms of wire: the link is not shaped");
    assert!(figures["codecs"][2]["ratio"].as_f64().unwrap() > 1.8, "{figures}");
    assert!(figures["wire"].is_null() && table.contains("after it"), "{table}");
    for chart in ["after-prefill.svg", "ttft.svg"] {
        assert!(std::fs::read_to_string(folder.path().join(chart)).unwrap().contains("polyline"), "{chart}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn the_workers_benchmark_measures_none_one_and_two_and_a_model_too_large_for_one() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("figures.json");
    let model = model();
    // Three quarters of the weights each.
    let lent = (std::fs::metadata(&model).unwrap().len() * 3 / 4 / (1 << 20)).to_string();
    let table = succeed(
        Command::new(&*BATON_BENCH)
            .args(["workers", "--quick", "--lend-memory", &lent, "--model"])
            .arg(model)
            .arg("--json")
            .arg(&json),
    );
    let rows = details(&json);
    let rows = rows.as_array().unwrap();
    let workers: Vec<u64> = rows.iter().map(|row| row["n_workers"].as_u64().unwrap()).collect();
    assert_eq!(workers, [0, 1, 2]);
    for row in rows {
        assert!(row["prefill_tps"].as_f64().unwrap() > 0.0 && row["decode_tps"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert!(table.contains("one worker: ") && table.contains("two workers: 32 of 32 tokens"), "{table}");
}
