//! Streams go on when the worker's process ends or freezes. Linux shows which processes a test has started.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use baton_engines::mlx;
use baton_engines::registry::EngineOptions;
use baton_link::Engine;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{EngineError, SequenceRequest};
use futures::StreamExt;
use tiny_gguf::Architecture;
use tokio::sync::Mutex;

use super::{Model, STARTS, greedy, prompt};
use crate::peers;

/// A worker that is silent for so long is lost.
const MAX_SILENCE: Duration = Duration::from_secs(3);

/// Held while a test ends workers, so that others are started, or asks whether one has ended.
static LOSSES: Mutex<()> = Mutex::const_new(());

/// Starts an engine whose worker is lost after some seconds of silence. Returns its worker's process, too.
async fn start_watched(config: EngineOptions) -> (Arc<dyn Engine>, u32) {
    let _start = STARTS.lock().await;
    let before = workers();
    let open = move || mlx::open(&config, None, MAX_SILENCE).unwrap_or_else(|error| panic!("{error}"));
    let engine: Arc<dyn Engine> = Arc::new(tokio::task::spawn_blocking(open).await.unwrap());
    let new: Vec<u32> = workers().difference(&before).copied().collect();
    assert_eq!(new.len(), 1, "another process was started meanwhile");
    (engine, new[0])
}

/// The processes that this one has started and that run Python.
fn workers() -> BTreeSet<u32> {
    let mut all = BTreeSet::new();
    for thread in fs::read_dir("/proc/self/task").unwrap().flatten() {
        let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|id| id.parse::<u32>().ok());
        all.extend(children.filter(|id| {
            fs::read(format!("/proc/{id}/cmdline")).is_ok_and(|c| c.starts_with(b"/") && contains(&c, b"-I"))
        }));
    }
    all
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.split(|byte| *byte == 0).any(|argument| argument == part)
}

fn signal(name: &str, process: u32) {
    assert!(Command::new("kill").args([name, &process.to_string()]).status().unwrap().success());
}

/// A running stream, a waiting one and the cached conversations: all are there afterwards, with the tokens that would have
/// come.
async fn check_outlives(end_worker: impl Fn(u32)) {
    let Some(model) = Model::tiny(Architecture::Qwen3) else { return };
    let _losses = LOSSES.lock().await;
    let config = EngineOptions { n_slots: Some(2), ..model.config() };
    let (engine, worker) = start_watched(config).await;
    let prompts = ["Once upon a time", "The other one", "A third that waits"];
    let mut expected = Vec::new();
    for text in prompts {
        let request = greedy(&prompt(&*engine, text).await, 60);
        expected.push(peers::generate(&*engine, request).await.tokens);
    }
    let mut streams = Vec::new();
    for text in prompts {
        streams.push(engine.generate(greedy(&prompt(&*engine, text).await, 60)).await.unwrap());
    }
    let mut found = vec![Vec::new(); prompts.len()];
    let first = &mut streams[0];
    while found[0].len() < 5 {
        if let SequenceEvent::Token(token) = first.next().await.unwrap().unwrap() {
            found[0].push(token.id);
        }
    }
    end_worker(worker);
    for (stream, tokens) in streams.iter_mut().zip(&mut found) {
        while let Some(event) = stream.next().await {
            if let SequenceEvent::Token(token) = event.unwrap() {
                tokens.push(token.id);
            }
        }
    }
    assert_eq!(found, expected);
    assert!(!is_running(worker), "the lost worker was killed");
    let texts = baton_schemas::embed::EmbedSequences { inputs: vec![vec![1; 10]], ..Default::default() };
    assert!(engine.embed(texts).await.unwrap().next().await.unwrap().is_ok());
}

/// A process that has ended and was not waited for runs no more.
fn is_running(process: u32) -> bool {
    fs::read_to_string(format!("/proc/{process}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_killed_costs_a_pause_and_no_token() {
    check_outlives(|worker| signal("-KILL", worker)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_freezes_costs_a_pause_and_no_token() {
    check_outlives(|worker| signal("-STOP", worker)).await;
}

/// A Python that changes the worker's program before its last line, which begins the work.
fn changed_python(model: &Model, change: &str) -> PathBuf {
    let path = model.folder.with_file_name("changed-python");
    let script = format!(
        "#!{} -I\nimport sys\nprogram = sys.argv[-1].removesuffix('main()\\n') + {change:?} + '\\nmain()'\nexec(program)\n",
        model.python.display()
    );
    // Written by another process: a test that forks while this one has the file open for writing would inherit it, and the
    // system starts no program that anybody can write to.
    let write = r#"printf %s "$1" > "$0" && chmod 755 "$0""#;
    assert!(Command::new("sh").args(["-c", write]).arg(&path).arg(script).status().unwrap().success());
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_loses_every_worker_fails_and_the_next_one_is_answered() {
    let Some(model) = Model::tiny(Architecture::Llama) else { return };
    let _losses = LOSSES.lock().await;
    let dies = "
def compute(worker, head, payload):
    if any(part['from'] + part['n'] > 100 for part in head['parts']):
        os._exit(9)
    return Worker.compute(worker, head, payload)

OPERATIONS['compute'] = compute
";
    let python = changed_python(&model, dies);
    let (engine, _) = start_watched(EngineOptions { mlx_python: Some(python), ..model.config() }).await;
    let request = greedy(&prompt(&*engine, "Once upon a time").await, 1_000);
    let mut stream = engine.generate(request.clone()).await.unwrap();
    let mut n_tokens = 0;
    let failure = loop {
        match stream.next().await.expect("the stream was cut") {
            Ok(SequenceEvent::Token(_)) => n_tokens += 1,
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(failure, EngineError::Internal { .. }) && n_tokens > 50, "{failure} after {n_tokens} tokens");
    let request = SequenceRequest { max_tokens: Some(3), ..request };
    assert_eq!(peers::generate(&*engine, request).await.tokens.len(), 3);
}

/// The second of three processes dies while it loads the model.
#[tokio::test(flavor = "multi_thread")]
async fn a_load_that_fails_once_costs_a_pause_and_no_token() {
    let Some(model) = Model::tiny(Architecture::Llama) else { return };
    let _losses = LOSSES.lock().await;
    let counted = model.folder.with_file_name("loads");
    let dies = format!(
        "
n_loads = os.path.getsize({counted:?}) if os.path.exists({counted:?}) else 0
with open({counted:?}, 'a') as file:
    file.write('x')
if n_loads == 1:
    sys.exit('not this time')
"
    );
    let python = changed_python(&model, &dies);
    let (engine, worker) = start_watched(EngineOptions { mlx_python: Some(python), ..model.config() }).await;
    let request = greedy(&prompt(&*engine, "Once upon a time").await, 60);
    let expected = peers::generate(&*engine, request.clone()).await.tokens;
    let mut stream = engine.generate(request).await.unwrap();
    let mut found = Vec::new();
    while let Some(event) = stream.next().await {
        if let SequenceEvent::Token(token) = event.unwrap() {
            found.push(token.id);
            if found.len() == 20 {
                signal("-KILL", worker);
            }
        }
    }
    assert_eq!(found, expected);
    assert_eq!(fs::read(counted).unwrap().len(), 3);
}

/// The supervisor of such a process starts it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_cannot_be_loaded_again_ends_the_process() {
    let Some(model) = Model::tiny(Architecture::Llama) else { return };
    if std::env::var_os("BATON_TEST_ABORTS").is_none() {
        let test = "mlx::losses::a_model_that_cannot_be_loaded_again_ends_the_process";
        let mut own = Command::new(std::env::current_exe().unwrap());
        let status = own.args([test, "--exact"]).env("BATON_TEST_ABORTS", "1").stderr(Stdio::null()).status().unwrap();
        assert_eq!(status.signal(), Some(rustix::process::Signal::ABORT.as_raw()), "{status}");
        return;
    }
    let once = model.folder.with_file_name("loaded-once");
    let dies = format!(
        "
if os.path.exists({once:?}):
    sys.exit('not again')
open({once:?}, 'w').close()
"
    );
    let python = changed_python(&model, &dies);
    let (engine, worker) = start_watched(EngineOptions { mlx_python: Some(python), ..model.config() }).await;
    signal("-KILL", worker);
    let request = greedy(&prompt(&*engine, "Once upon a time").await, 3);
    let reply = peers::generate(&*engine, request).await;
    panic!("{} tokens without a worker", reply.tokens.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_worker_ends_with_its_engine() {
    let Some(model) = Model::tiny(Architecture::Llama) else { return };
    let _losses = LOSSES.lock().await;
    let (engine, worker) = start_watched(model.config()).await;
    assert!(is_running(worker));
    tokio::task::spawn_blocking(move || drop(engine)).await.unwrap();
    assert!(!is_running(worker));
}
