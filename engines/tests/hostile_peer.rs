//! Prefill nodes that break, lie or stall, over real sockets: the reply is right, in time, and says what happened.

mod hostile;
mod peers;
