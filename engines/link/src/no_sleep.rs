//! Keeps a Mac from going to sleep while it computes or passes a reply on, by `caffeinate`. Sleeping between requests is
//! the owner's choice; falling asleep in a reply breaks it off. Other systems do not sleep while programs run, unless told.
//!
//! Written for macOS and not run there.

use futures::StreamExt;
use futures::stream::BoxStream;

/// While one exists, the machine does not sleep by itself.
#[derive(Debug)]
pub struct StayAwake {
    #[cfg(target_os = "macos")]
    _work: mac::Work,
}

impl StayAwake {
    /// Begins now.
    pub fn begin() -> StayAwake {
        StayAwake {
            #[cfg(target_os = "macos")]
            _work: mac::Work::begin(),
        }
    }
}

/// The same stream; until it is dropped, the machine does not sleep by itself.
pub(crate) fn awake_during<T: 'static>(stream: BoxStream<'static, T>) -> BoxStream<'static, T> {
    let awake = StayAwake::begin();
    let held = stream.map(move |item| {
        // Moved into the stream, and dropped with it.
        let _ = &awake;
        item
    });
    held.boxed()
}

/// What is held while anything runs.
#[cfg(any(target_os = "macos", test))]
struct WhileRunning<A> {
    n_running: usize,
    held: Option<A>,
}

#[cfg(any(target_os = "macos", test))]
impl<A> WhileRunning<A> {
    const fn new() -> Self {
        WhileRunning { n_running: 0, held: None }
    }

    /// Something begins to run. The first takes what is held.
    fn begin(&mut self, take: impl FnOnce() -> Option<A>) {
        self.n_running += 1;
        if self.held.is_none() {
            self.held = take();
        }
    }

    /// Something has ended. Returns what to give back, if it was the last.
    fn end(&mut self) -> Option<A> {
        self.n_running = self.n_running.saturating_sub(1);
        if self.n_running == 0 { self.held.take() } else { None }
    }
}

#[cfg(target_os = "macos")]
mod mac {
    use std::process::{Child, Command, Stdio};
    use std::sync::{Mutex, PoisonError};

    use super::WhileRunning;

    static RUNNING: Mutex<WhileRunning<Child>> = Mutex::new(WhileRunning::new());

    /// Something that runs.
    #[derive(Debug)]
    pub(super) struct Work;

    impl Work {
        pub(super) fn begin() -> Work {
            RUNNING.lock().unwrap_or_else(PoisonError::into_inner).begin(caffeinate);
            Work
        }
    }

    impl Drop for Work {
        fn drop(&mut self) {
            let last = RUNNING.lock().unwrap_or_else(PoisonError::into_inner).end();
            let Some(mut caffeinate) = last else { return };
            // It may have ended by itself; the wait is for a killed process, and so is short.
            if let Err(error) = caffeinate.kill().and_then(|()| caffeinate.wait()) {
                tracing::debug!(%error, "caffeinate could not be ended");
            }
        }
    }

    /// Prevents idle sleep until it is killed or this process ends.
    fn caffeinate() -> Option<Child> {
        let pid = std::process::id().to_string();
        let mut command = Command::new("/usr/bin/caffeinate");
        command.args(["-i", "-w", &pid]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let started = command.spawn();
        started.inspect_err(|error| tracing::debug!(%error, "caffeinate does not start; the Mac may sleep")).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_takes_and_the_last_gives_back() {
        let mut running = WhileRunning::new();
        running.begin(|| Some("first"));
        running.begin(|| panic!("it is held already"));
        assert_eq!(running.end(), None);
        assert_eq!(running.end(), Some("first"));
        // What could not be taken is tried again, and an end too many does no harm.
        assert_eq!(running.end(), None);
        running.begin(|| None);
        running.begin(|| Some("second"));
        assert_eq!((running.end(), running.end()), (None, Some("second")));
    }
}
