//! What every connection and every request meets first: sockets, the checks before a route, ids, and the end of the server.

pub(super) mod draining;
pub(super) mod nearest_route;
pub mod open_files;
pub(super) mod parse_errors;
pub(super) mod passage;
pub mod request_id;
pub mod server;
