//! The most tokens in a reply, under the names of OpenAI, llama-server and Hugging Face.

use crate::request::field::{Field, object};
use crate::request::values::{Integer, MAX_U32};
use crate::request::{InvalidRequest, notes};

/// A number of tokens. As in llama.cpp, -1 means 'until the context ends'. 0: only compute the prompt.
pub(crate) type MaxTokens = Integer<-1, MAX_U32>;

object! {
    /// The most tokens in a reply, under the names that a dialect does not have itself. The first that is given counts, after
    /// the dialect's own, which stands before this in its body. `/openapi.json` does not mention them.
    pub(crate) struct ReplyLengthBody {
        /// The most tokens in a reply. Null or -1: until the context ends. 0: only compute the prompt.
        max_completion_tokens: Field<MaxTokens>,
        /// The older name of `max_completion_tokens`, which takes precedence.
        max_tokens: Field<MaxTokens>,
        /// llama-server's name of it.
        n_predict: Field<MaxTokens>,
        /// Hugging Face's and SGLang's name of it.
        max_new_tokens: Field<MaxTokens>,
    }
}

impl ReplyLengthBody {
    /// Returns the first length that is given: `own` are the dialect's fields with their paths, in their order. The header
    /// names fields that say something else.
    pub(crate) fn check(self, own: &[(&str, Option<MaxTokens>)]) -> Result<Option<MaxTokens>, InvalidRequest> {
        // All are checked, even though only one has an effect.
        let others = [
            ("max_completion_tokens", self.max_completion_tokens.get("")?),
            ("max_tokens", self.max_tokens.get("")?),
            ("n_predict", self.n_predict.get("")?),
            ("max_new_tokens", self.max_new_tokens.get("")?),
        ];
        let mut given = own.iter().copied().chain(others).filter_map(|(field, length)| Some((field, length?)));
        let Some((_, first)) = given.next() else { return Ok(None) };
        given.filter(|(_, length)| *length != first).for_each(|(field, _)| notes::ignored(field));
        Ok(Some(first))
    }
}
