use std::collections::BTreeMap;

use baton_planner::reason::{RouteKind, RouteReason};
use baton_schemas::draft::DrafterLoss;
use baton_schemas::handoff::{HandoffFailure, HandoffReport};
use baton_schemas::sequence::{DraftCounts, DraftTotals};
use baton_schemas::store_report::StoreReport;
use futures::StreamExt;

use super::requests::{AdmissionOutcome, AdmissionWait, RequestSummary, RouteSummary};
use super::*;
use crate::error::RequestErrorKind;
use crate::http::HttpBackend;
use crate::observe::snapshot::{BreakerReport, FallbackState, LinkState, LoadStateReport, UpstreamReport};
use crate::observe::tests::{app, caller, request};
use crate::observe::{RequestOutcome, TokenSources};
use crate::targets::nodes::FallbackReason;

/// Reads the text format: each series by its name with labels. Fails on what no scraper would take.
fn parse(text: &str) -> BTreeMap<&str, f64> {
    assert!(text.ends_with("# EOF\n"), "OpenMetrics ends with EOF");
    let mut typed = std::collections::BTreeSet::new();
    let mut series = BTreeMap::new();
    for line in text.lines().take_while(|line| *line != "# EOF") {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let keyword = words.next().unwrap();
            let name = words.next().unwrap();
            assert!(["HELP", "TYPE", "UNIT"].contains(&keyword), "{line}");
            assert!(keyword != "TYPE" || typed.insert(name), "{name} is declared twice");
            continue;
        }
        let (key, value) = line.rsplit_once(' ').unwrap();
        assert!(key.starts_with("baton_") || key == "process_start_time_seconds", "{line}");
        assert!(series.insert(key, value.parse().unwrap()).is_none(), "{key} is there twice");
    }
    series
}

#[tokio::test]
async fn what_happened_can_be_scraped() {
    let app = app().await;
    for _ in 0..3 {
        let mut reply = app.generate(request("alias"), caller()).await.unwrap();
        while reply.events.next().await.is_some() {}
    }
    assert!(app.generate(request("not-there"), caller()).await.is_err());
    app.targets.pool.models()[0].fallbacks.count(FallbackReason::DecodeLost);
    app.observer.metrics.replied("/v1/models/{*id}", 404);

    let text = text(&app.observer, &app.state(false));
    let series = parse(&text);
    let check = |key: &str, expected: f64| assert_eq!(series.get(key), Some(&expected), "{key} in\n{text}");
    check(r#"baton_requests_total{model="m",outcome="done"}"#, 3.0);
    check(r#"baton_requests_total{model="unknown",outcome="refused"}"#, 1.0);
    check(r#"baton_request_errors_total{model="unknown",reason="model_not_found"}"#, 1.0);
    check(r#"baton_route_decisions_total{model="m",route="direct",reason="only_route"}"#, 3.0);
    check(r#"baton_generation_tokens_total{model="m"}"#, 24.0);
    check(r#"baton_time_to_first_token_seconds_count{model="m",route="direct"}"#, 3.0);
    check(r#"baton_e2e_request_latency_seconds_count{model="m",route="direct"}"#, 3.0);
    check(r#"baton_request_queue_time_seconds_count{model="m"}"#, 3.0);
    check(r#"baton_admission_wait_seconds_count{model="m",outcome="admitted"}"#, 3.0);
    check(r#"baton_admission_wait_seconds_count{model="unknown",outcome="refused"}"#, 1.0);
    check(r#"baton_inter_token_latency_seconds_count{model="m"}"#, 21.0);
    check(r#"baton_fallbacks_total{model="m",reason="decode_lost"}"#, 1.0);
    check(r#"baton_http_requests_total{path="/v1/models/{*id}",status="404"}"#, 1.0);
    check(r#"baton_node_up{model="m",node="local",task="decode"}"#, 1.0);
    check(r#"baton_node_state{model="m",node="local",task="decode",state="ready"}"#, 1.0);
    check(r#"baton_node_state{model="m",node="local",task="decode",state="suspect"}"#, 0.0);
    let change = r#"from="starting",to="ready",reason="answers""#;
    check(&format!(r#"baton_node_state_transitions_total{{model="m",node="local",task="decode",{change}}}"#), 1.0);
    check(r#"baton_node_slots{model="m",node="local",task="decode"}"#, 4.0);
    check(r#"baton_node_breaker_open{model="m",node="local",task="decode"}"#, 0.0);
    check("baton_requests_running", 0.0);
    let from =
        |source: &str| series[&*format!(r#"baton_prompt_tokens_by_source_total{{model="m",source="{source}"}}"#)];
    let n_prompt = series[r#"baton_prompt_tokens_total{model="m"}"#];
    assert!(from("slot") > 0.0 && from("computed") > 0.0 && from("slot") + from("computed") == n_prompt, "{text}");
    assert_eq!([from("memory"), from("disk"), from("pulled")], [0.0; 3]);
    assert!(!text.contains("secret") && !text.contains("not-there"), "{text}");
}

#[tokio::test]
async fn a_nodes_store_can_be_scraped() {
    let app = app().await;
    let mut state = app.state(false);
    assert!(!text(&app.observer, &state).contains("kv_store"), "the node has none");
    state.models[0].nodes[0].kv_store = Some(StoreReport {
        blocks: 1,
        memory_bytes: 2,
        disk_bytes: 3,
        written_today_bytes: 4,
        memory_tokens: 5,
        disk_tokens: 6,
        memory_evictions: 7,
        disk_evictions: 8,
        written_bytes: 9,
        failed_writes: 10,
        refused_files: 11,
        shared_steps: 12,
        most_step_tokens: 13,
    });
    let text = text(&app.observer, &state);
    let series = parse(&text);
    let check = |name: &str, tier: Option<&str>, expected: f64| {
        let tier = tier.map_or_else(String::new, |tier| format!(",tier=\"{tier}\""));
        let key = format!("baton_node_kv_store_{name}{{model=\"m\",node=\"local\",task=\"decode\"{tier}}}");
        assert_eq!(series.get(&*key), Some(&expected), "{key} in\n{text}");
    };
    check("blocks", None, 1.0);
    check("bytes", Some("memory"), 2.0);
    check("bytes", Some("disk"), 3.0);
    check("written_today_bytes", None, 4.0);
    check("restored_tokens_total", Some("memory"), 5.0);
    check("restored_tokens_total", Some("disk"), 6.0);
    check("evictions_total", Some("memory"), 7.0);
    check("evictions_total", Some("disk"), 8.0);
    check("written_bytes_total", None, 9.0);
    check("failed_writes_total", None, 10.0);
    check("refused_files_total", None, 11.0);
    check("shared_steps_total", None, 12.0);
    check("most_step_tokens", None, 13.0);
}

/// The dashboard asks for series that exist.
#[tokio::test]
async fn every_series_of_the_dashboard_is_there() {
    let app = app().await;
    // A family without a series is not written.
    let mut reply = app.generate(request("m"), caller()).await.unwrap();
    while reply.events.next().await.is_some() {}
    drop(reply);
    app.observer.metrics.replied("/", 200);
    app.targets.pool.models()[0].fallbacks.count(FallbackReason::Handoff(HandoffFailure::PrefillDown));
    app.observer.metrics.ended(&RequestSummary {
        model: "m",
        outcome: RequestOutcome::Failed,
        error: Some(RequestErrorKind::Internal),
        admission: AdmissionWait { outcome: AdmissionOutcome::Admitted, seconds: 0.5 },
        route: Some(RouteSummary {
            kind: RouteKind::Handoff,
            reason: RouteReason::Faster,
            n_prompt: 2,
            sources: TokenSources::default(),
            n_completion: 1,
            queued: None,
            ttft: None,
            prediction_ratio: Some(1.0),
            completion_ratio: Some(1.0),
            handoff: Some(HandoffReport::default()),
            drafts: DraftTotals {
                lookup: DraftCounts { n: 5, n_accepted: 3 },
                remote: DraftCounts { n: 4, n_accepted: 4 },
                ..DraftTotals::default()
            },
            lost_drafters: vec![DrafterLoss::Late, DrafterLoss::Late],
        }),
        e2e: 1.0,
    });
    let mut state = app.state(false);
    state.models[0].links.push(LinkState::default());
    let unloads = [("idle".to_owned(), 1)].into();
    state.models[0].load_state = Some(LoadStateReport { unloads, ..LoadStateReport::default() });
    let breaker = BreakerReport { failures: [("unreachable".to_owned(), 1)].into(), ..BreakerReport::default() };
    let fallbacks = [("prefill_failed".to_owned(), FallbackState::default())].into();
    state.upstreams.push(UpstreamReport { name: "up".into(), breaker, fallbacks, ..UpstreamReport::default() });
    let scraped = text(&app.observer, &state);
    for (result, n) in [("accepted", 3), ("rejected", 2)] {
        let drafts = r#"baton_draft_tokens_total{model="m",drafter="prompt_lookup",result="#;
        assert!(scraped.contains(&format!("{drafts}\"{result}\"}} {n}\n")), "{scraped}");
    }
    let of_remote = r#"baton_draft_tokens_total{model="m",drafter="remote",result="accepted"} 4"#;
    assert!(scraped.contains(of_remote), "{scraped}");
    assert!(scraped.contains("baton_lost_draft_nodes_total{model=\"m\",reason=\"late\"} 2\n"), "{scraped}");
    let declared: Vec<String> = scraped
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .flat_map(|(name, kind)| match kind {
            "counter" => vec![format!("{name}_total")],
            "histogram" => vec![format!("{name}_bucket")],
            _ => vec![name.to_owned()],
        })
        .collect();
    let dashboard = include_str!("../../../../docs/grafana/baton.json");
    let dashboard: serde_json::Value = serde_json::from_str(dashboard).unwrap();
    let mut n_series = 0;
    for target in dashboard["panels"].as_array().unwrap().iter().flat_map(|panel| panel["targets"].as_array().unwrap())
    {
        let words = target["expr"].as_str().unwrap().split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for name in words.filter(|word| word.starts_with("baton_")) {
            assert!(declared.iter().any(|known| known == name), "{name} is not scraped");
            n_series += 1;
        }
    }
    assert!(n_series > 20);
}
