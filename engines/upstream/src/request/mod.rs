//! Requests to an upstream before they are sent: their routes and bodies.

pub(crate) mod body;
pub(crate) mod call;
pub(crate) mod fields;
pub(crate) mod images;
