//! `baton-bench many` measures an endpoint with several nodes, and two endpoints that share them.

use std::process::Command;

use harness::BATON_BENCH;

use super::{details, succeed};

#[test]
fn streams_of_one_endpoint_and_of_two_are_counted_on_every_node() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("figures.json");
    let args = ["many", "--nodes", "3", "--streams", "12", "--shared-nodes", "2", "--token-every", "200"];
    succeed(
        Command::new(&*BATON_BENCH)
            .args(args)
            .args(["--duration", "4", "--rounds", "1", "--json"])
            .arg(&json)
            .arg("--svg")
            .arg(folder.path()),
    );
    let figures = details(&json);
    for (cell, n_endpoints, n_nodes) in [(0, 1, 3), (1, 2, 2)] {
        let round = &figures["cells"][cell]["rounds"][0];
        assert_eq!(round["endpoints"].as_array().unwrap().len(), n_endpoints, "{round}");
        let active: Vec<u64> = round["n_active"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        // A client's next reply may begin before its last one has left the node.
        assert!(active.len() == n_nodes && (1..=24).contains(&active.iter().sum::<u64>()), "{round}");
        for endpoint in round["endpoints"].as_array().unwrap() {
            let figure = |name: &str| endpoint[name].as_f64().unwrap_or(f64::NAN);
            assert!(figure("itl_p50_ms") > 0.0 && figure("resident_mib") > 1.0, "{endpoint}");
            assert!(figure("n_tokens") > 0.0 && endpoint["n_wrong"] == 0, "{endpoint}");
        }
    }
    // Three nodes that generate; two that do and one that computes prompts for them; then the same of two.
    let routes: Vec<u64> =
        figures["planning"].as_array().unwrap().iter().map(|plans| plans["n_routes"].as_u64().unwrap()).collect();
    assert_eq!(routes, [2, 2, 3, 4]);
    assert!(std::fs::read_to_string(folder.path().join("many.svg")).unwrap().contains("polyline"));
}
