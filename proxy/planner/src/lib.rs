//! The planner chooses the nodes that serve a request and predicts its times. Pure: no clock, no I/O, no lock.
//!
//! A [`Snapshot`](snapshot::Snapshot) describes the nodes and the request at one moment. [`cost`] predicts the time of
//! every route from it, a [`Policy`](policy::Policy) chooses a route, and [`deadlines`] limits the wait for each
//! predicted event. [`upstreams`] does the same for other servers, of which only requests and replies are seen. The proxy takes
//! the snapshots and carries out the decisions.
//!
//! ```
//! use baton_planner::rates::{Curve, NodeRates};
//! use baton_planner::snapshot::{NodeView, RequestSize, Snapshot};
//!
//! let rates = NodeRates { prefill: Curve::constant(1_000.0), decode: Curve::constant(50.0), ..NodeRates::default() };
//! let snapshot = Snapshot {
//!     request: RequestSize { n_prompt: 2_001, n_replayed: 0, n_output: 100.0 },
//!     decode: vec![NodeView { name: "mac".into(), n_slots: 1, rates, ..NodeView::default() }],
//!     prefill: vec![],
//!     links: vec![],
//!     barred_pairs: vec![],
//!     corrections: vec![],
//!     turn: 0,
//! };
//! let [direct] = &baton_planner::cost::candidates(&snapshot)[..] else { panic!("one node has one route") };
//! // 2,000 tokens at 1,000 tokens per second, and one step.
//! assert_eq!(direct.prediction.map(|times| times.ttft_ms.round()), Some(2_020.0));
//! ```

pub mod cache_reach;
pub mod cost;
pub mod deadlines;
pub mod layer_split;
pub mod policy;
pub mod promises;
pub mod rates;
pub mod reason;
pub mod snapshot;
pub mod time_fit;
pub mod upstream_learning;
pub mod upstream_queue;
pub mod upstream_rates;
pub mod upstream_work;
pub mod upstreams;
