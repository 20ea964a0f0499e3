//! The planner chooses the nodes that serve a request and predicts its times. Pure: no clock, no I/O, no lock.
//!
//! A [`Snapshot`](snapshot::Snapshot) describes the nodes and the request at one moment. [`cost`] predicts the time of
//! every route from it, a [`Policy`](policy::Policy) chooses a route, and [`deadlines`] limits the wait for each
//! predicted event. The proxy takes the snapshots and carries out the decisions.

pub mod cost;
pub mod deadlines;
pub mod policy;
pub mod rates;
pub mod reason;
pub mod snapshot;
