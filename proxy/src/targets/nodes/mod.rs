//! Single nodes: their clients, states, breakers and measured rates. [`models`](super::models) decides which model a node
//! serves.

mod breaker;
mod breakers;
mod claims;
mod fallbacks;
mod found_paths;
mod health;
mod held;
mod identity;
pub mod info_watch;
mod load_stream;
mod machine_waker;
mod node;
mod node_state;
mod prefixes;
pub mod probe;
mod quarantine;
mod routed_prefixes;
mod state_change;
mod wake_times;
mod waking;
mod workers;

pub use self::breaker::{Breaker, BreakerView};
pub use self::breakers::{Breakers, PairBreakers, Task};
pub use self::claims::NodeClaim;
pub use self::fallbacks::{Fallback, FallbackReason, Fallbacks};
pub use self::found_paths::FoundPaths;
pub use self::health::{Health, HealthStatus, StateTransition};
pub use self::identity::{ModelIdentity, bars_handoff};
pub use self::machine_waker::WakeSettings;
pub use self::node::Node;
pub use self::node_state::NodeState;
pub use self::prefixes::PromptHashes;
pub(super) use self::prefixes::key as prefix_key;
pub use self::quarantine::{Quarantine, QuarantineLevel, QuarantineStay};
pub(super) use self::routed_prefixes::RoutedPrefixes;
pub use self::state_change::{NodeRefusal, StateChange, StateReason};
pub use self::wake_times::{MAX_WAKE, WakeTimes};
pub use self::waking::READY_WAIT;
pub use self::workers::WorkerReport;
