//! The vectors of a request, whichever target computed them.

use baton_schemas::embed::EmbedTimings;

/// A request's vectors.
#[derive(Debug, Clone, PartialEq)]
pub struct Embedded {
    /// One per input: of length 1 from a node, unchanged from an upstream.
    pub vectors: Vec<Vec<f32>>,
    /// Tokens of all inputs.
    pub n_tokens: u32,
    /// The target's own timings.
    pub timings: EmbedTimings,
}
