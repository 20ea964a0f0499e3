//! `baton node` and `baton serve` use a network only with TLS or with the operator's explicit permission.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use harness::{BATON, BatonNode, BatonServer, CLUSTER_KEY, eventually_async, long_prompt};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Files of a self-signed certificate for 127.0.0.1 and its key.
struct Certificate {
    cert: PathBuf,
    key: PathBuf,
}

impl Certificate {
    fn write(folder: &tempfile::TempDir) -> Certificate {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let cert = folder.path().join("cert.pem");
        let key = folder.path().join("key.pem");
        std::fs::write(&cert, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        Certificate { cert, key }
    }

    fn cert(&self) -> &str {
        self.cert.to_str().unwrap()
    }

    fn node(&self) -> BatonNode {
        let args = ["--engine", "sim", "--role", "prefill", "--sim-prefill-tps", "100000"];
        BatonNode::with(&[&args[..], &["--tls-cert", self.cert(), "--tls-key", self.key.to_str().unwrap()]].concat())
    }
}

/// Runs a command that must fail by itself, with status 1 and one line. Returns the line.
fn refusal(args: &[&str]) -> String {
    let child = Command::new(&*BATON)
        .args(args)
        .env("BATON_CLUSTER_KEY", CLUSTER_KEY)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let began = Instant::now();
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    let message = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{message}");
    assert!(began.elapsed() < Duration::from_secs(10), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    message
}

async fn info(client: &reqwest::Client, url: &str) -> reqwest::Result<reqwest::Response> {
    client.get(format!("{url}/node/v1/info")).bearer_auth(CLUSTER_KEY).send().await
}

#[test]
fn plain_http_beyond_this_machine_needs_permission() {
    // The model does not exist: the refusal comes before anything is loaded.
    let node = ["node", "--listen", "0.0.0.0:0"];
    for engine in [&["--engine", "sim"][..], &["--model", "absent.gguf"]] {
        let message = refusal(&[&node[..], engine].concat());
        for cure in ["--tls-cert", "--tls-key", "--allow-plain-http"] {
            assert!(message.contains(cure), "{message}");
        }
    }
    let serve = ["serve", "--listen", "127.0.0.1:0"];
    for (args, url) in [
        (&["--engine", "sim", "--prefill", "192.0.2.1:9000"][..], "http://192.0.2.1:9000"),
        (&["--engine", "sim", "--prefill", "http://spark.example:9000"], "http://spark.example:9000"),
        (&["--decode", "http://192.0.2.1:9000"], "http://192.0.2.1:9000"),
    ] {
        let message = refusal(&[&serve[..], args].concat());
        assert!(message.contains(url) && message.contains("--allow-plain-http"), "{message}");
        assert!(message.contains("https://"), "{message}");
    }
}

#[tokio::test]
async fn permission_suffices_for_plain_http() {
    let node = BatonNode::with(&["--engine", "sim", "--listen", "0.0.0.0:0", "--allow-plain-http"]);
    let port = node.url.rsplit_once(':').unwrap().1;
    let reply = info(&reqwest::Client::new(), &format!("http://127.0.0.1:{port}")).await.unwrap();
    assert_eq!(reply.status(), 200);
}

#[test]
fn unusable_tls_files_are_named_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let made = Certificate::write(&folder);
    let cert = made.cert();
    let node = ["node", "--engine", "sim", "--listen", "127.0.0.1:0"];
    let serve = ["serve", "--engine", "sim", "--listen", "127.0.0.1:0"];
    for (base, args, expected) in [
        (node, &["--tls-cert", cert, "--tls-key", "absent.pem"][..], "absent.pem"),
        (node, &["--tls-cert", cert, "--tls-key", cert], "holds no private key"),
        (node, &["--tls-ca", "absent.pem"], "absent.pem"),
        (serve, &["--tls-ca", "absent.pem"], "absent.pem"),
    ] {
        let message = refusal(&[&base[..], args].concat());
        assert!(message.contains("TLS") && message.contains(expected), "{message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kv_is_handed_over_inside_tls() {
    let folder = tempfile::tempdir().unwrap();
    let made = Certificate::write(&folder);
    let node = made.node();
    let url = node.url.replace("http://", "https://");
    let slow_here = ["--engine", "sim", "--sim-prefill-tps", "500", "--policy", "always_handoff", "--no-calibration"];
    let server = BatonServer::with(&[&slow_here[..], &["--prefill", &url, "--tls-ca", made.cert()]].concat());
    let body = json!({
        "model": "sim", "max_tokens": 4,
        "messages": [{ "role": "user", "content": long_prompt("inside TLS", 600) }],
    });
    // The endpoint learns what the node is in the background.
    eventually_async("a handoff", || async {
        let url = format!("{}/v1/chat/completions", server.base);
        let reply: Value = reqwest::Client::new().post(url).json(&body).send().await.unwrap().json().await.unwrap();
        let handoff = &reply["timings"]["handoff"];
        !handoff.is_null() && {
            assert_eq!(handoff["failure"], Value::Null, "{reply}");
            handoff["n_tokens"].as_u64().is_some_and(|n| n > 1_000)
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_renewed_by_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    let first = Certificate::write(&folder);
    let client = |cert: Vec<u8>| {
        let root = reqwest::Certificate::from_pem(&cert).unwrap();
        reqwest::Client::builder().add_root_certificate(root).build().unwrap()
    };
    let node = first.node();
    let url = node.url.replace("http://", "https://");
    assert_eq!(info(&client(std::fs::read(&first.cert).unwrap()), &url).await.unwrap().status(), 200);
    let second = Certificate::write(&folder);
    let cert = std::fs::read(&second.cert).unwrap();
    assert!(info(&client(cert.clone()), &url).await.is_err(), "not read yet");
    node.signal(Signal::HUP);
    eventually_async("the new certificate", || async { info(&client(cert.clone()), &url).await.is_ok() }).await;
}
