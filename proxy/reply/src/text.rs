//! Turns one choice's tokens into final text, and reports the tokens of that text.

use std::collections::VecDeque;

use baton_schemas::Token;
use baton_schemas::sequence::{GeneratedToken, Logprobs};

use crate::stop::{Scan, StopScanner};
use crate::utf8::Utf8Pieces;

/// A token with its log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token; `None` from an upstream.
    pub id: Option<Token>,
    pub bytes: Vec<u8>,
    /// Its log-probability and the alternatives.
    pub logprobs: Logprobs,
}

/// The text that one token released.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TextStep {
    /// Final text: whole characters, never part of a stop string.
    pub text: String,
    /// The tokens with log-probabilities that are now completely in the released text, each reported once.
    pub tokens: Vec<TokenLogprobs>,
    /// A stop string was reached: the choice is complete, and its sequence can be dropped.
    pub stopped: bool,
}

impl TextStep {
    /// Returns true if there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty()
    }
}

/// The state of one choice's text. It depends only on the tokens fed, so a failover rebuilds it from the same tokens.
#[derive(Debug, Clone)]
pub struct ChoiceText {
    utf8: Utf8Pieces,
    stop: StopScanner,
    /// Bytes of text decoded so far, held or released.
    n_decoded: usize,
    /// Bytes of text released so far.
    n_released: usize,
    /// Tokens with log-probabilities that are not reported yet, oldest first.
    waiting: VecDeque<WaitingToken>,
    /// Control tokens whose spelling becomes text, because the parser of calls needs it.
    markers: Vec<&'static str>,
    lists_control: bool,
}

/// A token and its place in the decoded text, in bytes.
#[derive(Debug, Clone)]
struct WaitingToken {
    /// The start of the character that contains its first byte.
    start: usize,
    /// The number of released bytes that includes its last byte. Characters are released whole, so one byte past the
    /// start of an unfinished character stands for all of it.
    end: usize,
    token: TokenLogprobs,
}

impl ChoiceText {
    /// An empty text that will end before the earliest of `stops`.
    pub fn new(stops: Vec<String>) -> Self {
        ChoiceText {
            utf8: Utf8Pieces::default(),
            stop: StopScanner::new(stops),
            n_decoded: 0,
            n_released: 0,
            waiting: VecDeque::new(),
            markers: Vec::new(),
            lists_control: false,
        }
    }

    /// Makes the spelling of these control tokens text.
    pub fn with_markers(self, markers: Vec<&'static str>) -> Self {
        ChoiceText { markers, ..self }
    }

    /// Reports control tokens, too. They have no text.
    pub fn with_control_tokens(self) -> Self {
        ChoiceText { lists_control: true, ..self }
    }

    /// Takes the next token. Control tokens have no text and are not reported, unless
    /// [`with_control_tokens`](ChoiceText::with_control_tokens) says so. Releases nothing after a stop.
    pub fn feed(&mut self, token: GeneratedToken) -> TextStep {
        if token.special && !self.markers.iter().any(|marker| marker.as_bytes() == token.bytes) {
            if let Some(logprobs) = token.logprobs.filter(|_| self.lists_control) {
                let token = TokenLogprobs { id: Some(token.id), bytes: token.bytes, logprobs };
                self.waiting.push_back(WaitingToken { start: self.n_decoded, end: self.n_decoded, token });
                return self.release(Scan::default());
            }
            return TextStep::default();
        }
        let start = self.start_of(&token.bytes);
        let report = |logprobs| TokenLogprobs { id: Some(token.id), bytes: token.bytes.clone(), logprobs };
        let reported = token.logprobs.map(report);
        let text = self.utf8.feed(token.bytes);
        self.n_decoded += text.len();
        if let Some(token) = reported {
            let end = self.n_decoded + usize::from(self.utf8.is_mid_character());
            self.waiting.push_back(WaitingToken { start, end, token });
        }
        let scan = self.stop.feed(text);
        self.release(scan)
    }

    /// Ends the text where the sequence ended, and releases everything held back.
    pub fn finish(&mut self) -> TextStep {
        let tail = self.utf8.finish();
        self.n_decoded += tail.len();
        let mut scan = self.stop.feed(tail);
        if !scan.stopped {
            let rest = self.stop.finish();
            scan = Scan { text: scan.text + &rest.text, stopped: rest.stopped };
        }
        let mut step = self.release(scan);
        step.tokens.extend(self.waiting.drain(..).map(|waiting| waiting.token));
        step
    }

    /// The stop string that ended the text, if one did.
    pub fn stop_string(&self) -> Option<String> {
        self.stop.reached().map(str::to_owned)
    }

    /// The start of the character that the first of the next bytes belongs to.
    fn start_of(&self, bytes: &[u8]) -> usize {
        match bytes.first() {
            // The held back character becomes U+FFFD, and the bytes begin after it.
            Some(&first) if self.utf8.is_mid_character() && !self.utf8.is_continued_by(first) => {
                self.n_decoded + char::REPLACEMENT_CHARACTER.len_utf8()
            }
            _ => self.n_decoded,
        }
    }

    fn release(&mut self, scan: Scan) -> TextStep {
        self.n_released += scan.text.len();
        let mut tokens = Vec::new();
        // At a stop, also report a token that reaches into the stop string, because its beginning is in the text.
        while let Some(first) = self.waiting.front()
            && (first.end <= self.n_released || scan.stopped && first.start < self.n_released)
        {
            tokens.extend(self.waiting.pop_front().map(|waiting| waiting.token));
        }
        if scan.stopped {
            self.waiting.clear();
        }
        TextStep { text: scan.text, tokens, stopped: scan.stopped }
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::sequence::Logprobs;
    use proptest::prelude::*;

    use super::*;

    fn token(bytes: &[u8]) -> GeneratedToken {
        let logprobs = Some(Logprobs { chosen: -0.5, rank: None, top: Vec::new() });
        GeneratedToken { id: 0, bytes: bytes.to_vec(), special: false, logprobs, drafts: None }
    }

    /// Text and tokens of each step and of the end, as `text [token token]`, with `|` where it stopped.
    fn steps(stops: &[&str], pieces: &[&[u8]]) -> Vec<String> {
        let mut text = ChoiceText::new(stops.iter().map(ToString::to_string).collect());
        let mut steps: Vec<TextStep> = pieces.iter().map(|piece| text.feed(token(piece))).collect();
        steps.push(text.finish());
        steps.iter().map(show).collect()
    }

    fn show(step: &TextStep) -> String {
        let tokens: Vec<String> = step.tokens.iter().map(|token| token.bytes.escape_ascii().to_string()).collect();
        format!("{} [{}]{}", step.text, tokens.join(" "), if step.stopped { "|" } else { "" })
    }

    #[test]
    fn a_token_is_reported_with_its_last_byte() {
        assert_eq!(steps(&[], &[b"Hi", b" you"]), ["Hi [Hi]", " you [ you]", " []"]);
        assert_eq!(steps(&[], &[b"a\xC3", b"\xA9b"]), ["a []", "éb [a\\xc3 \\xa9b]", " []"]);
        assert_eq!(steps(&["STOP"], &[b"go ST", b"ART"]), ["go  []", "START [go ST ART]", " []"]);
    }

    #[test]
    fn tokens_of_the_stop_string_are_dropped_and_a_token_before_it_is_not() {
        assert_eq!(steps(&["STOP"], &[b"go", b" ST", b"OP", b"!"]), ["go [go]", "  []", " [ ST]|", " []|", " []|"]);
        assert_eq!(steps(&["\n"], &[b"go", b"\n"]), ["go [go]", " []|", " []|"]);
    }

    #[test]
    fn everything_is_released_at_the_end() {
        assert_eq!(steps(&["STOP"], &[b"go ST"]), ["go  []", "ST [go ST]"]);
        assert_eq!(steps(&[], &[b"a\xF0\x9F"]), ["a []", "\u{FFFD} [a\\xf0\\x9f]"]);
        // A stop string that ends in what the broken character becomes.
        assert_eq!(steps(&["x\u{FFFD}"], &[b"a", b"x", b"\xF0"]), ["a [a]", " []", " []", " []|"]);
    }

    #[test]
    fn a_token_without_text_comes_with_its_neighbours() {
        assert_eq!(steps(&[], &[b"a", b"", b"b"]), ["a [a]", " []", "b [b]", " []"]);
    }

    #[test]
    fn control_tokens_have_no_text() {
        let mut text = ChoiceText::new(vec!["end".into()]);
        let control = GeneratedToken { special: true, ..token(b"<|im_end|>") };
        assert_eq!(text.feed(control), TextStep::default());
        assert_eq!(show(&text.feed(token(b"ok"))), "ok [ok]");
        let silent = GeneratedToken { logprobs: None, ..token(b"!") };
        assert_eq!(show(&text.feed(silent)), "! []");
    }

    proptest! {
        #[test]
        fn however_the_bytes_are_cut_the_text_is_the_same_and_its_tokens_cover_it(
            chunks in prop::collection::vec(
                prop::sample::select(vec!["a".as_bytes(), b"b", "é".as_bytes(), "😀".as_bytes(), b"\xFF", b"\xF0"]),
                0..24,
            ),
            stops in prop::collection::vec("[ab]{0,2}[abé😀\u{FFFD}]{1,2}", 0..3),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let bytes = chunks.concat();
            let whole = String::from_utf8_lossy(&bytes);
            let end = stops.iter().filter_map(|stop| whole.find(stop.as_str())).min();

            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let mut text = ChoiceText::new(stops);
            let mut out = TextStep::default();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            let mut steps: Vec<TextStep> = Vec::new();
            for piece in &pieces {
                steps.push(text.feed(token(piece)));
            }
            steps.push(text.finish());
            for step in steps {
                out.text += &step.text;
                out.tokens.extend(step.tokens);
                out.stopped |= step.stopped;
            }

            prop_assert_eq!(&out.text, &whole[..end.unwrap_or(whole.len())]);
            prop_assert_eq!(out.stopped, end.is_some());
            let reported: Vec<&[u8]> = out.tokens.iter().map(|token| token.bytes.as_slice()).collect();
            prop_assert_eq!(&reported[..], &pieces[..reported.len()], "tokens are reported once, in order");
            let covered = String::from_utf8_lossy(&reported.concat()).into_owned();
            if end.is_none() {
                prop_assert_eq!(reported.len(), pieces.len());
            } else {
                // All of the text is covered, and no token lies wholly at or after the stop.
                prop_assert!(covered.starts_with(&out.text));
                if let Some((last, before)) = reported.split_last() && !last.is_empty() {
                    prop_assert!(!String::from_utf8_lossy(&before.concat()).starts_with(&out.text) || out.text.is_empty());
                }
            }
        }
    }
}
