//! OpenAI's JSON.
