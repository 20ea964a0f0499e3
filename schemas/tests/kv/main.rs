//! Handoff streams through both ends, whole and damaged.

#[allow(unreachable_pub, dead_code, reason = "a module of the fuzz project too, and not every user needs all")]
#[path = "../../../tests/fuzz/src/sample.rs"]
mod sample;

mod corruption;
mod refusals;
mod round_trips;
mod speed;
