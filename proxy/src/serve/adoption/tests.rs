use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::remote::NodePaths;

use super::places::{host_of, is_same_server};
use super::*;
use crate::targets::nodes::{FoundPaths, Health};

fn config(adopts: bool, hosts: &[&str]) -> AdoptionConfig {
    AdoptionConfig { adopts, hosts: hosts.iter().map(|&host| host.to_owned()).collect(), aliases: Vec::new() }
}

fn urls(config: &AdoptionConfig, paired: &[&str], own_ports: &[u16]) -> Vec<String> {
    let paired = paired.iter().map(|&host| host.to_owned());
    places(config, paired, own_ports).into_iter().map(|place| place.url).collect()
}

#[test]
fn only_loopback_paired_and_named_machines_are_asked() {
    let loopback = urls(&config(true, &[]), &[], &[8080]);
    assert!(
        loopback.contains(&"http://127.0.0.1:11434".to_owned())
            && loopback.contains(&"http://127.0.0.1:8081".to_owned())
    );
    assert!(loopback.iter().all(|url| url.starts_with("http://127.0.0.1:") && !url.ends_with(":8080")), "{loopback:?}");
    let paired = urls(&config(true, &[]), &["10.0.0.7", "fd00::7"], &[8080]);
    assert!(
        paired.contains(&"http://10.0.0.7:8080".to_owned()) && paired.contains(&"http://[fd00::7]:1234".to_owned())
    );
    assert_eq!(paired.len(), 3 * loopback.len() + 2);
    assert!(urls(&config(false, &[]), &["10.0.0.7"], &[]).is_empty(), "nothing without the operator's wish");
    let named = urls(&config(false, &["spark:9999", "[fd00::5]:1", "spark:9999"]), &["10.0.0.7"], &[]);
    assert_eq!(named, ["http://spark:9999", "http://[fd00::5]:1"]);
    let once = urls(&config(true, &["localhost:11434", "127.0.0.1"]), &[], &[]);
    assert_eq!(once, urls(&config(true, &[]), &[], &[]), "each place once");
}

#[test]
fn a_configured_server_is_recognised_by_its_address() {
    for (one, other, expected) in [
        ("http://127.0.0.1:11434", "http://localhost:11434/v1", true),
        ("http://[::1]:11434", "http://127.0.0.1:11434", true),
        ("http://Spark:80", "http://spark/v1", true),
        ("http://spark:81", "http://spark", false),
        ("http://spark:81", "http://mac:81", false),
    ] {
        assert_eq!(is_same_server(one, other), expected, "{one} {other}");
    }
    assert_eq!(host_of("http://[fd00::5]:9000/x").as_deref(), Some("fd00::5"));
}

fn place(url: &str) -> ServerPlace {
    let all = places(&config(false, &[url]), std::iter::empty(), &[]);
    all.into_iter().next().unwrap()
}

fn server(program: ServerProgram, models: &[&str]) -> ProbeOutcome {
    let model = |name: &&str| FoundModel { name: (*name).to_owned(), capabilities: Vec::new() };
    ProbeOutcome::Server(ServerFound { program, models: models.iter().map(model).collect() })
}

#[test]
fn names_are_free_and_stay_and_a_silent_server_leaves_late() {
    let (mut known, mut taken) = (BTreeMap::new(), vec!["ollama".to_owned()]);
    let (near, far) = (place("127.0.0.1:11434"), place("spark:11434"));
    note(&mut known, &mut taken, &near, server(ServerProgram::Ollama, &["a"]));
    note(&mut known, &mut taken, &far, server(ServerProgram::Ollama, &["b"]));
    note(&mut known, &mut taken, &near, server(ServerProgram::Ollama, &["a", "c"]));
    let names =
        |known: &BTreeMap<String, AdoptedServer>| known.values().map(|one| one.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&known), ["ollama-11434", "ollama-spark"]);
    assert_eq!(known[&near.url].found.models.len(), 2);
    for _ in 1..MAX_MISSED {
        note(&mut known, &mut taken, &near, ProbeOutcome::Nobody);
    }
    assert_eq!(known.len(), 2);
    note(&mut known, &mut taken, &near, ProbeOutcome::Nobody);
    note(&mut known, &mut taken, &far, ProbeOutcome::Failing);
    assert_eq!(names(&known), ["ollama-spark"], "one that is busy stays");
    note(&mut known, &mut taken, &far, ProbeOutcome::Own);
    assert!(known.is_empty(), "what is another thing now leaves at once");
}

#[test]
fn another_baton_without_models_of_its_own_is_not_used() {
    let (mut known, mut taken) = (BTreeMap::new(), Vec::new());
    let there = place("127.0.0.1:8081");
    note(&mut known, &mut taken, &there, server(ServerProgram::Baton, &[]));
    assert!(known.is_empty() && taken.is_empty());
    note(&mut known, &mut taken, &there, server(ServerProgram::Baton, &["own"]));
    assert!(known[&there.url].serves_anything());
    note(&mut known, &mut taken, &there, server(ServerProgram::Baton, &[]));
    assert!(!known[&there.url].serves_anything(), "its list has models of its upstreams");
    note(&mut known, &mut taken, &there, server(ServerProgram::Ollama, &[]));
    assert!(known[&there.url].serves_anything(), "it may fetch some");
}

#[test]
fn of_another_baton_only_its_own_models_are_used_and_aliases_belong_to_their_server() {
    let ProbeOutcome::Server(found) = server(ServerProgram::Baton, &["own"]) else { unreachable!() };
    let alias = |upstream: &str, model: &str| UpstreamAlias {
        name: "coder".to_owned(),
        upstream: upstream.to_owned(),
        model: model.to_owned(),
    };
    let aliases = vec![alias("baton", "own"), alias("ollama", "other")];
    let config = AdoptionConfig { aliases, ..config(true, &[]) };
    let baton = AdoptedServer { name: "baton".to_owned(), found, n_missed: 0 };
    let settings = baton.settings("http://127.0.0.1:8081", &config, &[]);
    assert_eq!(settings.models, [ModelAlias { ours: "own".to_owned(), theirs: "own".to_owned() }]);
    assert_eq!(settings.aliases, [ModelAlias { ours: "coder".to_owned(), theirs: "own".to_owned() }]);
    assert!(settings.is_adopted);
}

#[tokio::test]
async fn a_found_node_is_looked_for_only_where_it_has_proven_the_key() {
    let engine = || Arc::new(SimEngine::new(SimConfig::default()));
    let paths = |addresses: &[&str]| NodePaths::new(addresses.iter().map(|address| address.parse().unwrap()).collect());
    let found = FoundPaths::new(7, paths(&["10.0.0.7:9000", "192.0.2.66:9000"]), paths(&["10.0.0.7:9000"]));
    let node = Node::found("spark".into(), "https://spark.local:9000".into(), found, engine(), Health::new("spark"));
    assert_eq!(hosts_of(&node), ["10.0.0.7"], "anybody can announce the other one");
    let configured = Node::new("mac".into(), Some("https://mac.local:9000".into()), engine(), Health::new("mac"));
    assert_eq!(hosts_of(&configured), ["mac.local"]);
}

/// A server's answers to each of the calls that tell what it is.
#[derive(Clone, Copy)]
struct Answers {
    models: (StatusCode, &'static str),
    version: (StatusCode, &'static str),
}

async fn asked(Answers { models, version }: Answers) -> ProbeOutcome {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let routes = Router::new()
        .route("/v1/models", get(move || async move { models }))
        .route("/api/version", get(move || async move { version }));
    let served = tokio::spawn(async move { axum::serve(listener, routes).await });
    let outcome = Prober::new(&Transport::default()).unwrap().ask(&base).await;
    served.abort();
    outcome
}

#[tokio::test]
async fn a_server_that_cannot_answer_for_a_moment_is_taken_for_no_other() {
    const LIST: &str = r#"{"data":[{"id":"m","owned_by":"library"}]}"#;
    let well = Answers { models: (StatusCode::OK, LIST), version: (StatusCode::OK, r#"{"version":"0.14.2"}"#) };
    let ProbeOutcome::Server(found) = asked(well).await else { panic!("a server") };
    assert_eq!((found.program, found.models.len()), (ServerProgram::Ollama, 1));
    for busy in [StatusCode::SERVICE_UNAVAILABLE, StatusCode::TOO_MANY_REQUESTS, StatusCode::BAD_GATEWAY] {
        assert_eq!(asked(Answers { models: (busy, ""), ..well }).await, ProbeOutcome::Failing, "{busy}");
        assert_eq!(asked(Answers { version: (busy, ""), ..well }).await, ProbeOutcome::Failing, "{busy}");
    }
    for without in [StatusCode::NOT_FOUND, StatusCode::NOT_IMPLEMENTED] {
        let ProbeOutcome::Server(found) = asked(Answers { version: (without, ""), ..well }).await else { panic!() };
        assert_eq!(found.program, ServerProgram::Openai, "{without}");
    }
    assert_eq!(asked(Answers { models: (StatusCode::NOT_FOUND, ""), ..well }).await, ProbeOutcome::Unknown);
    assert_eq!(asked(Answers { models: (StatusCode::OK, "a page"), ..well }).await, ProbeOutcome::Unknown);
}
