//! What models, state, metrics and status show of upstreams, and how a changed configuration takes effect.

use std::process::Command;
use std::time::Duration;

use harness::mock::{Mock, Step, done, head, says, text};
use harness::{BATON, eventually_async};
use harness::{ReloadableServer, upstream};
use rustix::process::Signal;
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn models_state_metrics_and_status_show_upstreams() {
    let mock = Mock::listing(&["their/model:7b"], |_, _| says("well")).await;
    let named = upstream("named", "openai", &mock.url, "");
    let front = ReloadableServer::start(&(named + &upstream("listed", "openai", &mock.url, "models = {}")));
    let ids = |list: serde_json::Value| -> Vec<String> {
        list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(ids(front.get("/v1/models").await), ["m", "their/model:7b"]);
    let tags = front.get("/api/tags").await;
    assert_eq!(tags["models"][0]["name"], "m:latest", "{tags}");
    let show = front.post("/api/show", &json!({ "model": "m" })).await;
    assert_eq!((show.status, &show.json()["capabilities"][0]), (200, &json!("completion")), "{show:?}");
    let loaded = front.post("/api/chat", &json!({ "model": "m", "messages": [] })).await;
    assert_eq!((loaded.status, &loaded.json()["done_reason"]), (200, &json!("load")), "{loaded:?}");
    let mut body = harness::said("hi", json!({}));
    body["model"] = json!("Their/Model:7B");
    let answer = front.post("/v1/chat/completions", &body).await;
    assert!(answer.status == 200 && answer.route.contains("upstream=listed"), "{answer:?}");
    assert_eq!(mock.asked(0).body["model"], "their/model:7b", "by its own name");
    let missing = front.post("/v1/messages/count_tokens", &harness::said("hi", json!({}))).await;
    assert_eq!(missing.status, 501, "{missing:?}");

    let state = front.get("/baton/state").await;
    assert_eq!((&state["upstreams"][0]["name"], &state["upstreams"][0]["life"]), (&json!("named"), &json!("ready")));
    assert_eq!((&state["routes"][0]["decode"], &state["routes"][0]["policy"]), (&json!("listed"), &json!("upstream")));
    let metrics = reqwest::get(format!("{}/metrics", front.server.base)).await.unwrap().text().await.unwrap();
    for line in ["baton_upstream_up{upstream=\"named\"} 1", "route=\"upstream\",reason=\"only_upstream\""] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
    let status = Command::new(&*BATON).args(["status", &front.server.base]).output().unwrap();
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("UPSTREAM") && status.contains("their/model:7b"), "{status}");
    assert_eq!(front.get("/health").await["status"], "ok");
    let lost = ReloadableServer::start(&upstream("gone", "openai", "http://127.0.0.1:9", ""));
    eventually_async("an upstream that does not answer", async || lost.get("/health").await["status"] == "unavailable")
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_dead_upstream_among_others_takes_nothing_out_of_service() {
    let well = Mock::start(|_, _| says("well")).await;
    let config = upstream("well", "openai", &well.url, "")
        + &upstream("gone", "openai", "http://127.0.0.1:9", "models = { n = \"theirs\" }");
    let front = ReloadableServer::start(&config);
    let health = async || reqwest::get(format!("{}/health", front.server.base)).await.unwrap();
    eventually_async("a warning", async || health().await.text().await.unwrap().contains("cannot be answered")).await;
    assert_eq!(health().await.status(), 200);
    assert_eq!(front.chat(json!({})).await.content(), "well");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_file_changes_upstreams_and_drops_no_stream() {
    let slow =
        Mock::start(|_, _| vec![head(), text("begun "), Step::Wait(Duration::from_secs(2)), text("ended"), done()])
            .await;
    let other = Mock::start(|_, _| says("other")).await;
    let log = tempfile::NamedTempFile::new().unwrap();
    let front = ReloadableServer::logging_to(log.reopen().unwrap(), &upstream("slow", "openai", &slow.url, ""), &[]);
    let change = async {
        eventually_async("a running stream", async || slow.n_asked() == 1).await;
        std::fs::write(&front.config, upstream("other", "openai", &other.url, "")).unwrap();
        front.server.signal(Signal::HUP);
        eventually_async("the other upstream", async || {
            front.get("/baton/state").await["upstreams"][0]["name"] == "other"
        })
        .await;
        assert_eq!(front.chat(json!({})).await.content(), "other");
        // A file with a mistake changes nothing.
        std::fs::write(&front.config, upstream("bad name", "opanai", &other.url, "")).unwrap();
        front.server.signal(Signal::HUP);
        let logged = || std::fs::read_to_string(log.path()).unwrap();
        eventually_async("the refusal", async || logged().contains("stays as it was")).await;
        assert_eq!(front.chat(json!({})).await.content(), "other");
    };
    let (answer, ()) = tokio::join!(front.chat(json!({ "stream": true })), change);
    assert!(answer.text.contains("ended") && answer.text.contains("[DONE]"), "{answer:?}");
}
