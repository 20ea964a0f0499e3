//! Keeps for a while whether an upstream's models see images, as its descriptions say.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// An upstream's description of a model counts this long. It may restart with another one.
const KEPT: Duration = Duration::from_secs(15);

/// The image support of an upstream's model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ImageSupport {
    Sees,
    /// The configuration says that it gets none.
    SwitchedOff,
    /// The upstream says that it sees none.
    SeesNone,
    /// The upstream does not say.
    Unsaid,
    /// The upstream did not answer.
    Unknown,
}

impl ImageSupport {
    pub(super) fn of_word(sees_images: Option<bool>) -> ImageSupport {
        match sees_images {
            Some(true) => ImageSupport::Sees,
            Some(false) => ImageSupport::SeesNone,
            None => ImageSupport::Unsaid,
        }
    }
}

/// An upstream's latest descriptions of its models, by its own names.
#[derive(Debug, Default)]
pub(super) struct DescribedSight {
    said: Mutex<HashMap<String, (Option<bool>, Instant)>>,
    /// Held while it is asked, so that many requests ask once.
    asking: tokio::sync::Mutex<()>,
}

impl DescribedSight {
    /// The latest description of a model, if it still counts.
    pub(super) fn said_of(&self, model: &str) -> Option<ImageSupport> {
        let (sees_images, at) = *self.lock().get(model)?;
        (at.elapsed() < KEPT).then(|| ImageSupport::of_word(sees_images))
    }

    /// Notes what it says.
    pub(super) fn keep(&self, model: &str, sees_images: Option<bool>) {
        let mut said = self.lock();
        // Names come and go with the upstream's list.
        said.retain(|_, (_, at)| at.elapsed() < KEPT);
        said.insert(model.to_owned(), (sees_images, Instant::now()));
    }

    /// Waits for the turn to ask it.
    pub(super) async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.asking.lock().await
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, (Option<bool>, Instant)>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_word_on_a_model_counts_for_a_while() {
        let sight = DescribedSight::default();
        assert_eq!(sight.said_of("m"), None);
        sight.keep("m", Some(true));
        sight.keep("n", None);
        assert_eq!((sight.said_of("m"), sight.said_of("n")), (Some(ImageSupport::Sees), Some(ImageSupport::Unsaid)));
        tokio::time::advance(KEPT).await;
        assert_eq!(sight.said_of("m"), None);
        sight.keep("n", Some(false));
        let n_kept = sight.lock().len();
        assert_eq!((n_kept, sight.said_of("n")), (1, Some(ImageSupport::SeesNone)));
    }
}
