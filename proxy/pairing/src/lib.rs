//! Pairing: makes machines share one cluster key and certificates, with a short code that an owner reads off one machine
//! and types on the others. `baton pair` uses it; `docs/security.md` explains it.
//!
//! The first machine shows a code ([`PairingSession`]), each other one [`join`]s. Both run SPAKE2 with the code
//! (`exchange.rs`), so that a man in the middle learns nothing and can try one code with each run. `attempts.rs` counts
//! these runs before they are computed. Each machine makes its own TLS key, and the first machine's certificate
//! [`authority`] signs it. All pin that authority, so every machine trusts every other, at any address.
//! [`ClusterFolder`] stores what a machine has.

mod code;
mod error;
pub mod mac_address;
mod wire;

mod attempts;
mod exchange;

pub mod authority;
mod membership;

mod folder;

mod join;
mod session;

mod arrived;

#[doc(hidden)]
pub use self::arrived::{read_record, records};
pub use self::code::{CODE_LIFETIME, CodeError, MAX_FAILED_ATTEMPTS, PairingCode};
pub use self::error::{PairingError, PairingRefusal};
pub use self::folder::{ClusterFolder, FOLDER_VARIABLE};
pub use self::join::{Joiner, join};
pub use self::membership::{About, MachineName, Membership};
pub use self::session::{EndReason, JoinedMachine, PairingEnd, PairingEvent, PairingSession};

/// The port on which a machine that shows a code listens.
pub const DEFAULT_PORT: u16 = 9010;
