//! What one input may cost: memory and time, whatever the input claims.

use std::time::Duration;

use peak_alloc::PeakAlloc;
use rustix::time::{ClockId, clock_gettime};

use crate::FuzzTarget;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Bytes that an input may allocate at once, however short it is.
const MAX_BYTES: usize = 8 << 20;

/// Bytes that each byte of an input may allocate beyond that. JSON such as `[{"a":0},…]` as a tree takes about 100.
const MAX_BYTES_PER_BYTE: usize = 256;

/// Processor time of one input. Own time, so that a busy machine does not count.
const MAX_TIME: Duration = Duration::from_secs(2);

/// Calls a target and checks the cost. The memory of other threads counts, too, so nothing else may run meanwhile.
pub fn run(target: &FuzzTarget, input: &[u8]) -> bool {
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let began = thread_time();
    let outcome = (target.body)(input);
    let took = thread_time().saturating_sub(began);
    let n_bytes = MEMORY.peak_usage().saturating_sub(before);
    let most = MAX_BYTES + input.len() * MAX_BYTES_PER_BYTE;
    assert!(n_bytes <= most, "{}: {} bytes of input allocate {n_bytes} bytes", target.name, input.len());
    assert!(took <= MAX_TIME, "{}: {} bytes of input take {took:?}", target.name, input.len());
    outcome
}

/// What `work` returns, and the most bytes that it had allocated at once.
pub(crate) fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let done = work();
    (done, MEMORY.peak_usage().saturating_sub(before))
}

fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("a clock does not go below 0")
}
