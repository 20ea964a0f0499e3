//! One node each: its client, its state, its breakers and what was measured of it. Which model it serves is decided in
//! [`models`](super::models).

mod breaker;
mod breakers;
mod fallbacks;
mod health;
mod identity;
mod load_stream;
mod node;
mod node_state;
mod prefixes;
pub mod probe;
pub mod remote_node;

pub use self::breaker::{Breaker, BreakerView};
pub use self::breakers::{Breakers, PairBreakers, Task};
pub use self::fallbacks::{Fallback, FallbackReason, Fallbacks};
pub use self::health::{Health, HealthStatus, StateChange, StateReason, StateTransition};
pub use self::identity::ModelIdentity;
pub use self::node::{Node, NodeClaim, READY_WAIT};
pub use self::node_state::NodeState;
