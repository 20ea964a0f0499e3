//! `baton-bench compare` reads what the benchmarks and the scripts write.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use harness::{BATON_BENCH, BatonServer};

fn compare(old: &Path, new: &Path) -> Output {
    Command::new(&*BATON_BENCH).arg("compare").args([old, new]).output().unwrap()
}

/// Writes a report as `make peers` and `make llama` do, beside the report of the run that they are made of.
fn of_script(run: &Path, name: &str, rate: f64) -> PathBuf {
    let file = run.with_file_name(name);
    let program = "import sys; sys.path.insert(0, sys.argv[1]); from bench_results import Results; \
        results = Results('peers', 'Beside other proxies', sys.argv[2], ['nginx=1.22']); \
        rate = float(sys.argv[3]); \
        results.figure('nginx: requests/s', 'requests_per_second', 'more', [rate, rate + 1, rate - 1]); \
        results.publish('peers')";
    let scripts = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts");
    let mut python = Command::new("python3");
    python.args(["-c", program, scripts]).arg(run).arg(rate.to_string());
    python.env("RESULTS_JSON", &file).env_remove("RESULTS_PAGE").stdout(Stdio::null());
    assert!(python.status().unwrap().success());
    file
}

#[test]
fn reports_of_benchmarks_and_of_scripts_are_compared_and_a_slower_one_fails() {
    let server = BatonServer::with(&["--engine", "sim", "--sim-decode-tps", "2000"]);
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("serve.json");
    let mut serve = Command::new(&*BATON_BENCH);
    serve.args(["serve", "--url", &format!("a={}", server.base), "--requests", "4", "--concurrency", "2"]);
    serve.args(["--output-tokens", "4", "--warm-up", "0", "--input-words", "5-50", "--json"]).arg(&run);
    assert!(serve.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success());
    let same = compare(&run, &run);
    let said = String::from_utf8_lossy(&same.stdout).into_owned();
    assert!(same.status.success() && said.contains("figures are within their noise"), "{said}");

    let [old, slower] = [("old.json", 1_000.0), ("slower.json", 700.0)].map(|(name, rate)| of_script(&run, name, rate));
    let worse = compare(&old, &slower);
    let said = String::from_utf8_lossy(&worse.stdout).into_owned();
    assert!(worse.status.code() == Some(1) && said.contains("WORSE") && said.contains("-30.0 %"), "{said}");
    assert!(said.contains("nginx 1.22") && !said.contains("WARNING"), "{said}");
    let better = compare(&slower, &old);
    assert!(better.status.success(), "{}", String::from_utf8_lossy(&better.stderr));

    let other = compare(&run, &old);
    let said = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(other.status.code() == Some(1) && said.contains("`serve`") && other.stdout.is_empty(), "{said}");
}
