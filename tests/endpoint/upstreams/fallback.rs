//! An upstream as the last resort of a model that is served here.

use harness::mock::{Mock, says};
use harness::{BatonNode, ReloadableServer, SseReply, said, upstream};
use rustix::process::Signal;
use serde_json::json;

/// An endpoint with one node that calls its model `m`, and an upstream that has it too.
fn endpoint(node: &BatonNode, mock: &Mock) -> ReloadableServer {
    let config = format!("[model]\nname = \"m\"\ndecode = [\"{}\"]\n", node.url);
    ReloadableServer::start(&(config + &upstream("deputy", "openai", &mock.url, "")))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_answers_when_the_last_engine_is_gone() {
    let node = BatonNode::with(&["--engine", "sim"]);
    let mock = Mock::start(|_, _| says("from afar")).await;
    let front = endpoint(&node, &mock);
    let answer = front.chat(json!({ "max_tokens": 4 })).await;
    assert!(answer.route.starts_with("direct; decode=decode-1"), "the model's own engine comes first: {answer:?}");
    node.signal(Signal::KILL);
    for _ in 0..3 {
        let answer = front.chat(json!({ "max_tokens": 4 })).await;
        assert_eq!((answer.status, answer.content().as_str()), (200, "from afar"), "{answer:?}");
        assert!(answer.route.starts_with("upstream; upstream=deputy; reason=no_engine"), "{answer:?}");
    }
    let state = front.get("/baton/state").await;
    assert_eq!(state["models"][0]["fallbacks"]["upstream"]["count"], 3, "{state}");
    assert_eq!(front.get("/health").await["status"], "ok", "requests are answered");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_lost_in_the_middle_of_a_reply_is_not_replaced_by_an_upstream() {
    let node = BatonNode::with(&["--engine", "sim", "--sim-decode-tps", "20"]);
    let mock = Mock::start(|_, _| says("from afar")).await;
    let front = endpoint(&node, &mock);
    let body = said("hi", json!({ "max_tokens": 200, "ignore_eos": true }));
    let mut reply = SseReply::open(&front.server, &body).await;
    reply.read_pieces(10).await;
    node.signal(Signal::KILL);
    let text = reply.rest().await;
    assert!(text.contains("\"error\"") && !text.contains("from afar"), "{text}");
    assert_eq!(mock.n_asked(), 0);
}
