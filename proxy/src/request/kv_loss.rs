//! A request's right to lossless KV, which no lossy codec has changed: on its way from another node, or in a store's file.

use baton_schemas::generate::Sampling;
use schemars::JsonSchema;
use serde::Deserialize;

/// The KV of a request that says nothing, where the operator allows lossy codecs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LossyKv {
    /// Lossy KV.
    #[default]
    Allowed,
    /// Lossless KV.
    OnRequest,
}

/// A request's own word on its KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum KvWish {
    /// No lossy codec.
    Lossless,
    /// Any codec that the operator allows.
    Lossy,
}

impl KvWish {
    /// All of them.
    pub const ALL: [KvWish; 2] = [KvWish::Lossless, KvWish::Lossy];

    /// The word in the header.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Parses the word of a header.
    pub fn parse(word: &str) -> Option<KvWish> {
        KvWish::ALL.into_iter().find(|known| known.as_str() == word)
    }
}

/// A request's own word on its KV, and the rule if it has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KvLoss {
    /// Its word.
    pub wish: Option<KvWish>,
    /// The configuration's rule.
    pub default: LossyKv,
}

impl KvLoss {
    /// Returns true if it must get lossless KV. With a seed it wants the same reply again, wherever its KV is then.
    pub fn is_refused(self, sampling: &Sampling) -> bool {
        let is_refused = match (self.wish, self.default) {
            (Some(KvWish::Lossless), _) | (None, LossyKv::OnRequest) => true,
            (Some(KvWish::Lossy), _) | (None, LossyKv::Allowed) => false,
        };
        is_refused || sampling.repeatable
    }

    /// Returns true if it asks for lossy KV and gets lossless KV, because of its seed.
    pub fn is_overruled(self, sampling: &Sampling) -> bool {
        self.wish == Some(KvWish::Lossy) && sampling.repeatable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_refuses_lossy_kv_and_otherwise_the_request_decides_before_the_configuration() {
        let seeded = Sampling { repeatable: true, ..Sampling::default() };
        for (wish, default, expected) in [
            (None, LossyKv::Allowed, false),
            (None, LossyKv::OnRequest, true),
            (Some(KvWish::Lossy), LossyKv::OnRequest, false),
            (Some(KvWish::Lossless), LossyKv::Allowed, true),
        ] {
            let loss = KvLoss { wish, default };
            assert_eq!(loss.is_refused(&Sampling::default()), expected, "{loss:?}");
            assert!(loss.is_refused(&seeded), "{loss:?}");
            assert_eq!(loss.is_overruled(&seeded), wish == Some(KvWish::Lossy));
            assert!(!loss.is_overruled(&Sampling::default()));
        }
        assert!(KvWish::ALL.iter().all(|wish| KvWish::parse(wish.as_str()) == Some(*wish)));
        assert_eq!(KvWish::parse("kvq"), None);
    }
}
