//! A draft node that misbehaves on command: a relay in front of a real one, which changes its candidates on their way.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use baton_schemas::draft::{DraftedTokens, MAX_AHEAD};
use baton_schemas::streams::{ClientFrame, FrameBuffer, FrameKind, MAX_CLIENT_PAYLOAD, MAX_NODE_PAYLOAD, NodeFrame};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// The fate of candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftFault {
    None,
    /// They come when the sequence has got so many tokens after them: a link that is too slow, whatever the machine's speed.
    Behind(u32),
    /// The first one is no token.
    OutOfRange,
    /// More follow than a draft node may be ahead.
    TooMany,
    /// Each further sequence gets the first candidates of the connection's first one.
    OfAnother,
    /// They are for a stream that was never started.
    OfUnknown,
}

/// A running relay. Dropping it closes its connections.
pub struct DraftRelay {
    /// `http://127.0.0.1:PORT`
    pub url: String,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    target: SocketAddr,
    fault: Mutex<DraftFault>,
    n_told: AtomicU64,
}

impl DraftRelay {
    /// A link to a draft node at `url`.
    pub async fn start(url: &str, fault: DraftFault) -> DraftRelay {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let own = format!("http://{}", listener.local_addr().unwrap());
        let target = url.trim_start_matches("http://").parse().unwrap();
        let shared = Arc::new(Shared { target, fault: Mutex::new(fault), n_told: AtomicU64::new(0) });
        let of_all = Arc::clone(&shared);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                while connections.try_join_next().is_some() {}
                connections.spawn(connect(client, Arc::clone(&of_all)));
            }
        });
        DraftRelay { url: own, shared, task }
    }

    /// Sets the fault from now on.
    pub fn set(&self, fault: DraftFault) {
        *self.shared.fault.lock().unwrap() = fault;
    }

    /// The tokens that the draft node was told, of all sequences.
    pub fn n_told(&self) -> u64 {
        self.shared.n_told.load(Ordering::Relaxed)
    }
}

impl Drop for DraftRelay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Carries one connection, until either end closes it.
async fn connect(mut client: TcpStream, shared: Arc<Shared>) -> std::io::Result<()> {
    let mut node = TcpStream::connect(shared.target).await?;
    client.set_nodelay(true)?;
    node.set_nodelay(true)?;
    let (mut from_client, mut to_client) = client.split();
    let (mut from_node, mut to_node) = node.split();
    let (mut asked, mut replied) = (vec![0; 16 << 10], vec![0; 16 << 10]);
    // Until the upgrade it is HTTP.
    let mut link: Option<StreamsLink> = None;
    loop {
        tokio::select! {
            n = from_client.read(&mut asked) => {
                let piece = &asked[..n?];
                if piece.is_empty() {
                    return Ok(());
                }
                to_node.write_all(piece).await?;
                if let Some(link) = &mut link {
                    to_client.write_all(&link.hear(piece, &shared)).await?;
                }
            }
            n = from_node.read(&mut replied) => {
                let piece = &replied[..n?];
                if piece.is_empty() {
                    return Ok(());
                }
                if link.is_none() && let Some(end) = upgraded(piece) {
                    to_client.write_all(&piece[..end]).await?;
                    let said = link.insert(StreamsLink::default()).say(&piece[end..], &shared);
                    to_client.write_all(&said).await?;
                } else if let Some(link) = &mut link {
                    to_client.write_all(&link.say(piece, &shared)).await?;
                } else {
                    to_client.write_all(piece).await?;
                }
            }
        }
    }
}

/// The end of the head, if it says that frames follow.
fn upgraded(piece: &[u8]) -> Option<usize> {
    let end = piece.windows(4).position(|bytes| bytes == b"\r\n\r\n")? + 4;
    piece.starts_with(b"HTTP/1.1 101").then_some(end)
}

/// A connection that carries streams.
struct StreamsLink {
    asked: FrameBuffer,
    replied: FrameBuffer,
    /// The tokens that each sequence has, once it was told some.
    told: HashMap<u32, u32>,
    held: Vec<HeldFrame>,
    /// The first candidates of the first sequence.
    first: Option<(u32, Vec<u8>)>,
}

/// Candidates that pass when their sequence has so many tokens.
struct HeldFrame {
    stream: u32,
    until: u32,
    payload: Vec<u8>,
}

impl Default for StreamsLink {
    fn default() -> Self {
        StreamsLink {
            asked: FrameBuffer::new(MAX_CLIENT_PAYLOAD),
            replied: FrameBuffer::new(MAX_NODE_PAYLOAD),
            told: HashMap::new(),
            held: Vec::new(),
            first: None,
        }
    }
}

impl StreamsLink {
    /// Reads what the decode node sends. Returns what was held back for it.
    fn hear(&mut self, piece: &[u8], shared: &Shared) -> Vec<u8> {
        self.asked.space().extend_from_slice(piece);
        while let Some(frame) = self.asked.next_frame().unwrap() {
            let stream = frame.stream;
            if let ClientFrame::Told(told) = ClientFrame::parse(frame).unwrap() {
                shared.n_told.fetch_add(told.tokens.len() as u64, Ordering::Relaxed);
                self.told.insert(stream, told.at + told.tokens.len() as u32);
            }
        }
        let mut out = Vec::new();
        self.held.retain(|held| {
            let is_due = self.told.get(&held.stream).is_some_and(|n| *n >= held.until);
            if is_due {
                put(&mut out, FrameKind::Drafted, held.stream, &held.payload);
            }
            !is_due
        });
        out
    }

    /// Reads what the draft node sends. Returns what passes.
    fn say(&mut self, piece: &[u8], shared: &Shared) -> Vec<u8> {
        let fault = *shared.fault.lock().unwrap();
        let mut out = Vec::new();
        self.replied.space().extend_from_slice(piece);
        while let Some(frame) = self.replied.next_frame().unwrap() {
            let (kind, stream, payload) = (frame.kind, frame.stream, frame.payload);
            let NodeFrame::Drafted(drafted) = NodeFrame::parse(frame).unwrap() else {
                put(&mut out, kind, stream, payload);
                let other = self.first.as_ref().filter(|(first, _)| kind == FrameKind::Accepted && *first != stream);
                if let Some((_, payload)) = other.filter(|_| fault == DraftFault::OfAnother) {
                    put(&mut out, FrameKind::Drafted, stream, payload);
                }
                continue;
            };
            let DraftedTokens { from, at, mut tokens } = drafted;
            match fault {
                DraftFault::Behind(n) => {
                    self.held.push(HeldFrame { stream, until: at + n, payload: payload.to_vec() });
                    continue;
                }
                DraftFault::OutOfRange => tokens[0] = u32::MAX,
                DraftFault::None | DraftFault::TooMany | DraftFault::OfAnother | DraftFault::OfUnknown => {}
            }
            self.first.get_or_insert_with(|| (stream, payload.to_vec()));
            let to = if fault == DraftFault::OfUnknown { stream + (1 << 20) } else { stream };
            put_drafted(&mut out, to, from, at, &tokens);
            for n in 0..if fault == DraftFault::TooMany { 8 } else { 0 } {
                let at = at as usize + tokens.len() + n * MAX_AHEAD;
                put_drafted(&mut out, to, from, at as u32, &[0; MAX_AHEAD]);
            }
        }
        out
    }
}

fn put_drafted(out: &mut Vec<u8>, stream: u32, from: u32, at: u32, tokens: &[u32]) {
    let numbers = [from, at].into_iter().chain(tokens.iter().copied());
    let payload: Vec<u8> = numbers.flat_map(u32::to_le_bytes).collect();
    put(out, FrameKind::Drafted, stream, &payload);
}

fn put(out: &mut Vec<u8>, kind: FrameKind, stream: u32, payload: &[u8]) {
    out.extend((payload.len() as u32).to_le_bytes());
    out.extend([kind as u8, 0, 0, 0]);
    out.extend(stream.to_le_bytes());
    out.extend(payload);
}
