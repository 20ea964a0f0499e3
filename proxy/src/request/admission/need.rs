//! How many places a request needs.

/// The places that a request needs: one for each of its sequences while that sequence runs.
///
/// The request starts with one place and keeps one to its last sequence, so one of its sequences always runs. It gets
/// the other places when it is its key's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaceNeed {
    /// The sequences, or the choices on an upstream.
    pub n_sequences: usize,
    /// The most places at once. More would only wait in the engine's own queue, which is the same for all keys.
    pub at_once: usize,
}

impl PlaceNeed {
    /// One place to the end of the request, for work of which one piece runs at a time.
    pub const ONE: PlaceNeed = PlaceNeed { n_sequences: 1, at_once: 1 };
}
