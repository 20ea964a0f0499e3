//! Finds stop strings in text that arrives in pieces.

/// The text that one piece released.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scan {
    /// Text that is not part of a stop string.
    pub text: String,
    /// A stop string follows `text`; it and everything after it was dropped.
    pub stopped: bool,
}

/// Ends a text before the stop string that *starts* earliest. The result does not depend on how the text is cut into
/// pieces.
///
/// It holds back only a tail that is the beginning of a stop string. If a complete stop string lies inside such a tail,
/// the text is held until it is clear which of the two ends it.
#[derive(Debug, Clone)]
pub struct StopScanner {
    stops: Vec<String>,
    /// The tail that may become a stop string. It is shorter than the longest stop string, unless it holds a complete one
    /// that waits for an earlier one.
    held: String,
    stopped: bool,
    /// The stop string that ended the text.
    reached: Option<String>,
}

impl StopScanner {
    /// Creates a scanner. Ignores empty stop strings, which would end every text at its start.
    pub fn new(stops: Vec<String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        StopScanner { stops, held: String::new(), stopped: false, reached: None }
    }

    /// Takes the next piece and releases the text that can no longer become part of a stop string. Releases nothing after
    /// a stop.
    pub fn feed(&mut self, piece: String) -> Scan {
        if self.stopped {
            return Scan { text: String::new(), stopped: true };
        }
        if self.held.is_empty() {
            self.held = piece;
        } else {
            self.held.push_str(&piece);
        }
        let Some((start, found)) = self.first(|rest, stop| {
            if rest.starts_with(stop) { Some(Found::Whole) } else { stop.starts_with(rest).then_some(Found::Beginning) }
        }) else {
            return Scan { text: std::mem::take(&mut self.held), stopped: false };
        };
        self.stopped = found == Found::Whole;
        self.cut(start)
    }

    /// The stop string that ended the text; the longest, if several begin there.
    pub fn reached(&self) -> Option<&str> {
        self.reached.as_deref()
    }

    /// Ends the text. Releases the held text, up to a complete stop string that waited for an earlier one.
    pub fn finish(&mut self) -> Scan {
        if self.stopped {
            return Scan { text: String::new(), stopped: true };
        }
        let whole = self.first(|rest, stop| rest.starts_with(stop).then_some(()));
        self.stopped = whole.is_some();
        let start = whole.map_or(self.held.len(), |(start, ())| start);
        self.cut(start)
    }

    /// Releases the held text before `start`. Drops the rest after a stop.
    fn cut(&mut self, start: usize) -> Scan {
        let rest = self.held.split_off(start);
        let text = std::mem::replace(&mut self.held, rest);
        if self.stopped {
            let there = self.stops.iter().filter(|stop| self.held.starts_with(stop.as_str()));
            self.reached = there.max_by_key(|stop| stop.len()).cloned();
            self.held.clear();
        }
        Scan { text, stopped: self.stopped }
    }

    /// The first byte offset in the held text at which `test` matches a stop string, with the best match there.
    fn first<T: Ord>(&self, test: impl Fn(&str, &str) -> Option<T>) -> Option<(usize, T)> {
        self.held.char_indices().find_map(|(start, _)| {
            let rest = &self.held[start..];
            self.stops.iter().filter_map(|stop| test(rest, stop)).max().map(|found| (start, found))
        })
    }
}

/// A match at one place. A whole stop string outranks the beginning of a longer one, because both cut at this place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Beginning,
    Whole,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What comes out per piece and at the end, with `|` where it stopped.
    fn scan(stops: &[&str], pieces: &[&str]) -> Vec<String> {
        let mut scanner = StopScanner::new(stops.iter().map(ToString::to_string).collect());
        let mut scans: Vec<Scan> = pieces.iter().map(|piece| scanner.feed((*piece).to_owned())).collect();
        scans.push(scanner.finish());
        scans.into_iter().map(|scan| scan.text + if scan.stopped { "|" } else { "" }).collect()
    }

    #[test]
    fn a_stop_string_across_pieces_never_shows_in_part() {
        assert_eq!(scan(&["STOP"], &["ab S", "TO", "P cd"]), ["ab ", "", "|", "|"]);
        assert_eq!(scan(&["</s>"], &["x<", "/", "s", ">y", "z"]), ["x", "", "", "|", "|", "|"]);
    }

    #[test]
    fn text_that_did_not_become_a_stop_string_is_released() {
        assert_eq!(scan(&["STOP"], &["a ST", "ART"]), ["a ", "START", ""]);
        assert_eq!(scan(&["STOP"], &["a ST"]), ["a ", "ST"]);
        // The beginning moves on within the held text.
        assert_eq!(scan(&["aab"], &["a", "a", "a", "b"]), ["", "", "a", "|", "|"]);
    }

    #[test]
    fn nothing_is_held_without_a_beginning_of_a_stop_string() {
        assert_eq!(scan(&["STOP"], &["hello", " world"]), ["hello", " world", ""]);
        assert_eq!(scan(&[], &["hello"]), ["hello", ""]);
        assert_eq!(scan(&[""], &["hello"]), ["hello", ""]);
    }

    #[test]
    fn the_match_that_starts_earliest_wins() {
        assert_eq!(scan(&["bc", "abcd"], &["xabc", "d"]), ["x", "|", "|"]);
        assert_eq!(scan(&["bc", "abcd"], &["xabc", "e"]), ["x", "a|", "|"]);
        // The text ends before the earlier one is complete.
        assert_eq!(scan(&["bc", "abcd"], &["xabc"]), ["x", "a|"]);
        assert_eq!(scan(&["ab", "abcd"], &["xabc"]), ["x|", "|"]);
    }

    #[test]
    fn wide_characters_are_not_cut() {
        assert_eq!(scan(&["é!"], &["caf", "é", "é", "!"]), ["caf", "", "é", "|", "|"]);
    }

    proptest! {
        #[test]
        fn however_the_text_is_cut_it_ends_at_the_earliest_match(
            text in "[abé]{0,24}",
            stops in prop::collection::vec("[abé]{1,5}", 0..4),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
        ) {
            let boundaries: Vec<usize> = (0..=text.len()).filter(|at| text.is_char_boundary(*at)).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| *cut.get(&boundaries)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();

            let end = stops.iter().filter_map(|stop| text.find(stop.as_str())).min();
            let mut scanner = StopScanner::new(stops.clone());
            let mut out = String::new();
            for pair in cuts.windows(2) {
                out += &scanner.feed(text[pair[0]..pair[1]].to_owned()).text;
                // What is out is final, and what is held may still become a stop string.
                prop_assert!(text[..end.unwrap_or(text.len())].starts_with(&out));
                let longest = stops.iter().map(String::len).max().unwrap_or(0);
                prop_assert!(scanner.stopped || pair[1] - out.len() < longest.max(1));
            }
            let last = scanner.finish();
            prop_assert_eq!(last.stopped, end.is_some());
            prop_assert_eq!(out + &last.text, &text[..end.unwrap_or(text.len())]);
        }
    }
}
