//! How fast the way from another node is: a few megabytes that do not compress, timed.

use std::time::{Duration, Instant};

use baton_schemas::handoff::LinkMeasurement;
use baton_schemas::node::BASE_PATH;
use futures::StreamExt;
use reqwest::Client;

/// Round trips of which the shortest counts: the others met something else on the way.
const N_ROUND_TRIPS: usize = 3;

/// First amount. A slow link is not kept busy for long.
const FIRST_BYTES: u64 = 1 << 20;

/// Largest amount a node sends.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// A measurement that took less is repeated with more bytes: it timed the start and not the rate.
const LONG_ENOUGH: Duration = Duration::from_millis(20);

/// For one request.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Measures the way from the node at `url`.
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

/// Bytes that came after the first piece, and how long they took.
async fn fetch(client: &Client, url: &str, key: &str, n_bytes: u64) -> reqwest::Result<(u64, Duration)> {
    let call = client.get(format!("{url}{BASE_PATH}/noise?bytes={n_bytes}")).bearer_auth(key).timeout(TIMEOUT);
    let mut pieces = call.send().await?.error_for_status()?.bytes_stream();
    let (mut began, mut received) = (None, 0);
    while let Some(piece) = pieces.next().await {
        let n = piece?.len() as u64;
        match began {
            None => began = Some(Instant::now()),
            Some(_) => received += n,
        }
    }
    Ok((received, began.map_or(Duration::ZERO, |began| began.elapsed())))
}
