//! Assembles a running endpoint and keeps its own engines alive.

pub mod socket_folder;
pub mod supervisor;
