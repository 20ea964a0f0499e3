//! A link that misbehaves on command: a TCP relay in front of a node.
//!
//! A fault lasts until the next `set` and touches every connection that carries bytes meanwhile.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// What a link does to bytes from its node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LinkFault {
    None,
    /// Limits each connection to this many bytes a second.
    Slow(f64),
    /// Breaks the connection hard: both ends get a reset.
    Reset,
    /// Closes the connection in an orderly way in the middle of a reply.
    Truncate,
    /// The same after so many bytes of a reply. Shorter ones stay as they are.
    CutAfter(usize),
    /// Flips one bit in each piece of a long reply. Short replies are JSON over plain HTTP, in which only TCP's checksum
    /// could detect it, so they stay as they are.
    Flip,
    /// Accepts requests and answers none of them. Replies that have begun go on.
    Silence,
    /// Sends nothing more, also in the middle of a reply.
    Hang,
}

/// Bytes of a reply that [`LinkFault::Flip`] leaves alone. A frame of KV is longer.
const SHORT_REPLY: usize = 8 << 10;

/// A running relay. Dropping it closes its connections.
pub struct FaultyRelay {
    /// `http://127.0.0.1:PORT`
    pub url: String,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    target: Mutex<SocketAddr>,
    fault: Mutex<LinkFault>,
    n_touched: AtomicU64,
    n_long_pieces: AtomicU64,
    n_bytes: AtomicU64,
}

impl FaultyRelay {
    /// A link to a node at `url`.
    pub async fn start(url: &str) -> FaultyRelay {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let own = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Shared {
            target: Mutex::new(address_of(url)),
            fault: Mutex::new(LinkFault::None),
            n_touched: AtomicU64::new(0),
            n_long_pieces: AtomicU64::new(0),
            n_bytes: AtomicU64::new(0),
        });
        let task = tokio::spawn(accept(listener, Arc::clone(&shared)));
        FaultyRelay { url: own, shared, task }
    }

    /// Points the link at another node.
    pub fn lead_to(&self, url: &str) {
        *self.shared.target.lock().unwrap() = address_of(url);
    }

    /// Sets the fault from now on.
    pub fn set(&self, fault: LinkFault) {
        *self.shared.fault.lock().unwrap() = fault;
    }

    /// Returns true once a reply as long as a frame of KV has begun to pass.
    pub fn has_carried_kv(&self) -> bool {
        self.shared.n_long_pieces.load(Ordering::Relaxed) > 0
    }

    /// The bytes that have come from the node.
    pub fn n_bytes(&self) -> u64 {
        self.shared.n_bytes.load(Ordering::Relaxed)
    }

    /// The number of pieces that a fault has touched.
    pub fn n_touched(&self) -> u64 {
        self.shared.n_touched.load(Ordering::Relaxed)
    }
}

impl Drop for FaultyRelay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn address_of(url: &str) -> SocketAddr {
    url.trim_start_matches("http://").parse().unwrap()
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let (client, _) = listener.accept().await.unwrap();
        while connections.try_join_next().is_some() {}
        connections.spawn(connect(client, Arc::clone(&shared)));
    }
}

/// Carries one connection, until either end closes it or a fault does.
async fn connect(client: TcpStream, shared: Arc<Shared>) -> std::io::Result<()> {
    let target = *shared.target.lock().unwrap();
    let node = TcpStream::connect(target).await?;
    client.set_nodelay(true)?;
    node.set_nodelay(true)?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_node, mut to_node) = node.into_split();
    let n_replied = AtomicU64::new(0);
    let requests = async {
        let mut piece = vec![0; 16 << 10];
        loop {
            let n = from_client.read(&mut piece).await?;
            if n == 0 {
                return std::io::Result::Ok(());
            }
            n_replied.store(0, Ordering::Relaxed);
            to_node.write_all(&piece[..n]).await?;
        }
    };
    let replies = async {
        let mut piece = vec![0; 16 << 10];
        loop {
            let n = from_node.read(&mut piece).await?;
            if n == 0 {
                return std::io::Result::Ok(());
            }
            shared.n_bytes.fetch_add(n as u64, Ordering::Relaxed);
            let before = n_replied.fetch_add(n as u64, Ordering::Relaxed) as usize;
            shared.n_long_pieces.fetch_add(u64::from(before > SHORT_REPLY), Ordering::Relaxed);
            let fault = *shared.fault.lock().unwrap();
            let touches = match fault {
                LinkFault::None => false,
                LinkFault::Flip => before > SHORT_REPLY,
                LinkFault::CutAfter(most) => before + n > most,
                LinkFault::Silence => before == 0,
                LinkFault::Slow(_) | LinkFault::Reset | LinkFault::Truncate | LinkFault::Hang => true,
            };
            shared.n_touched.fetch_add(u64::from(touches), Ordering::Relaxed);
            match fault {
                LinkFault::None => {}
                LinkFault::Slow(rate) => tokio::time::sleep(Duration::from_secs_f64(n as f64 / rate)).await,
                LinkFault::Reset => {
                    to_client.as_ref().set_zero_linger()?;
                    from_node.as_ref().set_zero_linger()?;
                    return Ok(());
                }
                LinkFault::Truncate => {
                    to_client.write_all(&piece[..n / 2]).await?;
                    return to_client.shutdown().await;
                }
                LinkFault::CutAfter(most) if touches => {
                    to_client.write_all(&piece[..most.saturating_sub(before)]).await?;
                    return to_client.shutdown().await;
                }
                LinkFault::Flip if touches => piece[n / 2] ^= 1 << (n % 8),
                // Until the client leaves.
                LinkFault::Silence if touches => std::future::pending().await,
                LinkFault::Hang => std::future::pending().await,
                LinkFault::Flip | LinkFault::Silence | LinkFault::CutAfter(_) => {}
            }
            to_client.write_all(&piece[..n]).await?;
        }
    };
    tokio::select! {
        ended = requests => ended,
        ended = replies => ended,
    }
}
