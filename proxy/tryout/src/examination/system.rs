//! What the operating system allows Baton to do, where it can forbid something.

use serde::Serialize;

/// What a finding is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Topic {
    /// Whether programs may reach machines in the local network.
    LocalNetwork,
    /// The memory that a GPU may wire.
    WiredMemory,
    /// Whether the machine sleeps by itself.
    Sleep,
}

impl Topic {
    pub fn as_str(self) -> &'static str {
        match self {
            Topic::LocalNetwork => "local network",
            Topic::WiredMemory => "GPU memory",
            Topic::Sleep => "sleep",
        }
    }
}

/// Whether something must be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SystemState {
    Fine,
    /// The text says what to do. No failure: Baton may work all the same.
    Advice,
    /// The system does not tell.
    Unknown,
}

/// What the system says about a topic, for a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SystemFinding {
    pub topic: Topic,
    pub state: SystemState,
    pub text: String,
}

/// Made where a system can forbid something: on macOS.
#[cfg(any(target_os = "macos", test))]
impl SystemFinding {
    pub(super) fn fine(topic: Topic, text: String) -> SystemFinding {
        SystemFinding { topic, state: SystemState::Fine, text }
    }

    pub(super) fn advice(topic: Topic, text: String) -> SystemFinding {
        SystemFinding { topic, state: SystemState::Advice, text }
    }

    pub(super) fn unknown(topic: Topic, text: String) -> SystemFinding {
        SystemFinding { topic, state: SystemState::Unknown, text }
    }
}
