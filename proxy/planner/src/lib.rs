//! The planner: which nodes should serve a request, and what that will take. Pure: no clock, no I/O, no lock.
//!
//! A [`Snapshot`](snapshot::Snapshot) is what is known at one moment, [`cost`] predicts every route from it, a
//! [`Policy`](policy::Policy) chooses one, and [`deadlines`] says how long to wait for what was predicted. The proxy
//! takes snapshots of its nodes and carries the decision out; nothing here knows of either.

pub mod cost;
pub mod deadlines;
pub mod policy;
pub mod rates;
pub mod reason;
pub mod snapshot;
