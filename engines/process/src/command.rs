//! How a child is started.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::OnceLock;

use baton_schemas::node::{KEY_VARIABLE, PULL_KEY_VARIABLE, STORE_SECRET_VARIABLE, WORKERS_KEY_VARIABLE};
use tokio::process::Command;

use super::called::CalledChild;
use super::child::{ChildProcess, StartFailure};

/// Variables with keys of the cluster, the endpoint and the model hub.
const SECRETS: [&str; 7] = [
    KEY_VARIABLE,
    PULL_KEY_VARIABLE,
    WORKERS_KEY_VARIABLE,
    STORE_SECRET_VARIABLE,
    "BATON_API_KEY",
    "BATON_SERVE_API_KEY",
    "HF_TOKEN",
];

/// The variable that names the format of a child's log.
pub const LOG_FORMAT_VARIABLE: &str = "BATON_LOG_FORMAT";

static LOG_FORMAT: OnceLock<&str> = OnceLock::new();

/// Lets the log of all later children of this program have this format: their lines go where this process's go.
pub fn log_children_as(format: &'static str) {
    // The first one stays.
    let _ = LOG_FORMAT.set(format);
}

static THIS_PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Remembers the file of this program, which later children run. Call it at the start: once a package has replaced the file, the
/// system names one that is gone.
pub fn remember_this_program() {
    // If the system does not say, the first child's start fails, and says why.
    let _ = this_program();
}

fn this_program() -> std::io::Result<PathBuf> {
    if let Some(known) = THIS_PROGRAM.get() {
        return Ok(known.clone());
    }
    let program = std::env::current_exe()?;
    Ok(THIS_PROGRAM.get_or_init(|| program).clone())
}

/// A program with its arguments and environment: this process's, without its secrets.
#[derive(Debug)]
pub struct ChildCommand {
    name: &'static str,
    command: Command,
}

impl ChildCommand {
    /// `name` is for messages, such as "the engine's process".
    pub fn new(name: &'static str, program: impl AsRef<OsStr>) -> ChildCommand {
        let mut command = Command::new(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        // Ctrl-C in the terminal is for this process, which may still need the child.
        command.process_group(0);
        // Only this process reports to the service manager.
        command.env_remove("NOTIFY_SOCKET");
        for secret in SECRETS {
            command.env_remove(secret);
        }
        if let Some(format) = LOG_FORMAT.get() {
            command.env(LOG_FORMAT_VARIABLE, format);
        }
        ChildCommand { name, command }
    }

    /// Another process of this program. Errors: the system does not say which program this is.
    pub fn of_this_program(name: &'static str) -> Result<ChildCommand, StartFailure> {
        let program = this_program().map_err(|error| StartFailure::Spawn { name, error })?;
        Ok(ChildCommand::new(name, program))
    }

    /// Gives the child this process's secrets, because it does this process's work.
    pub fn with_secrets(mut self) -> Self {
        for secret in SECRETS {
            if let Some(value) = std::env::var_os(secret) {
                self.command.env(secret, value);
            }
        }
        self
    }

    /// Adds arguments.
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.command.args(args);
        self
    }

    /// Sets variables.
    pub fn envs(mut self, variables: impl IntoIterator<Item = (impl AsRef<OsStr>, impl AsRef<OsStr>)>) -> Self {
        self.command.envs(variables);
        self
    }

    /// Removes a variable.
    pub fn without_env(mut self, name: &str) -> Self {
        self.command.env_remove(name);
        self
    }

    /// Gives the parent the child's standard error ([`ChildProcess::take_stderr`]), which otherwise goes where this
    /// process's goes.
    pub fn with_piped_stderr(mut self) -> Self {
        self.command.stderr(Stdio::piped());
        self
    }

    /// Starts a child. Needs a tokio runtime. Dropping the child kills it.
    pub fn spawn(&mut self) -> Result<ChildProcess, StartFailure> {
        let name = self.name;
        self.command
            .spawn()
            .and_then(|child| ChildProcess::of(name, child))
            .map_err(|error| StartFailure::Spawn { name, error })
    }

    /// Starts a child whose standard input is the other end of the returned socket, which also is its lifeline. Its
    /// standard output is discarded, its standard error goes to the log. Needs no runtime.
    pub fn spawn_called(&mut self) -> std::io::Result<(UnixStream, CalledChild)> {
        let (socket, theirs) = UnixStream::pair()?;
        let command = self.command.as_std_mut();
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
        let child = command.spawn();
        // It holds the child's end of the socket.
        command.stdin(Stdio::null());
        Ok((socket, CalledChild::of(self.name, child?)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_child_knows_no_secret_that_it_is_not_given() {
        let report = r#"printf '{"event":"failed","message":"%s","summary":"%s"}\n' "$HF_TOKEN" "$BATON_PULL_KEY""#;
        let command = ChildCommand::new("the child", "sh").args(["-c", report]);
        for secret in SECRETS {
            let set = command.command.as_std().get_envs().find(|(name, _)| *name == secret);
            assert_eq!(set, Some((secret.as_ref(), None)), "removed, whatever this process has");
        }
        let told = command.envs([(PULL_KEY_VARIABLE, "given")]).spawn().unwrap().ready().await;
        assert!(
            matches!(&told, Err(StartFailure::Refused { message, summary }) if message.is_empty() && summary == "given"),
            "{told:?}"
        );
    }
}
