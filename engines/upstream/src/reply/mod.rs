//! Replies of upstreams, from their bytes to events.
//!
//! [`stream`] reads any reply in pieces, [`delta`] has what a piece says. [`refusal`] turns errors that a server describes
//! into failures. The others read what only some replies have.

pub(crate) mod delta;
pub(crate) mod finish_word;
pub(crate) mod foreign;
pub(crate) mod logprobs;
pub(crate) mod model_info;
pub(crate) mod model_list;
pub(crate) mod refusal;
pub(crate) mod stream;
pub(crate) mod vectors;
