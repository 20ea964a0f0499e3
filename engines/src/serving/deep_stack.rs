//! Threads for work whose recursion is as deep as a client's input.

use baton_schemas::EngineError;

/// Does work on a thread with a stack of `n_bytes`. The stack takes memory only as far as it is used. Blocking.
pub(crate) fn on_deep_stack<T: Send>(n_bytes: usize, work: impl FnOnce() -> T + Send) -> Result<T, EngineError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("deep".into()).stack_size(n_bytes);
        let thread = thread.spawn_scoped(scope, work).map_err(EngineError::internal)?;
        thread.join().map_err(|_| EngineError::internal("a thread with a deep stack panicked"))
    })
}
