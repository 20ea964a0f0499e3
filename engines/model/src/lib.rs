//! A model before it is computed: what its files say, and the options that change it.
//!
//! Everything here is read without llama.cpp or any other engine, so a damaged file costs an error and not a process.
//! Engines ask this crate for a model's shape, tokens and template; commands ask it for names and sizes.
//!
//! ```
//! use baton_model::gguf::{Gguf, GgufError};
//!
//! let missing = Gguf::open("no/such/model.gguf");
//! assert!(matches!(missing, Err(GgufError::NotFound { .. })));
//! ```
//!
//! Rooms in reading order:
//!
//! | room | what it has |
//! |---|---|
//! | [`gguf`] | headers of GGUF files, split models, their identity, the memory that a model needs; a writer |
//! | [`hf`] | folders of safetensors, described like GGUF files |
//! | [`files`] | the files of a model, their size, and samples of their tensors |
//! | [`vocabulary`] | a model's tokens, and text to tokens, as llama.cpp does both |
//! | [`template`] | chat templates, and what they may do |
//! | [`options`] | options whose values have a form of their own |
//! | [`limits`] | the valid ranges and the defaults of options |
//!
//! No I/O but reading files, no threads, no runtime. Of Baton it uses only `baton-schemas`.

pub mod files;
pub mod gguf;
pub mod hf;
pub mod limits;
pub mod options;
pub mod template;
pub mod vocabulary;
