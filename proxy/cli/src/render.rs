//! `baton render`: the process that renders a chat template. [`baton_node::render`] does it.

use baton_proxy::serve::CommandFailure;

/// Renders until the engine's process closes standard input.
pub(super) fn run() -> Result<(), CommandFailure> {
    Ok(baton_node::render::run()?)
}
