//! Every option of an engine, declared once in `table`: its key, type, range, default and help, the engines that have it,
//! and whether it changes a model's identity.
//!
//! From the declaration come [`WrittenOptions`] (what an operator writes: keys of the configuration file, flags, and the JSON
//! that the endpoint gives its child), [`EngineOptions`] (what an engine receives), and [`DECLARED`], from which the endpoint
//! makes its flags, its checks and the table in `docs/configuration.md`. `docs/option-walk.md` follows one option.

mod combined;
mod declared;
mod defaults;
mod kind;
mod kv_store;
mod sim;
mod table;
mod value;

pub use self::declared::{HelpGroup, HelpLength, ShownDefault};
pub(crate) use self::kind::engines;
#[cfg(feature = "llama")]
pub(crate) use self::kind::scratch_sequences;
pub use self::kind::{EngineKind, HeaderError};
pub use self::kv_store::{KvStoreOptions, StoreSecret};
pub use self::sim::{ABORT_VARIABLE, SimAbort, SimMachine, SimWork};
pub use self::table::{DECLARED, DeclaredOption, EngineOptions, WrittenOptions};
pub use self::value::{PossibleWord, ValueForm};
