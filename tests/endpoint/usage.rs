//! The endpoint keeps the usage that clients were told, through kills and restarts. Budgets and keys.

use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use harness::mock::{Mock, Step, head, whole};
use harness::{BATON, BatonServer, NewKey, ReloadableServer, TempConfigFile, eventually_async, free_address, upstream};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::RwLock;

/// The clients.
const CLIENTS: [&str; 4] = ["anna", "ben", "carla", "dev"];

/// Requests of all clients together. `make usage-long` has 10,000.
const REQUESTS: u64 = 300;

/// Requests between two ends of the endpoint.
const REQUESTS_A_LIFE: u64 = 50;

/// Prints as `baton` does, with this key.
fn baton(args: &[&str], key: &str) -> Output {
    Command::new(&*BATON).args(args).env("BATON_API_KEY", key).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The tokens of one key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sums {
    requests: u64,
    prompt: u64,
    cached: u64,
    generated: u64,
}

impl Sums {
    fn of_reply(usage: &Value) -> Sums {
        let n = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{usage}"));
        Sums {
            requests: 1,
            prompt: n(&usage["prompt_tokens"]),
            cached: n(&usage["prompt_tokens_details"]["cached_tokens"]),
            generated: n(&usage["completion_tokens"]),
        }
    }

    fn plus(self, more: Sums) -> Sums {
        Sums {
            requests: self.requests + more.requests,
            prompt: self.prompt + more.prompt,
            cached: self.cached + more.cached,
            generated: self.generated + more.generated,
        }
    }

    /// The sums of the rows that the endpoint reports for a key.
    async fn reported(base: &str, name: &str, owner: &str) -> Option<Sums> {
        let url = format!("{base}/baton/usage?key={name}&days=2");
        let reply = reqwest::Client::new().get(url).bearer_auth(owner).send().await.ok()?;
        if reply.status() != 200 {
            return None;
        }
        let report: Value = reply.json().await.ok()?;
        assert_eq!(report["is_kept"], true, "{report}");
        let rows = report["rows"].as_array().unwrap();
        Some(rows.iter().fold(Sums::default(), |sums, row| {
            let n = |field: &str| row[field].as_u64().unwrap();
            sums.plus(Sums {
                requests: n("requests"),
                prompt: n("prompt_tokens"),
                cached: n("cached_tokens"),
                generated: n("generated_tokens"),
            })
        }))
    }
}

/// The usage in a whole reply, or in a stream that came to its end. `None`: the client was not told how it ended.
fn told(text: &str, is_stream: bool) -> Option<Sums> {
    if !is_stream {
        let reply: Value = serde_json::from_str(text).ok()?;
        return reply["usage"].is_object().then(|| Sums::of_reply(&reply["usage"]));
    }
    let chunks = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let chunks = chunks.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    chunks.filter(|chunk| chunk["usage"].is_object()).last().map(|chunk| Sums::of_reply(&chunk["usage"]))
}

/// A client that counts what it is told, until all clients together have sent enough.
struct CountingClient {
    name: &'static str,
    secret: String,
    owner: String,
    base: String,
    n_sent: Arc<AtomicU64>,
    n_requests: u64,
    /// Held while the endpoint is replaced.
    lives: Arc<RwLock<()>>,
    counted: Sums,
    /// Replies that broke off. Each of them may be in the usage or not, but not in part.
    n_unknown: u64,
    n_of_unknown_kept: u64,
}

impl CountingClient {
    async fn run(mut self) -> CountingClient {
        let client = reqwest::Client::new();
        loop {
            let i = self.n_sent.fetch_add(1, Ordering::Relaxed);
            if i >= self.n_requests {
                return self;
            }
            let (max_tokens, is_stream) = (1 + i % 7, i.is_multiple_of(2));
            let mut body = json!({
                "model": "sim", "max_tokens": max_tokens, "ignore_eos": true, "stream": is_stream,
                "messages": [{ "role": "user", "content": format!("{} {}", self.name, "word ".repeat(i as usize % 5)) }],
            });
            if is_stream {
                body["stream_options"] = json!({ "include_usage": true });
            }
            let call = client.post(format!("{}/v1/chat/completions", self.base)).bearer_auth(&self.secret).json(&body);
            let reply = match call.send().await {
                Ok(reply) if reply.status() != 200 => {
                    // It starts or stops: nothing was used.
                    assert_eq!(reply.status(), 503, "{:?}", reply.text().await);
                    continue;
                }
                Ok(reply) => reply.text().await.ok(),
                Err(_) => None,
            };
            match reply.and_then(|text| told(&text, is_stream)) {
                Some(sums) => self.counted = self.counted.plus(sums),
                None => self.settle(max_tokens).await,
            }
        }
    }

    /// A reply broke off because the endpoint was killed. The usage says if it counts.
    async fn settle(&mut self, max_tokens: u64) {
        drop(self.lives.read().await);
        let mut reported = None;
        for _ in 0..3_000 {
            reported = Sums::reported(&self.base, self.name, &self.owner).await;
            if reported.is_some() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let reported = reported.expect("the usage after a restart");
        self.n_unknown += 1;
        if reported == self.counted {
            return;
        }
        self.n_of_unknown_kept += 1;
        let more = Sums {
            requests: reported.requests - self.counted.requests,
            prompt: reported.prompt - self.counted.prompt,
            cached: reported.cached - self.counted.cached,
            generated: reported.generated - self.counted.generated,
        };
        // As a whole, with all its tokens; a client that has gone away leaves a reply of which some were generated.
        assert!(more.requests == 1 && more.prompt > 0 && more.cached <= more.prompt, "{more:?}");
        assert!(more.generated <= max_tokens, "{more:?} of {max_tokens}");
        self.counted = reported;
    }
}

/// The endpoint of the clients, from its own configuration.
fn start(config: &TempConfigFile, address: &str) -> BatonServer {
    let path = config.path();
    let args = ["--config", path.to_str().unwrap(), "--listen", address];
    BatonServer::started(Stdio::inherit(), &args, &[])
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kept_usage_is_what_clients_counted_through_kills_and_restarts() {
    let n_requests = std::env::var("BATON_TEST_USAGE_REQUESTS").map_or(REQUESTS, |n| n.parse().unwrap());
    let owner = NewKey::of("owner", "operator = true");
    let keys = CLIENTS.map(|name| NewKey::of(name, ""));
    let lines: String = keys.iter().chain([&owner]).map(|key| key.lines.as_str()).collect();
    let engine = "[model.engine]\nengine = \"sim\"\nsim_decode_tps = 1000.0\nsim_prefill_tps = 100000.0\nslots = 8\n";
    let config = TempConfigFile::new(&format!("state_folder = \"state\"\n{lines}[model]\ncalibrate = false\n{engine}"));
    let address = free_address();
    let base = format!("http://{address}");
    let mut server = start(&config, &address);
    let (n_sent, lives) = (Arc::<AtomicU64>::default(), Arc::new(RwLock::new(())));
    let clients = CLIENTS.iter().zip(&keys).map(|(&name, key)| {
        let client = CountingClient {
            name,
            secret: key.secret.clone(),
            owner: owner.secret.clone(),
            base: base.clone(),
            n_sent: Arc::clone(&n_sent),
            n_requests,
            lives: Arc::clone(&lives),
            counted: Sums::default(),
            n_unknown: 0,
            n_of_unknown_kept: 0,
        };
        tokio::spawn(client.run())
    });
    let clients: Vec<_> = clients.collect();
    for life in 1.. {
        let until = life * REQUESTS_A_LIFE;
        if until >= n_requests {
            break;
        }
        eventually_async("requests", || async { n_sent.load(Ordering::Relaxed) >= until }).await;
        let replaced = lives.write().await;
        // Most lives end without notice.
        server.signal(if life % 4 == 0 { Signal::TERM } else { Signal::KILL });
        server = tokio::task::block_in_place(|| {
            server.wait();
            start(&config, &address)
        });
        drop(replaced);
    }
    let (mut n_unknown, mut n_kept) = (0, 0);
    for client in clients {
        let client = client.await.unwrap();
        assert_eq!(Sums::reported(&base, client.name, &owner.secret).await.unwrap(), client.counted, "{}", client.name);
        assert!(client.counted.requests > n_requests / 20, "{} was hardly served: {:?}", client.name, client.counted);
        n_unknown += client.n_unknown;
        n_kept += client.n_of_unknown_kept;
    }
    eprintln!("{n_unknown} replies broke off, of which {n_kept} are in the usage");
    // Each of them as clients were told: also as a command shows it.
    let table = stdout(&baton(&["usage", &address], &owner.secret));
    assert!(CLIENTS.iter().all(|name| table.contains(&format!("  {name} "))) && table.contains("  all "), "{table}");
    let json: Value =
        serde_json::from_str(&stdout(&baton(&["usage", &address, "--json", "--key", "anna"], &owner.secret))).unwrap();
    assert!(json["rows"].as_array().unwrap().iter().all(|row| row["key"] == "anna" && row["model"] == "sim"), "{json}");
}

/// A chat with the simulator, of exactly so many new tokens. Returns the status, the headers and the body.
async fn chat(server: &BatonServer, secret: &str, more: Value) -> (u16, reqwest::header::HeaderMap, Value) {
    let mut body = json!({ "model": "sim", "ignore_eos": true, "messages": [{ "role": "user", "content": "hello" }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).bearer_auth(secret);
    let reply = call.json(&body).send().await.unwrap();
    (reply.status().as_u16(), reply.headers().clone(), reply.json().await.unwrap())
}

const SIM: &str = "[model]\ncalibrate = false\n[model.engine]\nengine = \"sim\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_spent_budget_refuses_requests_until_its_day_ends_also_after_a_kill() {
    let (owner, anna) = (NewKey::of("owner", "operator = true"), NewKey::of("anna", "tokens_per_day = 400"));
    let (owner_lines, anna_lines) = (&owner.lines, &anna.lines);
    let config = TempConfigFile::new(&format!("state_folder = \"state\"\n{owner_lines}{anna_lines}{SIM}"));
    let mut server = config.serve();
    let (status, _, reply) = chat(&server, &anna.secret, json!({ "max_tokens": 100 })).await;
    assert_eq!((status, &reply["usage"]["completion_tokens"]), (200, &json!(100)), "{reply}");
    let used = reply["usage"]["total_tokens"].as_u64().unwrap();
    // The request may need more than is left: no engine begins it, and nothing of it is charged.
    let spent = async |server: &BatonServer| {
        let (status, headers, error) = chat(server, &anna.secret, json!({ "max_tokens": 380 })).await;
        assert_eq!((status, error["error"]["code"].as_str()), (429, Some("insufficient_quota")), "{error}");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(&format!("{} of its 400 tokens a day left", 400 - used)), "{message}");
        assert!(message.contains("00:00 UTC"), "{message}");
        let seconds: u64 = headers["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=86_400).contains(&seconds), "{seconds}");
        assert_eq!(headers["x-should-retry"], "false");
        let anthropic =
            json!({ "model": "sim", "max_tokens": 380, "messages": [{ "role": "user", "content": "hello" }] });
        let call = reqwest::Client::new().post(format!("{}/v1/messages", server.base)).json(&anthropic);
        let reply = call.header("x-api-key", &anna.secret).send().await.unwrap();
        assert_eq!(reply.status(), 429);
        assert_eq!(reply.json::<Value>().await.unwrap()["error"]["type"], "rate_limit_error");
    };
    spent(&server).await;
    server.signal(Signal::KILL);
    server.wait();
    server = config.serve();
    spent(&server).await;
    // A smaller request fits, and two that fit alone do not fit together.
    let half = json!({ "max_tokens": 160 });
    let (first, second) = tokio::join!(chat(&server, &anna.secret, half.clone()), chat(&server, &anna.secret, half));
    let mut statuses = [first.0, second.0];
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 429]);
    assert_eq!(chat(&server, &owner.secret, json!({ "max_tokens": 380 })).await.0, 200, "only this key has a budget");
    let listed: Value =
        serde_json::from_str(&stdout(&baton(&["key", "list", &server.base, "--json"], &owner.secret))).unwrap();
    let key = &listed["keys"][1];
    assert_eq!((&key["name"], &key["tokens_per_day"]), (&json!("anna"), &json!(400)), "{listed}");
    assert!(
        key["tokens_today"].as_u64().unwrap() >= used && key["tokens_this_month"] == key["tokens_today"],
        "{listed}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_replaced_with_an_overlap_expires_and_is_listed_without_its_secret() {
    let owner = NewKey::of("owner", "operator = true");
    let (anna, late) = (NewKey::of("anna", ""), NewKey::of("late", "expires = 2020-02-29"));
    let text = |anna: &str| format!("{}{anna}{}{SIM}", owner.lines, late.lines);
    let config = TempConfigFile::new(&text(&anna.lines));
    let log = tempfile::NamedTempFile::new().unwrap();
    let server = config.serve_logging_to(log.reopen().unwrap(), &[]);
    let ask = async |secret: &str| chat(&server, secret, json!({ "max_tokens": 1 })).await;
    assert_eq!(ask(&anna.secret).await.0, 200);
    let (status, _, error) = ask(&late.secret).await;
    assert_eq!((status, &error["error"]["code"]), (401, &json!("invalid_api_key")), "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains("2020-02-29 was its last day"), "{error}");

    let path = config.path();
    let printed = stdout(&baton(&["key", "rotate", "anna", "--config", path.to_str().unwrap(), "--days", "3"], ""));
    let (new, lines) = printed.split_once("\n\n").unwrap();
    let named = "[[keys]]\nname = \"anna\"\n";
    config.reload(&server, &text(&format!("{named}{lines}")));
    eventually_async("the new secret", || async { ask(new).await.0 == 200 }).await;
    assert_eq!(ask(&anna.secret).await.0, 200, "the old one is accepted beside it");
    let table = stdout(&baton(&["key", "list", &server.base], &owner.secret));
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    let last_use_of = |row: &[&str]| row.contains(&"ago");
    assert_eq!((rows.len(), rows[2][0], rows[4][0]), (5, "anna", "late"), "{table}");
    assert!(last_use_of(&rows[2]) && last_use_of(&rows[3]) && !last_use_of(&rows[4]), "{table}");
    for key in [&owner, &anna, &late] {
        assert!(!table.contains(&key.secret) && !table.contains(&key.secret["baton-".len()..][..16]), "{table}");
    }

    let expired = lines.lines().map(|line| match line.starts_with("previous_expires") {
        true => "previous_expires = 2020-01-01".to_owned(),
        false => line.to_owned(),
    });
    let expired: Vec<String> = expired.collect();
    config.reload(&server, &text(&format!("{named}{}\n", expired.join("\n"))));
    eventually_async("the end of the old secret", || async { ask(&anna.secret).await.0 == 401 }).await;
    assert_eq!(ask(new).await.0, 200);
    let logged = std::fs::read_to_string(log.path()).unwrap();
    assert!(
        logged.contains("reloaded") && !logged.contains("anna"),
        "the default log does not say who called: {logged}"
    );
    let refused = baton(&["key", "list", &server.base], new);
    assert!(!refused.status.success(), "only operators see keys");
    assert_eq!(
        reqwest::Client::new()
            .get(format!("{}/baton/usage", server.base))
            .bearer_auth(new)
            .send()
            .await
            .unwrap()
            .status(),
        403
    );
    for (query, expected) in [("days=0", 400), ("days=401", 400), ("days=x", 400), ("dayz=3", 400), ("days=400", 200)] {
        let url = format!("{}/baton/usage?{query}", server.base);
        let reply = reqwest::Client::new().get(url).bearer_auth(&owner.secret).send().await.unwrap();
        assert_eq!(reply.status(), expected, "{query}");
    }
}

/// Requests that the metrics count for callers without a key, and the tokens of their prompts.
async fn counted(server: &BatonServer, model: &str) -> (u64, u64) {
    let metrics = server.get_text("/metrics").await;
    let value = |series: String| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(&series));
        line.map_or(0, |n| n.trim().parse().unwrap())
    };
    let labels = format!("key=\"anyone\",model=\"{model}\"");
    let requests = value(format!("baton_key_requests_total{{{labels}}}"));
    (requests, value(format!("baton_key_tokens_total{{{labels},kind=\"prompt\"}}")))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstreams_work_counts_also_for_a_client_that_leaves_before_the_first_token() {
    let silent = Mock::start(|_, _| vec![head(), Step::Hang]).await;
    let broken = Mock::start(|_, _| whole(500, "", &json!({}))).await;
    let config = upstream("silent", "openai", &silent.url, "models = { silent = \"m\" }\n")
        + &upstream("broken", "openai", &broken.url, "models = { broken = \"m\" }\n");
    let front = ReloadableServer::start(&config);
    let long = "word ".repeat(400);
    let n_prompt = 500;
    let chat = json!({ "model": "silent", "messages": [{ "role": "user", "content": long }] });
    let texts = json!({ "model": "silent", "input": long });
    for (i, (path, body)) in [("chat/completions", chat), ("embeddings", texts)].into_iter().enumerate() {
        let url = format!("{}/v1/{path}", front.server.base);
        let call = tokio::spawn(reqwest::Client::new().post(url).json(&body).send());
        eventually_async("the upstream's work", async || silent.n_asked() == i + 1).await;
        call.abort();
        let n = i as u64 + 1;
        eventually_async("its usage", async || {
            let (requests, prompt) = counted(&front.server, "silent").await;
            requests == n && (n * n_prompt..n * n_prompt + 20).contains(&prompt)
        })
        .await;
    }
    for (path, body) in [
        ("/v1/chat/completions", json!({ "model": "broken", "messages": [{ "role": "user", "content": long }] })),
        ("/v1/embeddings", json!({ "model": "broken", "input": long })),
    ] {
        let answer = front.post(path, &body).await;
        assert!(answer.status >= 500, "{answer:?}");
    }
    // What is written after these two requests.
    let last = json!({ "model": "silent", "input": "x" });
    let url = format!("{}/v1/embeddings", front.server.base);
    let call = tokio::spawn(reqwest::Client::new().post(url).json(&last).send());
    eventually_async("the last request", async || silent.n_asked() == 3).await;
    call.abort();
    eventually_async("its usage", async || counted(&front.server, "silent").await.0 == 3).await;
    assert_eq!(counted(&front.server, "broken").await, (0, 0), "a failure of the upstream costs its client nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spent_budget_loads_no_model() {
    let (owner, anna) = (NewKey::of("owner", "operator = true"), NewKey::of("anna", ""));
    let text = |budget: &str| {
        let model = "[[models]]\nname = \"sim\"\nsource = \"sim\"\n[models.engine]\nengine = \"sim\"\n";
        format!("{}{}{budget}{model}", owner.lines, anna.lines)
    };
    let config = TempConfigFile::new(&text(""));
    let server = config.serve();
    let (status, _, reply) = chat(&server, &anna.secret, json!({ "max_tokens": 1 })).await;
    assert_eq!(status, 200, "{reply}");
    let get = async |path: &str| {
        let call = reqwest::Client::new().get(format!("{}{path}", server.base)).bearer_auth(&owner.secret);
        call.send().await.unwrap().json::<Value>().await.unwrap()
    };
    let state = async || get("/v1/models").await["data"][0]["status"]["value"].clone();
    let unload = json!({ "model": "sim", "keep_alive": 0 });
    let call = reqwest::Client::new().post(format!("{}/api/generate", server.base)).bearer_auth(&owner.secret);
    assert_eq!(call.json(&unload).send().await.unwrap().status(), 200);
    eventually_async("the model's end", async || state().await == "unloaded").await;
    config.reload(&server, &text("tokens_per_day = 1\n"));
    eventually_async("a budget that is spent", async || get("/baton/keys").await["keys"][1]["tokens_per_day"] == 1)
        .await;
    let (status, _, error) = chat(&server, &anna.secret, json!({ "max_tokens": 1 })).await;
    assert_eq!((status, error["error"]["code"].as_str()), (429, Some("insufficient_quota")), "{error}");
    assert_eq!(state().await, "unloaded", "it loads no model in vain");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_endpoints_do_not_share_a_file_and_metrics_have_what_the_file_has() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let args = ["--engine", "sim", "--no-calibration", "--state-folder", folder];
    let server = BatonServer::with(&args);
    let (status, _, reply) = chat(&server, "none", json!({ "max_tokens": 5 })).await;
    assert_eq!(status, 200, "{reply}");
    let other = Command::new(&*BATON).args(["serve", "--listen", "127.0.0.1:0"]).args(args).output().unwrap();
    let refused = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(!other.status.success() && refused.contains("another Baton keeps its usage in"), "{refused}");
    let unkept = BatonServer::with(&["--engine", "sim", "--no-calibration", "--state-folder", ""]);
    assert_eq!(unkept.get("/baton/usage").await["is_kept"], false);
    let metrics = server.get_text("/metrics").await;
    for line in [
        "baton_key_requests_total{key=\"anyone\",model=\"sim\"} 1",
        "baton_key_tokens_total{key=\"anyone\",model=\"sim\",kind=\"generated\"} 5",
        "baton_usage_unsaved_requests 0",
        &format!("baton_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION")),
    ] {
        assert!(metrics.lines().any(|shown| shown == line), "{line} in\n{metrics}");
    }
    let began = metrics.lines().find_map(|line| line.strip_prefix("process_start_time_seconds ")).unwrap();
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((0.0..600.0).contains(&(since - began.parse::<f64>().unwrap())), "{began}");
}
