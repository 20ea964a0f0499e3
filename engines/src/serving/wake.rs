//! Tells the scheduler that something it waits for is there.

use std::sync::Arc;

/// Wakes the scheduler.
pub(crate) type Wake = Arc<dyn Fn() + Send + Sync>;
