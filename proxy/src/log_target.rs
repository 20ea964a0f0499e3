//! Names of log lines that do not follow the modules' paths.

/// Info lines that operators see without asking (RUST_LOG unset): what was reloaded, which model is loaded or unloaded.
pub const NOTICE: &str = "baton_proxy::notice";
