//! How many places a request needs.

/// The places that a request needs. A sequence takes one while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaceNeed {
    /// One place to the end of the request, for work of which one piece runs at a time.
    One,
    /// A place for each of `n` sequences. The request starts with one place, which it keeps to its last sequence. It gets
    /// others when it is its key's turn, `at_once` together at most. None of its sequences waits for another one, so
    /// requests that wait for each other's places cannot occur.
    Each {
        n: usize,
        /// More would only wait in the engine's own queue, which is the same for all keys.
        at_once: usize,
    },
    /// Places for `n` sequences that start together, or as many of them as the limits can ever give. The request waits
    /// without any place until all of them are free.
    Together { n: usize },
}

impl PlaceNeed {
    /// The places that are needed to start.
    pub(super) fn to_start(self) -> usize {
        match self {
            PlaceNeed::One | PlaceNeed::Each { .. } => 1,
            PlaceNeed::Together { n } => n,
        }
    }

    /// The sequences for which a request that starts with `n_places` gets places, one after another.
    pub(super) fn n_sequences(self, n_places: usize) -> usize {
        match self {
            PlaceNeed::One | PlaceNeed::Together { .. } => n_places,
            PlaceNeed::Each { n, .. } => n.max(1),
        }
    }

    /// The most places at once.
    pub(super) fn at_once(self) -> usize {
        match self {
            PlaceNeed::One => 1,
            PlaceNeed::Each { at_once, .. } => at_once,
            PlaceNeed::Together { n } => n,
        }
    }
}
