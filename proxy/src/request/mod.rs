//! The life of a request, free of any dialect: admission, target, prompt, plan, start, stream.

pub mod admission;
pub mod embed;
pub mod failover;
pub mod generate;
pub mod plan;
pub mod prompt;
