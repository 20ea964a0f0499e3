//! Which choice of a chunk is read. One was requested, but some servers answer with more, and some count chunks in `index`
//! (Foundry Local 0.7, TGI 1.4).

/// The numbers of choices so far.
#[derive(Default)]
pub(super) struct ChoiceNumbers {
    /// The number of the choice that is read: the first that has one.
    first: Option<u32>,
    /// It came more than once, so numbers are those of choices.
    is_repeated: bool,
    /// Each chunk has a number of its own.
    counts_chunks: bool,
    /// The second event and its number, until the third shows what it is.
    held: Option<(u32, Vec<u8>)>,
}

/// Where a choice belongs.
pub(super) enum Belongs {
    /// It is the one that is read.
    Here,
    /// It is another one.
    Elsewhere,
    /// The next event will show it.
    Unsure { number: u32 },
}

/// The outcome for a held event.
pub(super) enum Settled {
    /// A chunk of the choice that is read.
    Here(Vec<u8>),
    /// One of another choice.
    Elsewhere,
}

impl ChoiceNumbers {
    /// An event had the same form as one before it, and so the same number. Returns true if the held event was another choice's.
    pub(super) fn repeat(&mut self) -> bool {
        self.is_repeated = true;
        self.held.take().is_some()
    }

    /// Where a choice with this number belongs, alone in its event or beside others.
    pub(super) fn belongs(&mut self, number: Option<u32>, is_alone: bool) -> Belongs {
        let Some(number) = number.filter(|_| !self.counts_chunks) else { return Belongs::Here };
        match self.first {
            None => self.first = Some(number),
            Some(first) if first == number => self.is_repeated = true,
            Some(first) if is_alone && !self.is_repeated && first.checked_add(1) == Some(number) => {
                return Belongs::Unsure { number };
            }
            Some(_) => return Belongs::Elsewhere,
        }
        Belongs::Here
    }

    /// Keeps an event until [`settle`](Self::settle).
    pub(super) fn hold(&mut self, number: u32, event: &[u8]) {
        self.held = Some((number, event.to_vec()));
    }

    /// Decides about the held event, now that one with this number has come.
    pub(super) fn settle(&mut self, number: Option<u32>) -> Option<Settled> {
        let (held, event) = self.held.take()?;
        self.counts_chunks = number.is_some() && number == held.checked_add(1);
        self.is_repeated = !self.counts_chunks;
        Some(if self.counts_chunks { Settled::Here(event) } else { Settled::Elsewhere })
    }

    /// The held event after which none came: the last chunk of a server that counts them.
    pub(super) fn last_held(&mut self) -> Option<Vec<u8>> {
        let (_, event) = self.held.take()?;
        self.counts_chunks = true;
        Some(event)
    }
}
