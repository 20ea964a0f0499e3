//! Options of accepted TCP sockets.

use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// Keep-alive probes that may stay unanswered.
const KEEPALIVE_PROBES: u32 = 3;

/// Sets up an accepted socket. A peer that answers no packet for `dead_after`, for example a machine that sleeps, loses
/// its connection: by default the system retransmits for a quarter of an hour. `send_buffer` replaces the system's size.
pub fn tune(stream: &TcpStream, dead_after: Duration, send_buffer: Option<usize>) {
    if let Err(error) = set_options(stream, dead_after, send_buffer) {
        tracing::debug!(%error, "an option of a socket cannot be set; the system's default stays");
    }
}

fn set_options(stream: &TcpStream, dead_after: Duration, send_buffer: Option<usize>) -> std::io::Result<()> {
    // A token is a small packet; Nagle's algorithm would delay it until the peer's next acknowledgement.
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    if let Some(n_bytes) = send_buffer {
        socket.set_send_buffer_size(n_bytes)?;
    }
    // Linux probes only while no data is on its way. For sent data, and for a peer that takes none, there is
    // TCP_USER_TIMEOUT. macOS has no such option, but its probes also run while data is on its way.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(dead_after))?;
    let interval = dead_after / (2 * KEEPALIVE_PROBES);
    let keepalive = TcpKeepalive::new().with_time(dead_after / 2).with_interval(interval);
    socket.set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_PROBES))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_machine_that_sleeps_loses_its_connection_in_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (accepted, _client) = tokio::join!(listener.accept(), client);
        let (stream, _) = accepted.unwrap();
        let dead_after = Duration::from_secs(30);
        tune(&stream, dead_after, Some(64 << 10));
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap() && stream.nodelay().unwrap());
        #[cfg(target_os = "linux")]
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(dead_after));
        let probes = socket.tcp_keepalive_interval().unwrap() * socket.tcp_keepalive_retries().unwrap();
        assert_eq!(socket.tcp_keepalive_time().unwrap() + probes, dead_after);
    }
}
