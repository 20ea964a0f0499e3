//! Measures the link from another node by timing some megabytes of incompressible data.

use std::time::{Duration, Instant};

use baton_schemas::handoff::LinkMeasurement;
use baton_schemas::node::BASE_PATH;
use futures::StreamExt;
use reqwest::Client;

/// Round trips that are timed. The shortest counts: the others were delayed by other traffic.
const N_ROUND_TRIPS: usize = 3;

/// Bytes of the first transfer: few, so that a slow link is not kept busy.
const FIRST_BYTES: u64 = 1 << 20;

/// The most bytes that a node sends.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// A shorter transfer is repeated with more bytes, because it measures the start and not the rate.
const LONG_ENOUGH: Duration = Duration::from_millis(20);

/// The deadline of one request.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Measures the link from the node at `url`.
pub(super) async fn measure(client: &Client, url: &str, key: &str) -> reqwest::Result<LinkMeasurement> {
    let mut rtt = Duration::MAX;
    for _ in 0..N_ROUND_TRIPS {
        let began = Instant::now();
        fetch(client, url, key, 1).await?;
        rtt = rtt.min(began.elapsed());
    }
    let mut n_bytes = FIRST_BYTES;
    let (received, took) = loop {
        let (received, took) = fetch(client, url, key, n_bytes).await?;
        if took >= LONG_ENOUGH || n_bytes >= MAX_BYTES {
            break (received, took);
        }
        n_bytes = (n_bytes * 8).min(MAX_BYTES);
    };
    Ok(LinkMeasurement { rtt_ms: rtt.as_secs_f64() * 1e3, n_bytes: received, seconds: took.as_secs_f64() })
}

/// Requests `n_bytes`. Returns how many came after the first piece, and how long they took.
async fn fetch(client: &Client, url: &str, key: &str, n_bytes: u64) -> reqwest::Result<(u64, Duration)> {
    let call = client.get(format!("{url}{BASE_PATH}/noise?bytes={n_bytes}")).bearer_auth(key).timeout(TIMEOUT);
    let mut pieces = call.send().await?.error_for_status()?.bytes_stream();
    let mut began = None;
    let mut received = 0;
    while let Some(piece) = pieces.next().await {
        let n = piece?.len() as u64;
        match began {
            None => began = Some(Instant::now()),
            Some(_) => received += n,
        }
    }
    Ok((received, began.map_or(Duration::ZERO, |began| began.elapsed())))
}
