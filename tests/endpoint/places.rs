//! Places belong to targets: what is full, slow or hung keeps nobody from another target, and priorities hold wherever a
//! request waits.

use std::sync::atomic::Ordering;
use std::time::Duration;

use harness::mock::{Mock, Step, head, says, text};
use harness::{BatonServer, eventually_async, free_address, upstream};
use reqwest::RequestBuilder;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::admission::{begun, n_waiting, with_keys};

/// Ends a test whose requests hang.
const GUARD: Duration = Duration::from_secs(60);

/// An idle model of the endpoint's own, loaded on demand.
const IDLE: &str = "[[models]]\nname = \"idle\"\nsource = \"sim\"\n[models.engine]\nengine = \"sim\"\n";

/// A streamed chat with this model.
fn ask(server: &BatonServer, key: &str, model: &str, n_tokens: u32) -> RequestBuilder {
    let mut body = json!({
        "model": model, "stream": true, "max_tokens": n_tokens,
        "messages": [{ "role": "user", "content": "hi" }],
    });
    // An upstream refuses this field.
    if ["sim", "idle"].contains(&model) {
        body["ignore_eos"] = json!(true);
    }
    reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).bearer_auth(key).json(&body)
}

/// A chat that ends the test if it gets no reply.
async fn replied(request: RequestBuilder) -> String {
    let reply = async { request.send().await.unwrap().text().await.unwrap() };
    let text = timeout(GUARD, reply).await.expect("a reply");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    text
}

async fn state(server: &BatonServer, key: &str) -> Value {
    let url = format!("{}/baton/state", server.base);
    reqwest::Client::new().get(url).bearer_auth(key).send().await.unwrap().json().await.unwrap()
}

/// Sends so many requests that stay for the whole test.
fn crowd(n: usize, request: impl Fn() -> RequestBuilder) -> JoinSet<()> {
    (0..n)
        .map(|_| {
            let request = request();
            async move { drop(request.send().await.unwrap().text().await) }
        })
        .collect()
}

/// The state's `running` and `waiting`, as the header shows them.
async fn counts(server: &BatonServer, key: &str) -> (Value, Value) {
    let state = state(server, key).await;
    (state["requests"]["running"].clone(), state["requests"]["waiting"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_fills_a_slow_model_keeps_no_other_from_an_idle_one() {
    let (server, [greedy, modest], _file) = with_keys(IDLE, ["operator = true", ""]);
    let mut crowd = crowd(30, || ask(&server, &greedy, "sim", 2_000));
    eventually_async("four to run and 26 to wait", async || counts(&server, &greedy).await == (json!(4), json!(26)))
        .await;
    for key in [&modest, &greedy] {
        replied(ask(&server, key, "idle", 4)).await;
    }
    assert!(crowd.try_join_next().is_none(), "none of the thirty has ended");
    assert_eq!(n_waiting(&server, &greedy).await, 26);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_four_targets_and_one_hung_the_others_serve_as_alone() {
    let hung = Mock::start(|_, _| vec![Step::Hang]).await;
    let well = Mock::start(|_, _| says("well")).await;
    let file = format!(
        "{IDLE}{}{}",
        upstream("hung", "openai", &hung.url, "models = { hung = \"x\" }"),
        upstream("well", "openai", &well.url, "models = { well = \"x\" }")
    );
    let (server, [key], _file) = with_keys(&file, ["operator = true"]);
    let mut stuck = crowd(40, || ask(&server, &key, "hung", 4));
    eventually_async("eight to run and 32 to wait", async || counts(&server, &key).await == (json!(8), json!(32)))
        .await;
    // As many at once as each of the others has places, and more.
    let mut others = JoinSet::new();
    for model in ["sim", "idle", "well"] {
        for _ in 0..10 {
            others.spawn(replied(ask(&server, &key, model, 4)));
        }
    }
    assert_eq!(others.join_all().await.len(), 30);
    assert!(stuck.try_join_next().is_none());
    // The header counts what the card counts.
    let state = state(&server, &key).await;
    let card = &state["upstreams"][0];
    assert_eq!((&card["running"], &card["waiting"]), (&json!(8), &json!(32)), "{card}");
    assert_eq!((hung.n_asked(), &state["requests"]["waiting"]), (8, &json!(32)));
    drop(stuck);
    eventually_async("nothing to be left", async || counts(&server, &key).await == (json!(0), json!(0))).await;
}

/// Sends 24 requests of the first key, then one of the second, while another request runs; each when the one before it
/// waits. Returns the order in which their replies come: `true` is the second key's.
async fn in_a_row(
    server: &BatonServer,
    [low, high]: [&String; 2],
    request: impl Fn(&str) -> RequestBuilder,
) -> UnboundedReceiver<bool> {
    let (tell, order) = unbounded_channel();
    let n_before = n_waiting(server, low).await;
    for i in 0..25 {
        let is_high = i == 24;
        let request = request(if is_high { high } else { low });
        let tell = tell.clone();
        tokio::spawn(async move {
            replied(request).await;
            let _ = tell.send(is_high);
        });
        eventually_async("it waits", || async { n_waiting(server, low).await == n_before + i + 1 }).await;
    }
    order
}

#[tokio::test(flavor = "multi_thread")]
async fn after_24_requests_of_priority_1_one_of_priority_9_is_next() {
    // An upstream that cannot be reached, and a model that is not loaded, add no places.
    let closed = upstream("closed", "openai", &format!("http://{}", free_address()), "");
    for more in [String::new(), format!("{IDLE}{closed}")] {
        let (server, [low, high], _file) =
            with_keys(&more, ["priority = 1\noperator = true", "priority = 9\noperator = true"]);
        if !more.is_empty() {
            eventually_async("the upstream to be found down", async || {
                state(&server, &low).await["upstreams"][0]["life"] == "down"
            })
            .await;
        }
        let limit = &state(&server, &low).await["requests"]["limit"];
        assert_eq!(limit, &json!(4), "one for each slot of the one engine");
        let mut running = Vec::new();
        for _ in 0..4 {
            running.push(Box::pin(begun(ask(&server, &low, "sim", 2_000)).await));
        }
        let mut order = in_a_row(&server, [&low, &high], |key| ask(&server, key, "sim", 1)).await;
        // One place is free.
        running.pop();
        assert_eq!([order.recv().await, order.recv().await], [Some(true), Some(false)], "{more}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn priorities_hold_where_requests_wait_for_an_upstream() {
    let mock = Mock::start(|n, _| if n == 0 { vec![head(), text("begun"), Step::Hang] } else { says("well") }).await;
    let file = upstream("one", "openai", &mock.url, "max_concurrent = 1");
    let (server, [low, high], _file) = with_keys(&file, ["priority = 1\noperator = true", "priority = 9"]);
    let running = begun(ask(&server, &low, "m", 4)).await;
    // What a key's requests ask for shows whose they are.
    let n_tokens = |key: &str| if key == high { 9 } else { 1 };
    let mut order = in_a_row(&server, [&low, &high], |key| ask(&server, key, "m", n_tokens(key))).await;
    assert_eq!(mock.n_asked(), 1);
    drop(running);
    for _ in 0..25 {
        order.recv().await.unwrap();
    }
    let asked: Vec<_> = (1..26).map(|i| mock.asked(i).body["max_tokens"].clone()).collect();
    assert_eq!(asked, [vec![json!(9)], vec![json!(1); 24]].concat());
    // One, and the first until the mock notices that its client has gone.
    assert!(mock.log.most_running.load(Ordering::SeqCst) <= 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_leaves_a_failed_upstream_waits_for_the_next_one_without_a_place() {
    // The first upstream refuses all but its first request, and the second one is full.
    let refuses = Mock::start(|n, _| match n {
        0 => says("well"),
        _ => vec![],
    })
    .await;
    let full = Mock::start(|_, _| vec![head(), text("begun"), Step::Hang]).await;
    let file = upstream("refuses", "openai", &refuses.url, "max_concurrent = 1\nmodels = { m = \"x\", own = \"x\" }")
        + &upstream("full", "openai", &full.url, "max_concurrent = 1\nmodels = { m = \"x\", other = \"x\" }");
    let (server, [key], _file) = with_keys(&file, ["operator = true"]);
    replied(ask(&server, &key, "own", 4)).await;
    let running = begun(ask(&server, &key, "other", 4)).await;
    let mut moved = crowd(1, || ask(&server, &key, "m", 4));
    eventually_async("it to fail at the first and to wait for the second", async || {
        let state = state(&server, &key).await;
        let [first, second] = [&state["upstreams"][0], &state["upstreams"][1]];
        refuses.n_asked() == 2 && first["running"] == 0 && second["waiting"] == 1 && state["requests"]["waiting"] == 1
    })
    .await;
    assert!(moved.try_join_next().is_none());
    drop(running);
    eventually_async("the second to be asked", async || full.n_asked() == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_use_the_free_places_of_an_upstream_while_one_is_taken() {
    let mock = Mock::start(|n, _| if n == 0 { vec![head(), text("begun"), Step::Hang] } else { says("well") }).await;
    let file = upstream("one", "openai", &mock.url, "max_concurrent = 4");
    let (server, [key, other], _file) = with_keys(&file, ["operator = true", ""]);
    let running = begun(ask(&server, &key, "m", 4)).await;
    let url = format!("{}/v1/chat/completions", server.base);
    let body = json!({ "model": "m", "n": 4, "stream": true, "messages": [{ "role": "user", "content": "hi" }] });
    let four = || replied(reqwest::Client::new().post(&url).bearer_auth(&key).json(&body));
    // Neither the four choices nor the request beside them wait for the place that stays taken.
    let (many, one) = tokio::join!(four(), replied(ask(&server, &other, "m", 4)));
    assert_eq!((many.matches("well").count(), one.matches("well").count()), (4, 1), "{many}");
    assert_eq!(mock.n_asked(), 6);
    assert!(mock.log.most_running.load(Ordering::SeqCst) <= 4);
    drop(running);
}
