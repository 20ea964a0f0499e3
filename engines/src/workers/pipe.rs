//! Carries the bytes of a session both ways, and says why it ended.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_link::awake;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};

use super::rpc_commands::ProtocolFault;
use super::rpc_exchange::{ANSWER_DEADLINE, Forward, LateMessage, REQUEST_DEADLINE, RpcExchange};

/// Bytes that are read at once. A graph has some hundred kilobytes, the state of a prompt megabytes.
const PIECE_BYTES: usize = 256 << 10;

/// Time to take any byte. The worker's server reads nothing while it computes what it has read before.
const WRITE_DEADLINE: Duration = ANSWER_DEADLINE;

/// How often overdue answers are looked for.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionEnd {
    /// The engine closed it: that is how every session should end.
    #[error("the engine has left")]
    EngineLeft,
    #[error("the worker closed the connection")]
    WorkerLeft,
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("the worker's answer took more than {} s", ANSWER_DEADLINE.as_secs())]
    Overdue,
    #[error("the engine sent nothing of a request for {} s", REQUEST_DEADLINE.as_secs())]
    EngineSilent,
    #[error("one end read nothing for {} s", WRITE_DEADLINE.as_secs())]
    Unread,
    #[error("the bytes are not those of ggml's RPC protocol: {0}")]
    Fault(#[from] ProtocolFault),
}

/// Carries bytes until an end closes, is silent or breaks the protocol.
pub(super) async fn carry(
    engine: impl AsyncRead + AsyncWrite,
    worker: impl AsyncRead + AsyncWrite,
    exchange: RpcExchange,
) -> SessionEnd {
    let (engine_reader, engine_writer) = tokio::io::split(engine);
    let (worker_reader, worker_writer) = tokio::io::split(worker);
    let exchange = Mutex::new(exchange);
    let overdue = async {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            // Time in which this process was stopped counts as one interval.
            match lock(&exchange).overdue_after(CHECK_INTERVAL) {
                None => {}
                Some(LateMessage::Answer) => return SessionEnd::Overdue,
                Some(LateMessage::Request) => return SessionEnd::EngineSilent,
            }
        }
    };
    tokio::select! {
        end = requests(engine_reader, worker_writer, &exchange) => end,
        end = answers(worker_reader, engine_writer, &exchange) => end,
        end = overdue => end,
    }
}

fn lock(exchange: &Mutex<RpcExchange>) -> MutexGuard<'_, RpcExchange> {
    exchange.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns true if the other end has closed a TLS connection without `close_notify`, as a process that ends does.
fn is_close(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::UnexpectedEof
}

async fn requests<E: AsyncRead, W: AsyncWrite>(
    mut engine: ReadHalf<E>,
    mut worker: WriteHalf<W>,
    exchange: &Mutex<RpcExchange>,
) -> SessionEnd {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let n = match engine.read(&mut piece).await {
            Ok(0) => return SessionEnd::EngineLeft,
            Ok(n) => n,
            Err(error) if is_close(&error) => return SessionEnd::EngineLeft,
            Err(error) => return error.into(),
        };
        let seen = lock(exchange).request(&piece[..n]);
        if let Err(end) = seen.map_err(SessionEnd::from) {
            return end;
        }
        if let Err(end) = send(&mut worker, &piece[..n]).await {
            return end;
        }
    }
}

async fn answers<E: AsyncWrite, W: AsyncRead>(
    mut worker: ReadHalf<W>,
    mut engine: WriteHalf<E>,
    exchange: &Mutex<RpcExchange>,
) -> SessionEnd {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let n = match worker.read(&mut piece).await {
            Ok(0) => return SessionEnd::WorkerLeft,
            Ok(n) => n,
            Err(error) if is_close(&error) => return SessionEnd::WorkerLeft,
            Err(error) => return error.into(),
        };
        let forward = lock(exchange).answer(&piece[..n]);
        let sent = match forward {
            Err(fault) => return fault.into(),
            Ok(Forward::Nothing) => Ok(()),
            Ok(Forward::AsTheyAre) => send(&mut engine, &piece[..n]).await,
            Ok(Forward::Instead(bytes)) => send(&mut engine, &bytes).await,
        };
        if let Err(end) = sent {
            return end;
        }
    }
}

async fn send(to: &mut WriteHalf<impl AsyncWrite>, bytes: &[u8]) -> Result<(), SessionEnd> {
    let written = async {
        to.write_all(bytes).await?;
        // TLS keeps bytes until it is flushed.
        to.flush().await
    };
    match awake::timeout(WRITE_DEADLINE, written).await {
        Ok(written) => Ok(written?),
        Err(_) => Err(SessionEnd::Unread),
    }
}

#[cfg(test)]
mod tests {
    use super::super::rpc_commands::memory_answer;
    use super::super::rpc_exchange::ReportedMemory;
    use super::*;

    fn session() -> (tokio::io::DuplexStream, tokio::io::DuplexStream, tokio::task::JoinHandle<SessionEnd>) {
        let (engine, near) = tokio::io::duplex(64);
        let (worker, far) = tokio::io::duplex(64);
        let exchange = RpcExchange::new(ReportedMemory::Told(7), &[]);
        (engine, worker, tokio::spawn(async move { carry(near, far, exchange).await }))
    }

    #[tokio::test]
    async fn bytes_are_carried_both_ways_and_the_end_names_who_left() {
        let request = [&[11][..], &4u64.to_le_bytes(), &[0; 4]].concat();
        let (mut engine, mut worker, carried) = session();
        engine.write_all(&request).await.unwrap();
        let mut seen = vec![0; request.len()];
        worker.read_exact(&mut seen).await.unwrap();
        assert_eq!(seen, request);
        worker.write_all(&memory_answer(1, 100)).await.unwrap();
        let mut answer = [0; 24];
        engine.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer, memory_answer(7, 100));
        drop(engine);
        assert!(matches!(carried.await.unwrap(), SessionEnd::EngineLeft));
        let (_engine, worker, carried) = session();
        drop(worker);
        assert!(matches!(carried.await.unwrap(), SessionEnd::WorkerLeft));
    }

    #[tokio::test]
    async fn bytes_of_another_protocol_reach_nobody() {
        let (mut engine, mut worker, carried) = session();
        engine.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        assert!(matches!(carried.await.unwrap(), SessionEnd::Fault(ProtocolFault::UnknownCommand(b'G'))));
        assert_eq!(worker.read(&mut [0; 8]).await.unwrap(), 0);
    }
}
