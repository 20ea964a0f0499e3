//! An HTTP/1.1 connection without a task of its own.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;

use super::call::CallError;
use super::open::Socket;
use super::signal::SignalledPoll;

type Http1Driver = http1::Connection<TokioIo<Socket>, Full<Bytes>>;

/// An open connection. Dropping it closes it, which tells the server to stop.
pub(super) struct LocalConnection {
    sender: SendRequest<Full<Bytes>>,
    /// `None` once the connection is closed.
    driver: Option<Http1Driver>,
    signalled: SignalledPoll,
}

impl LocalConnection {
    /// Prepares the connection on this socket. Sends nothing.
    pub(super) async fn open(socket: Socket) -> hyper::Result<LocalConnection> {
        let (sender, driver) = http1::handshake(TokioIo::new(socket)).await?;
        Ok(LocalConnection { sender, driver: Some(driver), signalled: SignalledPoll::new() })
    }

    /// Sends a request. Returns with the head of the reply, whose body is read with [`LocalConnection::poll_body`].
    pub(super) async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, CallError> {
        let LocalConnection { sender, driver, signalled } = self;
        let mut response = pin!(sender.try_send_request(request));
        let response = poll_fn(|cx| {
            signalled.poll(cx, |cx| {
                drive(driver, cx);
                response.as_mut().poll(cx)
            })
        });
        response.await.map_err(CallError::http1)
    }

    /// The next piece of a reply's body; `None` at its end.
    pub(super) fn poll_body(
        &mut self,
        cx: &Context<'_>,
        body: &mut Incoming,
    ) -> Poll<Option<Result<Bytes, hyper::Error>>> {
        let LocalConnection { driver, signalled, .. } = self;
        signalled.poll(cx, |cx| {
            drive(driver, cx);
            poll_data(body, cx)
        })
    }

    /// Reads what the server has sent, if anything. Returns true if the connection can take another request.
    pub(super) fn is_usable(&mut self) -> bool {
        let LocalConnection { sender, driver, signalled } = self;
        let polled = signalled.poll_once(|cx| {
            drive(driver, cx);
            Poll::<()>::Pending
        });
        polled.is_pending() && driver.is_some() && sender.is_ready()
    }
}

/// Reads and writes as far as the socket allows.
fn drive(driver: &mut Option<Http1Driver>, cx: &mut Context<'_>) {
    // An error reaches the reply, too.
    if driver.as_mut().is_some_and(|driver| Pin::new(driver).poll(cx).is_ready()) {
        *driver = None;
    }
}

/// The next piece of a body; `None` at its end.
pub(super) fn poll_data(body: &mut Incoming, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, hyper::Error>>> {
    loop {
        let Some(frame) = std::task::ready!(Pin::new(&mut *body).poll_frame(cx)) else { return Poll::Ready(None) };
        match frame.map(hyper::body::Frame::into_data) {
            Ok(Ok(data)) => return Poll::Ready(Some(Ok(data))),
            Ok(Err(_trailers)) => {}
            Err(error) => return Poll::Ready(Some(Err(error))),
        }
    }
}
