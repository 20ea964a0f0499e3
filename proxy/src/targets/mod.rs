//! The targets of requests: nodes, which speak the node protocol, and upstreams, which are other servers.

pub mod embedded;
pub mod found;
pub mod model_loading;
pub mod models;
pub mod nodes;
pub mod resolve;
pub mod target;
pub mod text_prefixes;
pub mod upstreams;

pub use self::embedded::Embedded;
pub use self::resolve::Targets;
pub use self::target::Target;
