//! The life of a request, independent of any dialect: target, admission, prompt, plan, start, hold.

pub mod caller;
pub mod embed;
pub mod explain;
pub mod failover;
pub mod generate;
pub mod kv_loss;
pub mod models;
pub mod plan;
pub mod poison_case;
pub mod prompt;
pub mod prompt_logprobs;
pub mod seats;
pub mod tokens;
pub mod warnings;
