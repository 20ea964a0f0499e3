//! A TCP relay in front of a prefill node that forwards the node's bytes at a chosen rate.
//!
//! Its socket buffers are small, so that backpressure reaches the sender as on a real link. The other direction carries
//! requests of a few kilobytes and is not slowed, unless both carry much.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// Bytes of each of the relay's socket buffers; the kernel doubles this.
const SOCKET_BUFFER: u32 = 64 << 10;

/// Bytes forwarded at once.
const PIECE: usize = 32 << 10;

/// The time that an idle or late link may catch up. Sleeps are only accurate to a millisecond.
const BURST: Duration = Duration::from_millis(4);

/// A running relay. Dropping it closes its connections.
pub(super) struct Relay {
    /// `http://127.0.0.1:PORT`
    pub(super) url: String,
    task: JoinHandle<()>,
}

impl Relay {
    /// Starts a link to `target` that carries `rate` bytes per second over all its connections together.
    pub(super) async fn start(target: SocketAddr, rate: f64) -> std::io::Result<Relay> {
        let socket = TcpSocket::new_v4()?;
        socket.set_send_buffer_size(SOCKET_BUFFER)?;
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        let listener = socket.listen(16)?;
        let url = format!("http://{}", listener.local_addr()?);
        let link = LinkRates { to_reader: Bucket::new(rate), to_sender: None };
        Ok(Relay { url, task: tokio::spawn(accept(listener, target, Arc::new(link))) })
    }

    /// The same, whose other direction carries as many bytes per second.
    #[cfg(feature = "llama")]
    pub(super) async fn start_both_ways(target: SocketAddr, rate: f64) -> std::io::Result<Relay> {
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let url = format!("http://{}", listener.local_addr()?);
        let link = LinkRates { to_reader: Bucket::new(rate), to_sender: Some(Bucket::new(rate)) };
        Ok(Relay { url, task: tokio::spawn(accept(listener, target, Arc::new(link))) })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, target: SocketAddr, pace: Arc<LinkRates>) {
    let mut connections = JoinSet::new();
    while let Ok((reader, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        // The two nodes handle a broken connection.
        connections.spawn(connect(reader, target, Arc::clone(&pace)));
    }
}

async fn connect(reader: TcpStream, target: SocketAddr, pace: Arc<LinkRates>) -> std::io::Result<()> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    let sender = socket.connect(target).await?;
    reader.set_nodelay(true)?;
    sender.set_nodelay(true)?;
    let (from_reader, to_reader) = reader.into_split();
    let (from_sender, to_sender) = sender.into_split();
    // When either end closes, close both: the prefill node must notice a cancelled pull.
    tokio::select! {
        ended = forward(from_sender, to_reader, Some(&pace.to_reader)) => ended,
        ended = forward(from_reader, to_sender, pace.to_sender.as_ref()) => ended,
    }
}

/// Forwards bytes at the bucket's rate until they end.
async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, bucket: Option<&Bucket>) -> std::io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        let n_bytes = from.read(&mut piece).await?;
        if n_bytes == 0 {
            return to.shutdown().await;
        }
        if let Some(bucket) = bucket {
            bucket.pass(n_bytes).await;
        }
        to.write_all(&piece[..n_bytes]).await?;
    }
}

/// The rates of a link, for all of its connections together.
struct LinkRates {
    to_reader: Bucket,
    /// `None`: as fast as it goes.
    to_sender: Option<Bucket>,
}

/// A token bucket: each piece occupies the link for its length ÷ the rate.
struct Bucket {
    /// Bytes per second.
    rate: f64,
    /// When the link has sent everything forwarded so far.
    free_at: Mutex<Instant>,
}

impl Bucket {
    fn new(rate: f64) -> Bucket {
        Bucket { rate, free_at: Mutex::new(Instant::now()) }
    }

    /// Waits until `n_bytes` may pass.
    async fn pass(&self, n_bytes: usize) {
        let due = self.book(Instant::now(), n_bytes);
        if due > Instant::now() + BURST / 4 {
            tokio::time::sleep_until(due.into()).await;
        }
    }

    /// Reserves the link for `n_bytes`. Returns the time when they have passed.
    fn book(&self, now: Instant, n_bytes: usize) -> Instant {
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        *free_at = (*free_at).max(earliest) + Duration::from_secs_f64(n_bytes as f64 / self.rate);
        *free_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_link_passes_its_rate_and_an_idle_one_a_burst() {
        let start = Instant::now();
        let bucket = Bucket { rate: 1e6, free_at: Mutex::new(start) };
        let through: Vec<Duration> = (0..3).map(|_| bucket.book(start, 10_000) - start).collect();
        assert_eq!(through, [10, 20, 30].map(Duration::from_millis));
        // A second of silence is worth no more than the burst.
        let later = start + Duration::from_secs(1);
        assert_eq!(bucket.book(later, 10_000) - later, Duration::from_millis(10) - BURST);
    }

    #[tokio::test]
    async fn bytes_arrive_whole_and_no_faster_than_the_link() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = listener.local_addr().unwrap();
        let relay = Relay::start(target, 4e6).await.unwrap();
        let sent: Vec<u8> = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
        let expected = sent.clone();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(&sent).await.unwrap();
        });
        let began = Instant::now();
        let mut stream = TcpStream::connect(relay.url.trim_start_matches("http://")).await.unwrap();
        let mut received = Vec::new();
        stream.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, expected);
        let least = Duration::from_millis(250) - BURST;
        assert!(began.elapsed() >= least - Duration::from_millis(2), "{:?}", began.elapsed());
    }
}
