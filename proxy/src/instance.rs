//! Identifies this process: an endpoint that adopts servers must not adopt itself, whatever address leads to it.

use std::sync::LazyLock;

/// The header of `/v1/models` that has it.
pub(crate) const INSTANCE_HEADER: &str = "x-baton-instance";

static INSTANCE: LazyLock<String> = LazyLock::new(|| format!("{:032x}", rand::random::<u128>()));

/// A random word that this process keeps. It is public.
pub(crate) fn instance() -> &'static str {
    &INSTANCE
}
