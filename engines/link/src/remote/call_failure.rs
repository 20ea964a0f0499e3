//! Why a call failed: whose fault it was, and for the operator the most informative cause, and the URL if TLS fails.

use std::error::Error;
use std::io;

use rustix::io::Errno;

use crate::transport::explain_tls;

/// Describes the cause of a failed call.
pub fn describe(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return "no connection in time".into();
    }
    describe_cause(error, error.url().map(|url| url.as_str()), error.is_connect())
}

/// Returns true if this process lacked a descriptor, a port or memory for the connection. That says nothing about the other end.
pub fn is_own_lack(error: &(dyn Error + 'static)) -> bool {
    const LACKS: [Errno; 5] = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS, Errno::ADDRNOTAVAIL];
    let errors = causes(error).filter_map(|cause| cause.downcast_ref::<io::Error>()).flat_map(within);
    errors.filter_map(Errno::from_io_error).any(|errno| LACKS.contains(&errno))
}

/// The same for an error of any client. `is_connect`: there was no connection yet.
pub fn describe_cause(error: &(dyn Error + 'static), url: Option<&str>, is_connect: bool) -> String {
    let causes = || causes(error);
    let innermost = causes().last().map_or_else(|| error.to_string(), ToString::to_string);
    // Failures of the TLS handshake arrive as I/O errors of several kinds.
    let kinds: Vec<io::ErrorKind> =
        causes().filter_map(|cause| cause.downcast_ref::<io::Error>()).flat_map(within).map(io::Error::kind).collect();
    let is_https = url.is_some_and(|url| url.starts_with("https:"));
    if kinds.contains(&io::ErrorKind::ConnectionRefused) {
        "the connection was refused: nothing listens there".into()
    } else if let Some(tls) = explain_tls(error, url) {
        tls
    } else if is_https && is_connect && kinds.contains(&io::ErrorKind::UnexpectedEof) {
        "TLS failed: the other side hung up; does it speak plain http?".into()
    } else if causes().filter_map(|cause| cause.downcast_ref::<hyper::Error>()).any(hyper::Error::is_parse) {
        "what answers there does not speak plain http; a node with TLS is reached at https://".into()
    } else {
        innermost
    }
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&cause| cause.source())
}

/// An error and the errors that it wraps, which `source` does not return.
fn within(error: &io::Error) -> impl Iterator<Item = &io::Error> {
    std::iter::successors(Some(error), |&error| error.get_ref()?.downcast_ref())
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    /// Checks the description for a server that sends these bytes to each client and closes the connection.
    async fn check(scheme: &str, answer: &'static [u8], expected: &str) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("{scheme}://{}/", listener.local_addr().unwrap());
        let server = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 1024];
                let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut request).await;
                let _ = stream.write_all(answer).await;
            }
        });
        let error = reqwest::Client::builder().no_proxy().build().unwrap().get(&url).send().await.unwrap_err();
        server.abort();
        let said = describe(&error);
        assert!(said.starts_with(expected), "{scheme} {answer:?}: {said}");
        assert!(said.starts_with("TLS with") || !said.contains("127.0.0.1"), "{said}");
    }

    #[tokio::test]
    async fn what_this_process_lacks_is_told_from_what_the_other_end_does() {
        for (errno, is_lack) in
            [(Errno::MFILE, true), (Errno::NFILE, true), (Errno::ADDRNOTAVAIL, true), (Errno::CONNREFUSED, false)]
        {
            let error = io::Error::from(errno);
            assert_eq!(is_own_lack(&error), is_lack, "{error}");
            assert_eq!(is_own_lack(&io::Error::other(error)), is_lack, "wrapped by an error of another kind");
        }
        // As a client wraps it: no socket of this machine can have this address.
        let elsewhere =
            reqwest::Client::builder().no_proxy().local_address("192.0.2.1".parse::<std::net::IpAddr>().ok());
        let error = elsewhere.build().unwrap().get("http://127.0.0.1:9/").send().await.unwrap_err();
        assert!(is_own_lack(&error), "{error:?}");
        let error = reqwest::Client::builder().no_proxy().build().unwrap().get("http://127.0.0.1:9/").send().await;
        assert!(!is_own_lack(&error.unwrap_err()));
    }

    #[tokio::test]
    async fn each_cause_has_its_own_description() {
        check("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "TLS with ").await;
        check("https", b"", "TLS failed: the other side hung up").await;
        check("http", b"\x15\x03\x01\x00\x02\x02\x46", "what answers there does not speak plain http").await;
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let error = reqwest::get(format!("http://{closed}/")).await.unwrap_err();
        assert!(describe(&error).contains("refused"), "{error:?}");
        let error = reqwest::get("http://nothing.invalid/").await.unwrap_err();
        assert!(!describe(&error).contains("http://"), "{}", describe(&error));
    }
}
