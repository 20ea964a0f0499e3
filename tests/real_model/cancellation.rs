//! A client that leaves frees its slot: 400 cancellations at random points.

use std::ffi::OsString;
use std::process::Stdio;
use std::time::{Duration, Instant};

use baton_link::Engine;
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_schemas::SequenceRequest;
use baton_schemas::generate::Sampling;
use baton_schemas::node::{KEY_VARIABLE, TokenizeRequest};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use harness::{BATON, eventually_async, long_prompt, model};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

const N_CANCELLED: usize = 400;
const AT_ONCE: usize = 8;

/// A node with the real model, its client, and the folder of its socket.
async fn node() -> (Child, RemoteEngine, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("node.sock");
    let mut listen = OsString::from("unix:");
    listen.push(&socket);
    let mut node = Command::new(&*BATON)
        .args(["node", "--child", "--threads", "1", "--model"])
        .arg(model())
        .arg("--listen")
        .arg(listen)
        .env(KEY_VARIABLE, "the tests' cluster key")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut ready = String::new();
    BufReader::new(node.stdout.take().unwrap()).read_line(&mut ready).await.unwrap();
    assert!(ready.contains("ready"), "{ready}");
    (node, RemoteEngine::new(&NodeAddress::Unix(socket), "the tests' cluster key").unwrap(), folder)
}

/// A small random generator, so that each run is the same.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

fn open_files(node: &Child) -> Option<usize> {
    Some(std::fs::read_dir(format!("/proc/{}/fd", node.id()?)).ok()?.count())
}

#[tokio::test]
async fn random_cancellations_leak_no_slot() {
    let (node, engine, _folder) = node().await;
    let tokens = async |text: String| {
        engine
            .tokenize(&TokenizeRequest {
                text: text.into(),
                add_special: false,
                parse_special: false,
                key: Default::default(),
            })
            .await
            .unwrap()
    };
    let mut prompts = Vec::new();
    for (i, n_words) in [3, 20, 60, 400].into_iter().enumerate() {
        prompts.push(tokens(long_prompt(&i.to_string(), n_words)).await);
    }
    let files_before = open_files(&node);

    let mut seed = 42;
    let mut running = FuturesUnordered::new();
    let mut n_begun = 0;
    let mut reached = [0; 3];
    while n_begun < N_CANCELLED || !running.is_empty() {
        while running.len() < AT_ONCE && n_begun < N_CANCELLED {
            n_begun += 1;
            let mut prompt = prompts[random(&mut seed) as usize % prompts.len()].clone();
            // Half of the prompts have a random first token, so their prefill is not cached.
            if n_begun % 2 == 0 {
                prompt[0] = (random(&mut seed) % 40_000) as u32;
            }
            let request = SequenceRequest {
                prompt,
                sampling: Sampling { seed: n_begun as u64, ..Sampling::default() },
                ignore_eos: true,
                ..SequenceRequest::default()
            };
            // Most clients leave after a random time. One in eight leaves when its prefill has begun or after a few
            // tokens, so every stage occurs however busy the machine is.
            let (after_ms, after_deltas) = match random(&mut seed) % 16 {
                0 => (None, 1),
                1 => (None, 2 + random(&mut seed) % 6),
                _ => (Some(random(&mut seed) % [30, 300][random(&mut seed) as usize % 2]), u64::MAX),
            };
            let engine = &engine;
            running.push(async move {
                let mut n_deltas = 0;
                let read = async {
                    let mut deltas = engine.generate(request).await.unwrap();
                    while n_deltas < after_deltas {
                        deltas.next().await.expect("an endless reply continues").unwrap();
                        n_deltas += 1;
                    }
                };
                let leave = async {
                    match after_ms {
                        Some(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = read => {}
                    () = leave => {}
                }
                n_deltas
            });
        }
        if let Some(n_deltas) = running.next().await {
            reached[n_deltas.min(2) as usize] += 1;
        }
    }
    drop(running);
    let [queued, prefilling, decoding] = reached;
    println!("cancelled: {queued} before a slot, {prefilling} in prefill, {decoding} while decoding");
    assert!(queued > 0 && prefilling > 0 && decoding > 0, "every stage must occur: {reached:?}");

    let began = Instant::now();
    eventually_async("all slots to be free", || async {
        let load = engine.load().await.unwrap();
        (load.active_slots, load.queued) == (0, 0)
    })
    .await;
    println!("all slots were free {:?} after the last cancellation", began.elapsed());
    // Connections close a moment after their streams.
    eventually_async("all connections to be closed", || async {
        open_files(&node).zip(files_before).is_none_or(|(now, before)| now <= before + 2)
    })
    .await;
    // The engine still works.
    let request =
        SequenceRequest { prompt: prompts[0].clone(), max_tokens: Some(4), ignore_eos: true, ..Default::default() };
    assert_eq!(engine.generate(request).await.unwrap().count().await, 6, "started, four tokens, finished");
}
