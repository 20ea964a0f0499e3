//! Which nodes serve a request, and why.
//!
//! A pure function of the request and of what is known of the nodes.

use std::fmt;

use baton_schemas::handoff::KvSource;
use baton_schemas::node::NodeInfo;

use crate::pool::{Node, ServedModel};

/// A prompt shorter than this is computed sooner than another node could be asked.
const MIN_HANDOFF_TOKENS: usize = 64;

/// A decision with its reason.
pub struct Plan<'p> {
    /// The node that generates.
    pub decode: &'p Node,
    /// The node that computes the prompt, if that is another.
    pub prefill: Option<&'p Node>,
    /// Why, in one word for counting.
    pub reason: &'static str,
}

/// Plans a request of `n_prompt` tokens for a model whose decode node is `info`.
pub fn plan<'p>(model: &'p ServedModel, info: &NodeInfo, n_prompt: usize) -> Plan<'p> {
    let direct = |reason| Plan { decode: &model.decode, prefill: None, reason };
    if model.prefill.is_empty() {
        return direct("only_route");
    }
    if n_prompt < MIN_HANDOFF_TOKENS {
        return direct("not_worth_it");
    }
    if info.kv.is_none() {
        return direct("kv_not_divisible");
    }
    match model.prefill.iter().find(|node| node.url.is_some() && node.info().is_some_and(|info| info.role.prefills())) {
        Some(node) => Plan { decode: &model.decode, prefill: Some(node), reason: "prompt_length" },
        None => direct("prefill_down"),
    }
}

impl Plan<'_> {
    /// What the decode node is told of where to get the prompt's KV.
    pub fn kv_source(&self) -> Option<KvSource> {
        let url = self.prefill?.url.clone()?;
        Some(KvSource { url, codecs: Vec::new() })
    }
}

impl fmt::Display for Plan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefill {
            None => write!(f, "direct; decode={}; reason={}", self.decode.name, self.reason),
            Some(prefill) => {
                write!(f, "handoff; prefill={}; decode={}; reason={}", prefill.name, self.decode.name, self.reason)
            }
        }
    }
}
