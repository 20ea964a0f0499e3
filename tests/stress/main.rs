//! Tests that measure memory and time, or load the whole machine. No other test binary runs at the same time, and
//! [`machine`] lets only one of these tests run at once.

mod chaos;
mod load;
mod soak;

use tokio::sync::{Mutex, MutexGuard};

/// Waits until no other test of this binary runs.
async fn machine() -> MutexGuard<'static, ()> {
    static MACHINE: Mutex<()> = Mutex::const_new(());
    MACHINE.lock().await
}
