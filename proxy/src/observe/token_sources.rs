//! Where a prompt's KV comes from.

use baton_schemas::handoff::HandoffReport;
use baton_schemas::sequence::CachedTokens;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A source of a prompt's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum TokenSource {
    /// A slot of the node that generates.
    Slot,
    /// The memory of its store.
    Memory,
    /// The disk of its store.
    Disk,
    /// Another node.
    Pulled,
    /// The node that generates computed it.
    Computed,
}

impl TokenSource {
    /// The word for metrics.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The tokens of a prompt, by the source of their KV.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TokenSources {
    /// In a slot of the node that generates, or cached by an upstream.
    pub slot: u32,
    /// From the memory of its store.
    pub memory: u32,
    /// From the disk of its store.
    pub disk: u32,
    /// From another node.
    pub pulled: u32,
    /// Computed by the node that generates.
    pub computed: u32,
}

impl TokenSources {
    /// The sources of a prompt of `n_prompt` tokens. An upstream counts the `n_transferred` ones from its prefill servers as cached.
    pub(super) fn of(
        n_prompt: u32,
        cached: CachedTokens,
        handoff: Option<&HandoffReport>,
        n_transferred: u32,
    ) -> TokenSources {
        let transferred = n_transferred.min(cached.slot());
        let pulled = handoff.map_or(0, |handoff| handoff.n_tokens).saturating_add(transferred);
        let slot = cached.slot() - transferred;
        let there = [slot, cached.memory, cached.disk, pulled].into_iter().fold(0, u32::saturating_add);
        let computed = n_prompt.saturating_sub(there);
        TokenSources { slot, memory: cached.memory, disk: cached.disk, pulled, computed }
    }

    /// Each source with its tokens.
    pub(super) fn each(self) -> [(TokenSource, u32); 5] {
        let TokenSources { slot, memory, disk, pulled, computed } = self;
        [
            (TokenSource::Slot, slot),
            (TokenSource::Memory, memory),
            (TokenSource::Disk, disk),
            (TokenSource::Pulled, pulled),
            (TokenSource::Computed, computed),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_of_a_prompt_has_one_source() {
        let cached = CachedTokens { n_cached: 900, memory: 300, disk: 200 };
        let handoff = HandoffReport { n_tokens: 50, ..HandoffReport::default() };
        let sources = TokenSources::of(1_000, cached, Some(&handoff), 0);
        let expected = TokenSources { slot: 400, memory: 300, disk: 200, pulled: 50, computed: 50 };
        assert_eq!(sources, expected);
        assert_eq!(sources.each().iter().map(|(_, n)| n).sum::<u32>(), 1_000);
        let sources = TokenSources::of(1_000, CachedTokens::in_slot(800), None, 700);
        assert_eq!((sources.slot, sources.pulled, sources.computed), (100, 700, 200));
    }
}
