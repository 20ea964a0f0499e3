//! Model files on several machines: listed, copied over a bad network, deleted; and who may do that.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use harness::relay::{FaultyRelay, LinkFault};
use harness::{BATON, BatonNode, BatonServer, CLUSTER_KEY, NewKey, TempConfigFile, eventually, eventually_async, hub};
use serde_json::{Value, json};
use tempfile::TempDir;

const MIB: usize = 1 << 20;

/// A machine's node with the simulated engine, and its models folder.
struct Machine {
    node: BatonNode,
    folder: TempDir,
}

impl Machine {
    fn start(files: &[(&str, usize)]) -> Machine {
        Machine::with_key(CLUSTER_KEY, files)
    }

    fn with_key(key: &str, files: &[(&str, usize)]) -> Machine {
        Machine::with(key, &[], files)
    }

    fn with(key: &str, args: &[&str], files: &[(&str, usize)]) -> Machine {
        let folder = folder(files);
        let variables = [("BATON_CACHE", folder.path().to_str().unwrap()), ("BATON_CLUSTER_KEY", key)];
        let args = [&["--engine", "sim"], args].concat();
        Machine { node: BatonNode::with_variables(&args, &variables), folder }
    }

    fn file(&self, path: &str) -> PathBuf {
        self.folder.path().join("hub").join(path)
    }
}

/// A models folder with files of a hub, of these sizes.
fn folder(files: &[(&str, usize)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (path, n_bytes) in files {
        let path = folder.path().join("hub").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, noise(*n_bytes)).unwrap();
    }
    folder
}

/// Bytes that differ everywhere.
fn noise(n_bytes: usize) -> Vec<u8> {
    (0..n_bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// An endpoint in front of nodes, with a models folder of its own.
fn endpoint(nodes: &[&str], more: &[&str], folder: &Path) -> BatonServer {
    let nodes: Vec<&str> = nodes.iter().flat_map(|url| ["--decode", url]).collect();
    let variables = [("BATON_CACHE", folder.to_str().unwrap())];
    BatonServer::started(
        std::process::Stdio::inherit(),
        &[&nodes[..], &["--no-calibration"], more].concat(),
        &variables,
    )
}

fn baton(server: &BatonServer, args: &[&str]) -> Output {
    let address = server.base.trim_start_matches("http://");
    Command::new(&*BATON).arg("models").args(args).arg(address).env_remove("BATON_API_KEY").output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

async fn order(server: &BatonServer, order: Value) -> (u16, Value) {
    server.post("/baton/models", &order).await
}

/// What a machine says of itself.
async fn folder_of(server: &BatonServer, machine: &str) -> Value {
    let models = server.get("/baton/models").await;
    let machines = models["machines"].as_array().unwrap();
    let found = machines.iter().find(|report| report["machine"] == machine);
    found.unwrap_or_else(|| panic!("{models}"))["folder"].clone()
}

async fn transfer_to(server: &BatonServer, machine: &str) -> Value {
    folder_of(server, machine).await["transfer"].clone()
}

/// Waits for the end of the transfer to a machine, and returns its state and problem.
async fn ended(server: &BatonServer, machine: &str) -> (String, String) {
    eventually_async("the end of a transfer", async || {
        let state = transfer_to(server, machine).await["state"].clone();
        state != "preparing" && state != "receiving"
    })
    .await;
    let transfer = transfer_to(server, machine).await;
    let text = |key: &str| transfer[key].as_str().unwrap_or_default().to_owned();
    (text("state"), text("problem"))
}

fn names(folder: &Value) -> Vec<&str> {
    folder["models"].as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap()).collect()
}

const SPLIT: &str = "me/big:q/m-Q8_0-00001-of-00002.gguf";
const SPLIT_FILES: [(&str, usize); 3] = [
    ("me/big/q/m-Q8_0-00001-of-00002.gguf", MIB),
    ("me/big/q/m-Q8_0-00002-of-00002.gguf", MIB / 2),
    ("me/big/mmproj.gguf", 1_000),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_split_model_is_listed_copied_to_another_machine_and_deleted_as_one_thing() {
    let (spark, mac) = (Machine::start(&SPLIT_FILES), Machine::start(&[]));
    let own = folder(&[("me/st/config.json", 10), ("me/st/model.safetensors", 100)]);
    let server = endpoint(&[&spark.node.url, &mac.node.url], &["--allow-model-management"], own.path());

    let listed = text(&baton(&server, &[]));
    assert!(listed.contains("local: 1 model") && listed.contains("decode-1: 1 model"), "{listed}");
    assert!(listed.contains(SPLIT) && listed.contains("Q8_0") && listed.contains("decode-2: 0 models"), "{listed}");
    let of_spark = folder_of(&server, "decode-1").await;
    assert_eq!(of_spark["models"][0]["n_bytes"], 3 * MIB / 2 + 1_000);

    for (to, folder) in [("decode-2", mac.folder.path()), ("local", own.path())] {
        let copied = baton(&server, &["copy", SPLIT, "--from", "decode-1", "--to", to]);
        assert!(copied.status.success() && text(&copied).contains(&format!("is on {to}")), "{}", text(&copied));
        for (path, n_bytes) in SPLIT_FILES {
            assert!(fs::read(folder.join("hub").join(path)).unwrap() == noise(n_bytes), "{path} differs on {to}");
        }
        let transfer = transfer_to(&server, to).await;
        assert_eq!(transfer["done_bytes"], 3 * MIB / 2 + 1_000, "{transfer}");
    }
    let both = folder_of(&server, "local").await;
    assert_eq!(names(&both), [SPLIT, "me/st"]);
    let sums = |folder: &Value| {
        let model = folder["models"].as_array().unwrap().iter().find(|model| model["name"] == SPLIT).unwrap();
        model["files"].as_array().unwrap().iter().map(|file| file["sha256"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(
        sums(&both),
        sums(&folder_of(&server, "decode-1").await),
        "the sender keeps the checksums it has computed"
    );

    let again = order(&server, json!({ "action": "copy", "model": SPLIT, "from": "decode-1", "to": "decode-2" })).await;
    assert_eq!(again.0, 200, "{again:?}");
    assert_eq!(ended(&server, "decode-2").await.0, "done", "what is there stays");

    let deleted = baton(&server, &["delete", SPLIT, "--on", "decode-2"]);
    assert!(deleted.status.success(), "{}", text(&deleted));
    assert!(names(&folder_of(&server, "decode-2").await).is_empty() && !mac.file("me/big/mmproj.gguf").exists());
    assert!(spark.file("me/big/mmproj.gguf").is_file());
    let gone = baton(&server, &["delete", SPLIT, "--on", "decode-2"]);
    assert!(!gone.status.success() && text(&gone).contains("not among the models"), "{}", text(&gone));
}

const FILE: &str = "me/one/a-Q4_0.gguf";
const MODEL: &str = "me/one:a-Q4_0.gguf";

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_is_cut_at_several_points_goes_on_and_no_byte_comes_twice() {
    const SIZE: usize = 12 * MIB;
    /// Bytes that a cut may lose: those in the buffers between the two machines.
    const LOST_AT_A_CUT: usize = MIB;
    let (spark, mac) = (Machine::start(&[(FILE, SIZE)]), Machine::start(&[]));
    let link = FaultyRelay::start(&spark.node.url).await;
    let own = folder(&[]);
    let server = endpoint(&[&link.url, &mac.node.url], &["--allow-model-management"], own.path());
    let copy = json!({ "action": "copy", "model": MODEL, "from": "decode-1", "to": "decode-2" });
    link.set(LinkFault::Slow(8e6));
    let before = link.n_bytes();
    let n_cuts = 5;
    let arrived = async || transfer_to(&server, "decode-2").await["done_bytes"].as_u64().unwrap_or(0) as usize;
    for cut in 1..=n_cuts {
        let (status, taken) = order(&server, copy.clone()).await;
        assert_eq!((status, taken["transfer"].as_u64()), (200, Some(cut as u64)), "{taken}");
        let (busy, refused) = order(&server, copy.clone()).await;
        assert!(busy == 503 && refused.to_string().contains("one at a time"), "{refused}");
        eventually_async("more bytes", async || arrived().await >= cut * SIZE / 8).await;
        if cut % 2 == 0 {
            // The connection breaks, too.
            let touched = link.n_touched();
            link.set(LinkFault::Reset);
            eventually_async("the break", async || link.n_touched() > touched).await;
            link.set(LinkFault::Slow(8e6));
        }
        assert_eq!(order(&server, json!({ "action": "cancel", "on": "decode-2" })).await.0, 200);
        assert_eq!(ended(&server, "decode-2").await.0, "cancelled");
        assert!(!mac.file(FILE).exists(), "no incomplete file has the model's name");
    }
    link.set(LinkFault::None);
    order(&server, copy).await;
    assert_eq!(ended(&server, "decode-2").await.0, "done");
    assert!(fs::read(mac.file(FILE)).unwrap() == noise(SIZE));
    let carried = (link.n_bytes() - before) as usize;
    assert!(carried >= SIZE && carried < SIZE + n_cuts * LOST_AT_A_CUT, "{carried} bytes for {SIZE}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_is_cut_at_a_hundred_points_ends_right_and_no_byte_comes_twice() {
    const SIZE: usize = 8 * MIB;
    const CUT: usize = 64 << 10;
    const N_CUTS: usize = 100;
    let (spark, mac) = (Machine::start(&[(FILE, SIZE)]), Machine::start(&[]));
    let link = FaultyRelay::start(&spark.node.url).await;
    let own = folder(&[]);
    let server = endpoint(&[&link.url, &mac.node.url], &["--allow-model-management"], own.path());
    let copy = json!({ "action": "copy", "model": MODEL, "from": "decode-1", "to": "decode-2" });
    let part = mac.file(&format!("{FILE}.part"));
    let before = link.n_bytes();
    let mut kept = 0;
    for cut in 1..=N_CUTS {
        // Each cut falls on another part of a piece.
        link.set(LinkFault::CutAfter(CUT - 97 * cut));
        let n_touched = link.n_touched();
        assert_eq!(order(&server, copy.clone()).await.0, 200);
        eventually_async("the cut", async || link.n_touched() > n_touched).await;
        // It would go on by itself after a pause.
        assert_eq!(order(&server, json!({ "action": "cancel", "on": "decode-2" })).await.0, 200);
        assert_eq!(ended(&server, "decode-2").await.0, "cancelled", "after {cut} cuts");
        let now = fs::metadata(&part).unwrap().len();
        assert!(now > kept, "cut {cut}: {now} bytes after {kept}");
        assert!(!mac.file(FILE).exists(), "no incomplete file has the model's name");
        kept = now;
    }
    assert!(kept > SIZE as u64 / 2, "{kept} bytes came between the cuts");
    link.set(LinkFault::None);
    order(&server, copy).await;
    assert_eq!(ended(&server, "decode-2").await.0, "done");
    assert!(fs::read(mac.file(FILE)).unwrap() == noise(SIZE) && !part.exists());
    let carried = (link.n_bytes() - before) as usize;
    assert!((SIZE..SIZE + N_CUTS * CUT).contains(&carried), "{carried} bytes for {SIZE}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_byte_is_refused_and_a_later_copy_is_whole() {
    let (spark, mac) = (Machine::start(&[(FILE, MIB)]), Machine::start(&[]));
    let link = FaultyRelay::start(&spark.node.url).await;
    let own = folder(&[]);
    let server = endpoint(&[&link.url, &mac.node.url], &["--allow-model-management"], own.path());
    let copy = json!({ "action": "copy", "model": MODEL, "from": "decode-1", "to": "decode-2" });
    link.set(LinkFault::Flip);
    order(&server, copy.clone()).await;
    let (state, problem) = ended(&server, "decode-2").await;
    assert!(state == "failed" && problem.contains("is corrupt"), "{state}: {problem}");
    assert!(link.n_touched() > 0 && !mac.file(FILE).exists());
    link.set(LinkFault::None);
    order(&server, copy).await;
    assert_eq!(ended(&server, "decode-2").await.0, "done");
    assert!(fs::read(mac.file(FILE)).unwrap() == noise(MIB));
}

/// A call to a node about its models.
async fn call(node: &BatonNode, key: &str, path: &str, body: Option<Value>) -> (u16, String) {
    let url = format!("{}/node/v1/{path}", node.url);
    let client = reqwest::Client::new();
    let call = body.map_or_else(|| client.get(&url), |body| client.post(&url).json(&body));
    let reply = call.bearer_auth(key).send().await.unwrap();
    (reply.status().as_u16(), reply.text().await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_key_a_machine_neither_tells_nor_gives_nor_gets_anything() {
    let spark = Machine::with_key("another cluster key", &[(FILE, MIB)]);
    let mac = Machine::start(&[]);
    for (path, body) in [
        ("models", None),
        ("models/offer?model=me/one:a-Q4_0.gguf", None),
        ("models/file?model=me/one:a-Q4_0.gguf&file=a-Q4_0.gguf", None),
        ("models", Some(json!({ "order": "delete", "model": MODEL }))),
    ] {
        let (status, text) = call(&spark.node, CLUSTER_KEY, path, body).await;
        assert!(status == 401 && !text.contains("gguf"), "{path}: {status} {text}");
    }
    let copy = json!({ "order": "copy", "model": MODEL, "from": { "url": spark.node.url } });
    assert_eq!(call(&mac.node, CLUSTER_KEY, "models", Some(copy)).await.0, 200);
    let ended = async || {
        let report: Value = serde_json::from_str(&call(&mac.node, CLUSTER_KEY, "models", None).await.1).unwrap();
        report["transfer"].clone()
    };
    eventually_async("the refusal", async || ended().await["state"] == "failed").await;
    assert!(ended().await["problem"].as_str().unwrap().contains("key"), "{}", ended().await);
    assert!(spark.file(FILE).is_file() && !mac.file(FILE).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_between_which_a_model_moves_do_not_fall_asleep() {
    // A machine that falls asleep stops like such a node, as far as others can tell.
    let sleepy = ["--sleep-after", "10s", "--sleep-command", "kill -KILL $PPID"];
    let mut spark = Machine::with(CLUSTER_KEY, &sleepy, &[(FILE, 12 * MIB)]);
    let link = FaultyRelay::start(&spark.node.url).await;
    let mut mac = Machine::with(CLUSTER_KEY, &sleepy, &[]);
    // It takes about fifteen seconds.
    link.set(LinkFault::Slow(0.85e6));
    let began = Instant::now();
    let copy = json!({ "order": "copy", "model": MODEL, "from": { "url": link.url } });
    assert_eq!(call(&mac.node, CLUSTER_KEY, "models", Some(copy)).await.0, 200);
    let arrived = async || mac.file(FILE).is_file();
    eventually_async("the model", arrived).await;
    assert!(began.elapsed() > Duration::from_secs(10), "longer than machines stay awake without work");
    assert!(fs::read(mac.file(FILE)).unwrap() == noise(12 * MIB));
    for node in [&mut spark.node, &mut mac.node] {
        eventually("sleep", || (!node.is_running()).then_some(()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_that_climbs_out_of_the_folder_is_no_name() {
    let spark = Machine::start(&[(FILE, 100)]);
    let secret = spark.folder.path().join("secret.gguf");
    fs::write(&secret, "secret").unwrap();
    let outside = secret.to_str().unwrap();
    for model in ["../secret.gguf", "me/one:../../../secret.gguf", outside, "me/..:secret.gguf", "./secret.gguf"] {
        let (status, text) = call(&spark.node, CLUSTER_KEY, &format!("models/offer?model={model}"), None).await;
        assert!(status == 400 && text.contains("names no model"), "{model}: {text}");
        let delete = json!({ "order": "delete", "model": model });
        assert_eq!(call(&spark.node, CLUSTER_KEY, "models", Some(delete)).await.0, 400, "{model}");
        let pull = json!({ "order": "pull", "model": model });
        assert_eq!(call(&spark.node, CLUSTER_KEY, "models", Some(pull)).await.0, 400, "{model}");
    }
    for file in ["../../../secret.gguf", outside, "a-Q4_0.gguf/../../../../secret.gguf", ".lock", ""] {
        let (status, text) =
            call(&spark.node, CLUSTER_KEY, &format!("models/file?model={MODEL}&file={file}"), None).await;
        assert!(status == 400 && !text.contains("secret"), "{file}: {status} {text}");
    }
    assert!(secret.is_file());
}

#[tokio::test(flavor = "multi_thread")]
async fn models_change_only_where_the_operator_allows_it_and_only_with_an_operators_key() {
    let own = folder(&[(FILE, 100)]);
    let delete = json!({ "action": "delete", "model": MODEL, "on": "local" });
    let closed = BatonServer::started(
        std::process::Stdio::inherit(),
        &["--engine", "sim"],
        &[("BATON_CACHE", own.path().to_str().unwrap())],
    );
    let (status, refused) = order(&closed, delete.clone()).await;
    assert!(status == 403 && refused.to_string().contains("allow_model_management"), "{refused}");
    assert_eq!(names(&folder_of(&closed, "local").await), [MODEL], "it can be listed");

    let (guest, owner) = (NewKey::of("guest", ""), NewKey::of("owner", "operator = true"));
    let config = TempConfigFile::new(&format!(
        "allow_model_management = true\n{}{}[model.engine]\nengine = \"sim\"\n",
        guest.lines, owner.lines
    ));
    let open = BatonServer::started(
        std::process::Stdio::inherit(),
        &["--config", config.path().to_str().unwrap()],
        &[("BATON_CACHE", own.path().to_str().unwrap())],
    );
    let ordered = async |key: &str| {
        let call = reqwest::Client::new().post(format!("{}/baton/models", open.base)).bearer_auth(key).json(&delete);
        call.send().await.unwrap().status().as_u16()
    };
    assert_eq!((ordered("").await, ordered(&guest.secret).await), (401, 403));
    assert!(own.path().join("hub").join(FILE).is_file());
    assert_eq!(ordered(&owner.secret).await, 200);
    assert!(!own.path().join("hub").join(FILE).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ollamas_clients_pull_and_no_engine_can_run_is_told_and_can_be_deleted() {
    let own = folder(&[]);
    let hub = hub(vec![("tiny-Q4_0.gguf".to_owned(), noise(MIB))]);
    let server = BatonServer::started(
        std::process::Stdio::inherit(),
        &["--engine", "sim", "--allow-model-management"],
        &[("BATON_CACHE", own.path().to_str().unwrap()), ("HF_ENDPOINT", &hub)],
    );
    let client = reqwest::Client::new();
    let ask = async |method: reqwest::Method, path: &str, body: Value| {
        let reply = client.request(method, format!("{}{path}", server.base)).json(&body).send().await.unwrap();
        (reply.status().as_u16(), reply.text().await.unwrap())
    };
    let (status, text) = ask(reqwest::Method::POST, "/api/pull", json!({ "model": "hf.co/nobody/tiny" })).await;
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(status, 200);
    assert_eq!(lines[0], json!({ "status": "pulling manifest" }));
    let error = lines.last().unwrap()["error"].as_str().unwrap();
    assert!(error.contains("cannot be served") && error.contains("not a GGUF file"), "{text}");
    assert!(!error.contains(own.path().to_str().unwrap()), "no path of this machine: {error}");
    let known = lines.iter().filter(|line| line["total"].is_u64());
    let is_digest = |digest: &str| digest.strip_prefix("sha256:").is_some_and(|digits| digits.len() == 64);
    assert!(known.clone().all(|line| line["total"] == MIB && line["digest"].as_str().is_some_and(is_digest)), "{text}");
    let file = own.path().join("hub/nobody/tiny/tiny-Q4_0.gguf");
    assert!(fs::read(&file).unwrap() == noise(MIB));
    assert!(!server.get_text("/api/tags").await.contains("tiny"));

    let (status, text) = ask(reqwest::Method::POST, "/api/pull", json!({ "model": "qwen3:8b", "stream": false })).await;
    assert!(status == 400 && text.contains("names no model"), "{status} {text}");
    let copy = |source: &str| json!({ "source": source, "destination": "x" });
    let (status, text) = ask(reqwest::Method::POST, "/api/copy", copy("sim")).await;
    assert!(status == 400 && text.contains("aliases"), "{status} {text}");
    assert_eq!(ask(reqwest::Method::POST, "/api/copy", copy("nobody/tiny")).await.0, 404);
    let (status, text) = ask(reqwest::Method::DELETE, "/api/delete", json!({ "model": "sim" })).await;
    assert!(status == 400 && text.contains("the configuration"), "{status} {text}");

    let delete = json!({ "model": "hf.co/nobody/tiny:tiny-Q4_0.gguf" });
    let held = fs::File::open(&file).unwrap();
    held.lock_shared().unwrap();
    let (status, text) = ask(reqwest::Method::DELETE, "/api/delete", delete.clone()).await;
    assert!(status == 400 && text.contains("in use") && file.is_file(), "{status} {text}");
    drop(held);
    assert_eq!(ask(reqwest::Method::DELETE, "/api/delete", delete).await, (200, String::new()));
    assert!(!file.exists());
    let (status, text) = ask(reqwest::Method::DELETE, "/api/delete", json!({ "model": "nobody/gone:Q4_0" })).await;
    assert!(status == 404 && text.contains("model 'nobody/gone:Q4_0' not found"), "{status} {text}");
    assert_eq!(ask(reqwest::Method::DELETE, "/api/delete", json!({ "model": "gone:8b" })).await.0, 404);
}
