//! Tests that measure memory and time, or load the whole machine. They run alone: no other test binary runs beside this
//! one, and [`machine`] lets only one of its tests run.

mod chaos;
mod load;

use tokio::sync::{Mutex, MutexGuard};

/// Waits until no other test of this binary runs.
async fn machine() -> MutexGuard<'static, ()> {
    static MACHINE: Mutex<()> = Mutex::const_new(());
    MACHINE.lock().await
}
