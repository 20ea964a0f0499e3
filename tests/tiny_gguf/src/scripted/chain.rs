//! The tokens of a script, and which follows which.
//!
//! A token of text stands in one place of the script, so it determines the next. A control or user-defined token may stand
//! in several; there, it and the last token before it that stands in one place determine the next.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use baton_model::gguf::byte_level::spelled;

use super::{Script, Tokenizer};
use crate::tokenizer::{TokenType, byte_pair_tokens};

/// The longest run of tokens that stand in several places. The model's attention finds the token before it.
const MAX_RUN: usize = 5;

/// What determines the next token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct State {
    /// The last token.
    pub(super) last: usize,
    /// The last token that stands in one place only.
    pub(super) anchor: usize,
}

pub(super) struct Chain {
    /// The vocabulary.
    pub(super) tokens: Vec<(String, TokenType)>,
    /// Tokens that may stand in several places.
    pub(super) shared: BTreeSet<usize>,
    pub(super) next: BTreeMap<State, usize>,
    /// The states in which a reply is complete.
    pub(super) ends: BTreeSet<State>,
    ids: HashMap<String, usize>,
    is_sentence_piece: bool,
}

impl Chain {
    pub(super) fn of(script: &Script) -> Self {
        let is_sentence_piece = script.tokenizer == Tokenizer::SentencePiece;
        let tokens = match is_sentence_piece {
            true => {
                let bytes = (0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), TokenType::Byte));
                // The sign stands for a space.
                let others = [("<unk>".to_owned(), TokenType::Unknown), ("\u{2581}".to_owned(), TokenType::Normal)];
                others.into_iter().chain(bytes).collect()
            }
            false => byte_pair_tokens(),
        };
        let mut chain = Chain {
            tokens: Vec::new(),
            shared: BTreeSet::new(),
            next: BTreeMap::new(),
            ends: BTreeSet::new(),
            ids: HashMap::new(),
            is_sentence_piece,
        };
        let user_defined = script.user_defined.iter().map(|text| (text.clone(), TokenType::UserDefined));
        let special: Vec<_> = script.control_tokens().chain(user_defined).collect();
        for (text, kind) in tokens.into_iter().chain(special.iter().cloned()) {
            if !chain.ids.contains_key(&text) {
                chain.add(text, kind);
            }
        }
        let special: HashSet<&str> = special.iter().map(|(text, _)| text.as_str()).collect();
        let replies: Vec<(usize, Vec<usize>)> = script
            .replies
            .iter()
            .map(|reply| {
                let after = chain.last_of_prompt(&reply.after);
                let pieces = reply.pieces.iter().filter(|piece| !piece.is_empty());
                (after, pieces.flat_map(|piece| chain.tokens_of(piece, &special)).collect())
            })
            .collect();
        for (after, reply) in &replies {
            let text = &chain.tokens[*after].0;
            assert!(!chain.shared.contains(after), "the prompt's last token {text:?} is also in a reply");
            chain.link(*after, reply);
        }
        let open = chain.ends.iter().find(|state| chain.next.contains_key(state));
        assert!(open.is_none(), "a reply ends with tokens that another one goes on after: put text between them");
        chain
    }

    /// The token with this spelling.
    pub(super) fn id_of(&self, spelling: &str) -> usize {
        *self.ids.get(spelling).unwrap_or_else(|| panic!("there is no token {spelling:?}"))
    }

    fn add(&mut self, text: String, kind: TokenType) -> usize {
        let id = self.tokens.len();
        assert!(self.ids.insert(text.clone(), id).is_none(), "the token {text:?} is there already");
        self.tokens.push((text, kind));
        id
    }

    /// The token with which a prompt ends that ends with this text.
    fn last_of_prompt(&self, text: &str) -> usize {
        match *text.as_bytes() {
            [byte] if self.is_sentence_piece => self.id_of(&format!("<0x{byte:02X}>")),
            [byte] => self.id_of(&spelled(byte).to_string()),
            _ => self.id_of(text),
        }
    }

    /// The tokens of a piece of a reply.
    fn tokens_of(&mut self, piece: &str, special: &HashSet<&str>) -> Vec<usize> {
        if special.contains(piece) {
            let id = self.id_of(piece);
            self.shared.insert(id);
            return vec![id];
        }
        let mut tokens = Vec::new();
        let mut rest = piece.as_bytes();
        while let [first, more @ ..] = rest {
            // Only whole characters can be the text of a token.
            if let Ok(text) = std::str::from_utf8(rest)
                && !more.is_empty()
            {
                // A normal token is found in no prompt, as no merges lead to it. SentencePiece needs none.
                let (spelling, kind) = match self.is_sentence_piece {
                    true => (text.to_owned(), TokenType::UserDefined),
                    false => (rest.iter().map(|byte| spelled(*byte)).collect(), TokenType::Normal),
                };
                if !self.ids.contains_key(&spelling) {
                    tokens.push(self.add(spelling, kind));
                    break;
                }
            }
            // llama.cpp reads only the two digits.
            let id = self.tokens.len();
            tokens.push(self.add(format!("<0x{first:02X}>#{id}"), TokenType::Byte));
            rest = more;
        }
        tokens
    }

    fn link(&mut self, after: usize, reply: &[usize]) {
        let mut state = State { last: after, anchor: after };
        let mut run = 0;
        for &token in reply {
            let text = &self.tokens[token].0;
            let earlier = self.next.insert(state, token).filter(|earlier| *earlier != token);
            assert!(
                earlier.is_none(),
                "{text:?} follows tokens that are followed by another one elsewhere: put text between them"
            );
            let is_shared = self.shared.contains(&token);
            run = if is_shared { run + 1 } else { 0 };
            assert!(
                run <= MAX_RUN,
                "{text:?} is the last of more than {MAX_RUN} control tokens: put text between them"
            );
            state = State { last: token, anchor: if is_shared { state.anchor } else { token } };
        }
        self.ends.insert(state);
    }
}
