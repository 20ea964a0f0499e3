//! The most tokens in a reply, under the names of OpenAI, llama-server and Hugging Face.

use crate::request::InvalidRequest;
use crate::request::field::{Field, object};
use crate::request::values::{Integer, MAX_U32};

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
    pub(crate) fn check(self) -> Result<Option<MaxTokens>, InvalidRequest> {
        // All are checked, even though only one has an effect.
        let others = [self.max_tokens.get("")?, self.n_predict.get("")?, self.max_new_tokens.get("")?];
        Ok(self.max_completion_tokens.get("")?.or_else(|| others.into_iter().flatten().next()))
    }
}
