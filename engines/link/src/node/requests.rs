//! Whether a node has requests, and since when it has none.

use std::sync::Arc;

use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::watch;
use tokio::time::Instant;

/// The requests of a node. Probes and reports of its load count as none, and so does what gives way to requests; but while KV moves
/// or a measurement runs, the node is not idle.
#[derive(Debug, Clone)]
pub struct NodeRequests(Arc<watch::Sender<NodeRequestCounts>>);

/// The requests of a node at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeRequestCounts {
    /// Those that run or wait, and what gives way to requests.
    pub n_open: u64,
    /// All until now.
    pub n_begun: u64,
    /// When the last one ended, or the node started.
    pub last: Instant,
}

/// A request that runs or waits, or what gives way to requests. Its end is noted when this is dropped.
#[derive(Debug)]
pub struct NodeRequest {
    of: NodeRequests,
    gives_way: bool,
}

impl Default for NodeRequests {
    fn default() -> NodeRequests {
        NodeRequests(Arc::new(watch::Sender::new(NodeRequestCounts { n_open: 0, n_begun: 0, last: Instant::now() })))
    }
}

impl NodeRequests {
    /// A request begins, or a model's files begin to move.
    pub fn begin(&self) -> NodeRequest {
        self.begin_with(false)
    }

    /// The same of something that may give way to requests.
    pub(super) fn begin_with(&self, gives_way: bool) -> NodeRequest {
        self.0.send_modify(|counts| {
            counts.n_open += 1;
            counts.n_begun += u64::from(!gives_way);
        });
        NodeRequest { of: self.clone(), gives_way }
    }

    /// The counts now, and whenever they change.
    pub fn subscribe(&self) -> watch::Receiver<NodeRequestCounts> {
        self.0.subscribe()
    }
}

impl NodeRequest {
    /// The same stream; the request is open until it is dropped.
    pub(super) fn during<T: 'static>(self, stream: BoxStream<'static, T>) -> BoxStream<'static, T> {
        let held = stream.map(move |item| {
            // Moved into the stream, and dropped with it.
            let _ = &self;
            item
        });
        held.boxed()
    }
}

impl Drop for NodeRequest {
    fn drop(&mut self) {
        self.of.0.send_modify(|counts| {
            counts.n_open -= 1;
            if !self.gives_way {
                counts.last = Instant::now();
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_gives_way_keeps_a_node_from_sleep_and_is_no_request() {
        let requests = NodeRequests::default();
        let counts = || *requests.subscribe().borrow();
        let start = counts().last;
        let aside = requests.begin_with(true);
        assert_eq!((counts().n_open, counts().n_begun), (1, 0));
        tokio::time::advance(std::time::Duration::from_secs(1)).await;
        drop(aside);
        assert_eq!((counts().n_open, counts().last), (0, start));
        drop(requests.begin());
        assert_eq!((counts().n_open, counts().n_begun), (0, 1));
        assert!(counts().last > start);
    }
}
