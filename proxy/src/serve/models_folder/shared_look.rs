//! One look for all who ask at the same time: reading a folder with many models is work, and anybody who may list them can ask often.

use std::sync::Arc;

use tokio::sync::Mutex;
use tokio::time::Instant;

/// The latest result, and when its look began.
#[derive(Debug)]
pub(super) struct SharedLook<T>(Arc<Mutex<Option<(Instant, T)>>>);

impl<T> Default for SharedLook<T> {
    fn default() -> SharedLook<T> {
        SharedLook(Arc::default())
    }
}

impl<T: Clone + Default + Send + 'static> SharedLook<T> {
    /// A result whose look began after this call: that of another caller, or of `look`. A look that has begun ends also if nobody
    /// waits for it, so there is one at a time. The default, if it panics.
    pub(super) async fn get(&self, look: impl Future<Output = T> + Send + 'static) -> T {
        let asked = Instant::now();
        let mut latest = Arc::clone(&self.0).lock_owned().await;
        if let Some((began, result)) = &*latest
            && *began >= asked
        {
            return result.clone();
        }
        let began = Instant::now();
        let looking = async move {
            let result = look.await;
            *latest = Some((began, result.clone()));
            result
        };
        tokio::spawn(looking).await.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use futures::future::join_all;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn many_who_ask_at_once_cost_two_looks_and_nobody_gets_an_old_result() {
        let (shared, n_looks) = (SharedLook::default(), Arc::new(AtomicU32::new(0)));
        let ask = || {
            let n_looks = Arc::clone(&n_looks);
            shared.get(async move {
                let n = n_looks.fetch_add(1, Ordering::SeqCst) + 1;
                tokio::time::sleep(Duration::from_secs(1)).await;
                n
            })
        };
        assert_eq!(ask().await, 1);
        assert_eq!(ask().await, 2, "the first one began before");
        let late = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            join_all((0..100).map(|_| ask())).await
        };
        let (first, others) = tokio::join!(ask(), late);
        assert_eq!((first, others), (3, vec![4; 100]));
        // One who leaves leaves the others a look.
        let left = tokio::time::timeout(Duration::from_millis(100), ask()).await;
        assert!(left.is_err() && ask().await == 6);
    }
}
