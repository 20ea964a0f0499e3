//! The models that nodes serve: their names, their nodes, and the measurements of their routes.

mod calibration;
mod draft_nodes;
mod image_support;
mod learned_routes;
mod learning;
mod pool;
mod removed_keys;
mod renamed_weights;
mod reported;
mod returning;
mod returns;
mod served_model;
mod sleeping_nodes;
mod supporting_nodes;
mod unused_nodes;

pub use self::calibration::keep_calibrated;
pub use self::image_support::ImageNeed;
pub use self::learned_routes::{LearnedRoutes, expected_output};
pub use self::pool::ModelPool;
pub use self::removed_keys::RemovedKeys;
pub use self::reported::{REPORT_INTERVAL, serve_reported_models};
pub use self::returning::keep_returning;
pub use self::returns::{KvReturns, ReturnCounts};
pub use self::served_model::{NodeWait, ServedModel};
pub use self::unused_nodes::{UnusedCause, UnusedNode};

#[cfg(test)]
mod tests;
