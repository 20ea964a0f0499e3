//! The listeners of one address.

use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::task::Poll;

use tokio::net::{TcpListener, TcpStream};

/// Binds `HOST:PORT`. `localhost` is IPv4 and IPv6 with one port, because some clients try only one of them; a machine may
/// have only one. Otherwise there is one listener. Errors: the address cannot be bound, or one of `localhost`'s is in use.
pub async fn bind_host(address: &str) -> io::Result<Vec<TcpListener>> {
    let Some(port) = address.strip_prefix("localhost:") else { return Ok(vec![TcpListener::bind(address).await?]) };
    let first = TcpListener::bind(format!("127.0.0.1:{port}")).await;
    // Both have the port that the system chose for the first.
    let chosen = first.as_ref().ok().and_then(|listener| Some(listener.local_addr().ok()?.port().to_string()));
    let port = chosen.as_deref().unwrap_or(port);
    let second = TcpListener::bind(format!("[::1]:{port}")).await;
    let is_in_use = |bound: &io::Result<_>| bound.as_ref().is_err_and(|e| e.kind() == ErrorKind::AddrInUse);
    match (first, second) {
        (first, second) if is_in_use(&first) || is_in_use(&second) => first.and(second).map(|listener| vec![listener]),
        (Err(error), Err(_)) => Err(error),
        (first, second) => Ok(first.into_iter().chain(second).collect()),
    }
}

/// Accepts the next connection of any of the listeners. Dropping the future loses no connection.
pub async fn accept_any(listeners: &[TcpListener]) -> io::Result<(TcpStream, SocketAddr)> {
    poll_fn(|context| {
        let ready = listeners.iter().map(|listener| listener.poll_accept(context)).find(Poll::is_ready);
        ready.unwrap_or(Poll::Pending)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn localhost_listens_on_ipv4_and_ipv6() {
        if TcpListener::bind("[::1]:0").await.is_err() {
            eprintln!("skipped: this machine has no IPv6 loopback");
            return;
        }
        let listeners = bind_host("localhost:0").await.unwrap();
        let addresses: Vec<SocketAddr> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        assert!(addresses[0].is_ipv4() && addresses[1].is_ipv6() && addresses.iter().all(|a| a.ip().is_loopback()));
        assert_eq!(addresses[0].port(), addresses[1].port());
        let again = bind_host(&format!("localhost:{}", addresses[0].port())).await;
        assert_eq!(again.unwrap_err().kind(), ErrorKind::AddrInUse);
        for address in addresses {
            let (client, accepted) = tokio::join!(TcpStream::connect(address), accept_any(&listeners));
            assert_eq!(accepted.unwrap().1, client.unwrap().local_addr().unwrap());
        }
    }
}
