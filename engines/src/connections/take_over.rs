//! Hands a connection over to another protocol after a reply of status 101.

use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

type Work = Box<dyn FnOnce(CancellationToken) -> BoxFuture<'static, ()> + Send>;

/// Marks a reply after which another protocol takes the connection over. The work keeps the connection's place and its
/// write deadline. The work gets a token that is cancelled when the server stops, and the server waits for its end.
#[derive(Clone)]
pub struct TakeOver(Arc<Mutex<Option<Work>>>);

impl TakeOver {
    /// The work that takes over. It gets the bytes from hyper's upgrade of the request.
    pub fn new<F: Future<Output = ()> + Send + 'static>(
        work: impl FnOnce(CancellationToken) -> F + Send + 'static,
    ) -> TakeOver {
        let work: Work = Box::new(move |closing| work(closing).boxed());
        TakeOver(Arc::new(Mutex::new(Some(work))))
    }

    /// Runs the work. The second call does nothing.
    pub(super) async fn run(self, closing: CancellationToken) {
        let work = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(work) = work {
            work(closing).await;
        }
    }
}
