//! Upgrades: after a reply of status 101, another protocol uses the connection.
//!
//! Each request of HTTP/1.1 that asks for an upgrade carries an offer. A handler accepts it with the work that uses the
//! connection from then on. The offer takes the work to the connection's task, because axum's handlers return nothing
//! but a reply. In a task of its own, the work would outlive the connection's place, deadlines and orderly stop.

use axum::body::Body;
use futures::FutureExt;
use futures::future::BoxFuture;
use http::{HeaderValue, Request, Response, StatusCode, Version, header};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// The bytes of a connection after its upgrade.
pub type UpgradedIo = TokioIo<Upgraded>;

/// The work that uses a connection after its upgrade.
pub(super) type UpgradedWork = BoxFuture<'static, ()>;

/// A request's offer to go on with this protocol.
pub struct UpgradeOffer {
    protocol: &'static str,
    upgrade: Upgrade,
}

/// An upgrade for which a request asks, in the request's extensions.
#[derive(Clone)]
struct Upgrade {
    on_upgrade: OnUpgrade,
    to_connection: mpsc::Sender<UpgradedWork>,
    closing: CancellationToken,
}

impl UpgradeOffer {
    /// The offer in a request to go on with `protocol`, if there is one.
    pub fn of<B>(request: &mut Request<B>, protocol: &'static str) -> Option<UpgradeOffer> {
        let wanted = request.headers().get(header::UPGRADE)?;
        if !wanted.as_bytes().eq_ignore_ascii_case(protocol.as_bytes()) {
            return None;
        }
        let upgrade = request.extensions_mut().remove::<Upgrade>()?;
        Some(UpgradeOffer { protocol, upgrade })
    }

    /// Adds the offer to a request that asks for an upgrade.
    pub(super) fn add<B>(
        request: &mut Request<B>,
        to_connection: &mpsc::Sender<UpgradedWork>,
        closing: &CancellationToken,
    ) {
        // HTTP/2 would upgrade only the request's stream.
        if request.version() != Version::HTTP_11 {
            return;
        }
        if let Some(on_upgrade) = request.extensions_mut().remove::<OnUpgrade>() {
            let upgrade = Upgrade { on_upgrade, to_connection: to_connection.clone(), closing: closing.clone() };
            request.extensions_mut().insert(upgrade);
        }
    }

    /// Accepts with the reply that this returns. Then `work` uses the connection, with its place and its write deadline.
    /// It gets a token that is cancelled when the server stops, and the server waits for its end.
    pub fn accept<F: Future<Output = ()> + Send + 'static>(
        self,
        work: impl FnOnce(UpgradedIo, CancellationToken) -> F + Send + 'static,
    ) -> Response<Body> {
        let UpgradeOffer { protocol, upgrade: Upgrade { on_upgrade, to_connection, closing } } = self;
        let upgraded_work = async move {
            match on_upgrade.await {
                Ok(upgraded) => work(TokioIo::new(upgraded), closing).await,
                Err(error) => tracing::debug!(%error, "a connection ended before its upgrade"),
            }
        };
        // Full only if the connection was upgraded already, which hyper does once.
        drop(to_connection.try_send(upgraded_work.boxed()));
        let mut reply = Response::new(Body::empty());
        *reply.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        reply.headers_mut().insert(header::UPGRADE, HeaderValue::from_static(protocol));
        reply
    }
}
