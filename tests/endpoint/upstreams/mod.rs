//! Baton in front of other servers: a scripted one that fails in every way, and a second Baton.

mod fallback;
mod faults;
mod foreign_replies;
mod image_support;
mod model_info;
mod observation;
mod ollama;
mod planned;
mod prefill_only;
mod vllm;
mod written_numbers;
