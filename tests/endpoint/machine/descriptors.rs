//! No more files can be opened.

use std::net::TcpStream;
use std::time::Duration;

use harness::{BatonServer, eventually_async};
use rustix::process::{Resource, Signal, kill_process};

use super::{SIM, limit, pid, status};

/// The connections that nobody uses.
const N_IDLE: usize = 60;

/// How often an endpoint may have tried in vain to accept a connection: it pauses after each time.
const MOST_TRIES: usize = 1_000;

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_without_descriptors_answers_its_connections_and_accepts_others_later() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let server = BatonServer::logging_to(log.reopen().unwrap(), &SIM);
    let n_logged = |words: &str| {
        let logged = std::fs::read_to_string(log.path()).unwrap();
        logged.lines().filter(|line| line.contains(words)).count()
    };
    let n_failed = || n_logged("accepting a connection failed");
    // This client's connection is open.
    let client = reqwest::Client::builder().pool_max_idle_per_host(1).build().unwrap();
    assert_eq!(status(&client, &server, "sim").await, 200);

    let engine = server.engine();
    let n_open = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count() as u64;
    limit(pid(&server), Resource::Nofile, n_open + 8);
    let address = server.base.trim_start_matches("http://");
    let idle: Vec<_> = (0..N_IDLE).map(|_| TcpStream::connect(address).unwrap()).collect();
    eventually_async("a connection that is not accepted", async || n_failed() > 0).await;
    for _ in 0..10 {
        // The client takes its connection back a moment after the reply. Without it, it would make another one.
        tokio::time::sleep(Duration::from_millis(50)).await;
        // A request may need a new connection to its engine, for which there is no descriptor.
        let status = status(&client, &server, "sim").await;
        let log = std::fs::read_to_string(log.path()).unwrap();
        assert!([200, 503].contains(&status), "who is connected is answered, not with {status}: {log}");
    }
    // A probe that misses its deadline gives up its connection, and the next one needs a descriptor.
    kill_process(engine, Signal::STOP).unwrap();
    let n_not_probed = || n_logged("the engine could not be probed");
    eventually_async("a probe without a descriptor", async || n_not_probed() > 0).await;
    kill_process(engine, Signal::CONT).unwrap();
    // More than would show that an engine is frozen, unless the next probe takes the descriptor that the missed one gave back.
    let is_served = async || status(&client, &server, "sim").await == 200;
    eventually_async("more such probes", async || n_not_probed() > 4 || is_served().await).await;
    // The engine is still there. If it ends now it cannot be replaced, which a client hears.
    assert_eq!(server.engine(), engine, "an engine that cannot be asked goes on");
    kill_process(engine, Signal::KILL).unwrap();
    let meanwhile = status(&client, &server, "sim").await;
    assert!([0, 200, 503].contains(&meanwhile), "{meanwhile}");
    let n_tries = n_failed();
    assert!(n_tries < MOST_TRIES, "{n_tries} tries");

    drop(idle);
    let stranger = || reqwest::Client::builder().timeout(Duration::from_secs(5)).build().unwrap();
    eventually_async("a new connection", async || {
        stranger().get(format!("{}/health", server.base)).send().await.is_ok_and(|reply| reply.status() == 200)
    })
    .await;
    eventually_async("another engine", async || status(&stranger(), &server, "sim").await == 200).await;
}
