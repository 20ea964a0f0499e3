//! Prefill nodes that break, lie or stall, over real sockets: the reply is right, in time, and says what happened.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on panics")]

mod hostile;
mod peers;
