//! One trace spans an endpoint, its nodes and its upstreams, and a collector receives it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use harness::{BATON, BatonNode, BatonServer, CLUSTER_KEY, chat, eventually, eventually_async, long_prompt};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use prost::Message;
use serde_json::json;

/// The fields of a span that these tests check.
#[derive(Debug, Clone)]
struct ExportedSpan {
    service: String,
    name: String,
    trace: Vec<u8>,
    id: Vec<u8>,
    parent: Vec<u8>,
}

/// A collector of OTLP over HTTP.
struct FakeCollector {
    url: String,
    bodies: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl FakeCollector {
    fn start() -> FakeCollector {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&bodies);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let kept = Arc::clone(&kept);
                std::thread::spawn(move || serve(stream.unwrap(), &kept));
            }
        });
        FakeCollector { url, bodies }
    }

    fn spans(&self) -> Vec<ExportedSpan> {
        let mut spans = Vec::new();
        for body in self.bodies.lock().unwrap().iter() {
            let export = ExportTraceServiceRequest::decode(&body[..]).unwrap();
            for resource in export.resource_spans {
                let text = format!("{:?}", resource.resource.unwrap());
                let service = if text.contains("\"baton-node\"") { "baton-node" } else { "baton" }.to_owned();
                for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                    let service = service.clone();
                    let trace = span.trace_id;
                    let id = span.span_id;
                    let parent = span.parent_span_id;
                    spans.push(ExportedSpan { service, name: span.name, trace, id, parent });
                }
            }
        }
        spans
    }
}

fn serve(mut stream: std::net::TcpStream, kept: &Mutex<Vec<Vec<u8>>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let mut n_bytes = 0;
        let mut line = String::new();
        loop {
            line.clear();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if let Some(n) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                n_bytes = n.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
        }
        let mut body = vec![0; n_bytes];
        reader.read_exact(&mut body).unwrap();
        kept.lock().unwrap().push(body);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
    }
}

/// A node that sends its traces to the collector.
fn node(collector: &str, args: &[&str]) -> (std::process::Child, String) {
    let mut command = Command::new(&*BATON);
    command.args(["node", "--listen", "127.0.0.1:0", "--engine", "sim"]).args(args);
    command.env("BATON_CLUSTER_KEY", CLUSTER_KEY).env("OTEL_EXPORTER_OTLP_ENDPOINT", collector);
    let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
    let ready = lines.find_map(|line| line.unwrap().split_once("is ready on ").map(|(_, at)| at.to_owned()));
    std::thread::spawn(move || lines.for_each(drop));
    (process, format!("http://{}", ready.expect("a node")))
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

/// The client's span.
const CLIENT: &str = "b7ad6b7169203331";

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_goes_through_the_endpoint_and_both_nodes() {
    let collector = FakeCollector::start();
    let (mut prefill, prefill_url) = node(&collector.url, &["--role", "prefill"]);
    let (mut decode, decode_url) = node(&collector.url, &["--role", "decode"]);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("[tracing]\notlp_endpoint = \"{}\"\n", collector.url)).unwrap();
    let nodes = ["--decode", &decode_url, "--prefill", &prefill_url, "--policy", "always_handoff", "--no-calibration"];
    let server = BatonServer::with(&[&nodes[..], &["--config", file.path().to_str().unwrap()]].concat());

    let body = chat(&long_prompt("a secret prompt", 200), json!({ "model": "sim", "max_tokens": 4, "stream": true }));
    let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
    let call = call.header("traceparent", format!("00-{TRACE}-{CLIENT}-01"));
    let reply = call.send().await.unwrap().text().await.unwrap();
    assert!(reply.contains("[DONE]"), "{reply}");

    let wanted = [
        ("baton", "request"),
        ("baton", "admission_wait"),
        ("baton", "prompt"),
        ("baton", "plan"),
        ("baton", "decode"),
        ("baton-node", "node_render"),
        ("baton-node", "node_generate"),
        ("baton-node", "handoff_pull"),
        ("baton-node", "node_prefill"),
    ];
    let find = |spans: &[ExportedSpan], (service, name): (&str, &str)| {
        spans.iter().find(|span| span.service == service && span.name == name).cloned()
    };
    let spans = eventually("all spans", || {
        let spans = collector.spans();
        wanted.iter().all(|wanted| find(&spans, *wanted).is_some()).then_some(spans)
    });
    let trace: String = spans[0].trace.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(trace, TRACE, "the client's");
    assert!(spans.iter().all(|span| span.trace == spans[0].trace), "{spans:#?}");
    let parent_of = |child: (&str, &str)| {
        let child = find(&spans, child).unwrap();
        spans.iter().find(|span| span.id == child.parent).map(|span| span.name.clone()).unwrap_or_default()
    };
    for name in ["admission_wait", "prompt", "plan", "decode"] {
        assert_eq!(parent_of(("baton", name)), "request", "{name}");
    }
    assert_eq!(parent_of(("baton-node", "node_render")), "prompt");
    assert_eq!(parent_of(("baton-node", "node_generate")), "decode");
    assert_eq!(parent_of(("baton-node", "handoff_pull")), "decode");
    assert_eq!(parent_of(("baton-node", "node_prefill")), "handoff_pull");
    let bodies = collector.bodies.lock().unwrap().concat();
    assert!(!String::from_utf8_lossy(&bodies).contains("secret"));
    for node in [&mut prefill, &mut decode] {
        node.kill().unwrap();
        node.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_continues_the_trace() {
    let collector = FakeCollector::start();
    let tracing = format!("[tracing]\notlp_endpoint = \"{}\"\n", collector.url);
    let theirs = tempfile::NamedTempFile::new().unwrap();
    let ours = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(theirs.path(), &tracing).unwrap();
    let node = BatonNode::with(&["--engine", "sim"]);
    let upstream = BatonServer::with(&["--decode", &node.url, "--config", theirs.path().to_str().unwrap()]);
    let entry = format!("[[upstream]]\nname = \"far\"\nkind = \"openai\"\nurl = \"{}\"\n", upstream.base);
    std::fs::write(ours.path(), tracing + &entry + "models = { m = \"sim\" }\n").unwrap();
    let server = BatonServer::with(&["--config", ours.path().to_str().unwrap()]);

    let body = chat("a secret prompt", json!({ "model": "m", "max_tokens": 4 }));
    let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
    let reply = call.header("traceparent", format!("00-{TRACE}-{CLIENT}-01")).send().await.unwrap();
    assert_eq!(reply.status(), 200);

    let hex = |id: &[u8]| id.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    // Each span is a child of the one before, from the client's span down.
    let chained = |wanted: &[&str]| {
        eventually("a chain of spans", || {
            let spans = collector.spans();
            assert!(spans.iter().all(|span| hex(&span.trace) == TRACE), "{spans:#?}");
            let chain = wanted.iter().try_fold(CLIENT.to_owned(), |parent, name| {
                let child = spans.iter().find(|span| span.name == *name && hex(&span.parent) == parent)?;
                Some(hex(&child.id))
            });
            chain.is_some().then_some(())
        });
    };
    chained(&["request", "upstream", "request", "decode"]);

    // The same holds for vectors.
    let is_silent = || !String::from_utf8_lossy(&collector.bodies.lock().unwrap().concat()).contains("secret");
    assert!(is_silent());
    collector.bodies.lock().unwrap().clear();
    let body = json!({ "model": "m", "input": "a secret text" });
    let call = reqwest::Client::new().post(format!("{}/v1/embeddings", server.base)).json(&body);
    let reply = call.header("traceparent", format!("00-{TRACE}-{CLIENT}-01")).send().await.unwrap();
    assert_eq!(reply.status(), 200);
    chained(&["request", "request"]);
    assert!(is_silent());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_collector_delays_no_request() {
    // It accepts connections and never answers.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let endpoint = format!("[tracing]\notlp_endpoint = \"http://{}\"\n", silent.local_addr().unwrap());
    std::fs::write(file.path(), endpoint).unwrap();
    let n_attempts = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&n_attempts);
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((connection, _)) = silent.accept().await {
            held.push(connection);
            counter.fetch_add(1, Ordering::SeqCst);
        }
    });
    let node = BatonNode::with(&["--engine", "sim"]);
    let server = BatonServer::with(&["--decode", &node.url, "--config", file.path().to_str().unwrap()]);
    let body = chat("hi", json!({ "model": "sim", "max_tokens": 2 }));
    // The exporter opens a second connection once it has given up on the first.
    eventually_async("a second attempt to export", async || {
        let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
        let reply = tokio::time::timeout(Duration::from_secs(4), call.send()).await.expect("no request waits for it");
        assert_eq!(reply.unwrap().status(), 200);
        n_attempts.load(Ordering::SeqCst) >= 2
    })
    .await;
}
