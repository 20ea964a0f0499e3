//! Examines the devices of this machine with one model: every device alone, and every handoff between two of them, or from
//! nodes on other machines. `baton doctor` shows whether KV can be handed over, `baton-bench backends` what it costs.
//!
//! It starts two nodes on every device. One computes prompts; the other takes their KV and generates, and its replies are
//! compared with the replies that it gives alone. All processes end with the command. `docs/backends.md` explains it.

mod compare;
mod drafters;
mod examine;
mod figures;
#[cfg(any(target_os = "macos", test))]
mod mac;
mod machine;
mod restored;
mod system;
mod verdict;

pub use self::examine::{Examination, ExaminedDraft};
pub use self::figures::{CheckpointCheck, DeviceSpeed, DrafterSpeed, Examined, ExaminedDrafter, HandoffCheck};
pub use self::machine::{Listed, Machine, chosen, findings};
pub use self::restored::RestoreCheck;
pub use self::system::{SystemFinding, SystemState, Topic};
pub use self::verdict::Verdict;
