//! What can answer a request: nodes, which run models behind the node protocol, and upstreams, which are servers of
//! their own.

pub mod model_loading;
pub mod nodes;
pub mod upstreams;
