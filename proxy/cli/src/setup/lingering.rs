//! Lingering: systemd runs a user's services from boot on, also while nobody is logged in.

use std::process::{Command, Stdio};

use super::boot::BootCommand;

/// Turns it on for the user who is set up.
pub(super) fn on() -> BootCommand {
    BootCommand::new("loginctl enable-linger")
}

/// Turns it off.
pub(super) fn off() -> BootCommand {
    BootCommand::new("loginctl disable-linger")
}

/// Returns true if it is on. Without a login, systemd knows a user only by it.
pub(super) fn is_on() -> bool {
    let user = rustix::process::getuid().as_raw().to_string();
    let asked = Command::new("loginctl").args(["show-user", &user, "--property=Linger"]).stdin(Stdio::null()).output();
    asked.is_ok_and(|answer| answer.stdout.starts_with(b"Linger=yes"))
}
