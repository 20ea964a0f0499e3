//! Starting a program at boot for the user who is set up, with systemd's user services or launchd's agents.

use std::env;
use std::fmt::Write;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use baton_proxy::log_file::older_lines;
use baton_proxy::serve::CommandFailure;
use serde::{Deserialize, Serialize};

/// A system's way to start services, with the file that describes Baton's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BootService {
    Systemd { unit: PathBuf },
    Launchd { agent: PathBuf, log: PathBuf, user: u32 },
}

/// A command line that is run, such as `systemctl --user daemon-reload`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BootCommand {
    pub args: Vec<String>,
    /// Its failure changes nothing: what it stops does not run, say.
    #[serde(default)]
    pub may_fail: bool,
}

impl BootCommand {
    pub(super) fn new(line: &str) -> BootCommand {
        BootCommand { args: line.split(' ').map(str::to_owned).collect(), may_fail: false }
    }

    fn that_may_fail(line: &str) -> BootCommand {
        BootCommand { may_fail: true, ..BootCommand::new(line) }
    }

    /// Runs it. Errors: it cannot be run, or fails and must not.
    pub(super) fn run(&self) -> Result<(), CommandFailure> {
        let Some((program, args)) = self.args.split_first() else { return Ok(()) };
        let output = Command::new(program).args(args).stdin(Stdio::null()).output();
        let problem = match output {
            Ok(output) if output.status.success() => return Ok(()),
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) if error.kind() == ErrorKind::NotFound => "there is no such program".to_owned(),
            Err(error) => error.to_string(),
        };
        match self.may_fail {
            true => Ok(()),
            false => Err(CommandFailure(format!("`{}` failed: {problem}", self.args.join(" ")))),
        }
    }
}

/// Label of launchd's agent, as in packaging/launchd.
const LABEL: &str = "net.baton.serve";

/// Seconds until launchd kills a service that was told to end. Running streams have 30, those of a node 60.
const EXIT_SECONDS: u32 = 75;

/// A shell's line that waits until launchd has no such service.
fn gone_within(service: &str, seconds: u32) -> String {
    format!("n=0; while launchctl print {service} && [ $n -lt {seconds} ]; do sleep 1; n=$((n + 1)); done")
}

impl BootService {
    /// This machine's, for the user. `None` without systemd and off macOS.
    pub(super) fn of_this_machine(home: &Path, config: &Path) -> Option<BootService> {
        if cfg!(target_os = "macos") {
            let agent = home.join(format!("Library/LaunchAgents/{LABEL}.plist"));
            let user = rustix::process::getuid().as_raw();
            return Some(BootService::Launchd { agent, log: home.join("Library/Logs/baton.log"), user });
        }
        in_path("systemctl").map(|_| BootService::Systemd { unit: config.join("systemd/user/baton.service") })
    }

    /// The file that describes the service.
    pub(super) fn file(&self) -> &Path {
        match self {
            BootService::Systemd { unit } => unit,
            BootService::Launchd { agent, .. } => agent,
        }
    }

    /// The file's text, for a command line. `reloads`: SIGHUP makes it read its configuration again.
    pub(super) fn text(&self, command: &[String], reloads: bool) -> String {
        match self {
            BootService::Systemd { .. } => unit_text(command, reloads),
            BootService::Launchd { log, .. } => agent_text(command, log),
        }
    }

    /// Returns true if it starts at boot only with lingering.
    pub(super) fn needs_lingering(&self) -> bool {
        matches!(self, BootService::Systemd { .. })
    }

    /// Starts it now and at every boot, with a new file, too.
    pub(super) fn start(&self) -> Vec<BootCommand> {
        match self {
            BootService::Systemd { .. } => vec![
                BootCommand::new("systemctl --user daemon-reload"),
                BootCommand::new("systemctl --user enable baton.service"),
                // Loading a model may take minutes.
                BootCommand::new("systemctl --user restart --no-block baton.service"),
            ],
            BootService::Launchd { agent, user, .. } => vec![
                BootCommand::that_may_fail(&format!("launchctl bootout gui/{user}/{LABEL}")),
                // It may return while replies still run, and until the service is gone no other one is taken.
                BootCommand {
                    args: ["sh", "-c", &gone_within(&format!("gui/{user}/{LABEL}"), EXIT_SECONDS)]
                        .map(str::to_owned)
                        .to_vec(),
                    may_fail: true,
                },
                BootCommand {
                    args: ["launchctl", "bootstrap", &format!("gui/{user}"), &agent.display().to_string()]
                        .map(str::to_owned)
                        .to_vec(),
                    may_fail: false,
                },
            ],
        }
    }

    /// Stops it for good; before its file is removed.
    pub(super) fn stop(&self) -> Vec<BootCommand> {
        match self {
            BootService::Systemd { .. } => {
                vec![BootCommand::that_may_fail("systemctl --user disable --now baton.service")]
            }
            BootService::Launchd { user, .. } => {
                vec![BootCommand::that_may_fail(&format!("launchctl bootout gui/{user}/{LABEL}"))]
            }
        }
    }

    /// The files that hold its log, if it has its own.
    pub(super) fn logs(&self) -> Vec<PathBuf> {
        match self {
            BootService::Systemd { .. } => Vec::new(),
            BootService::Launchd { log, .. } => vec![log.clone(), older_lines(log)],
        }
    }

    /// How its owner watches it.
    pub(super) fn watch(&self) -> String {
        match self {
            BootService::Systemd { .. } => "journalctl --user -u baton -f".to_owned(),
            BootService::Launchd { log, .. } => format!("tail -F {}", log.display()),
        }
    }
}

/// A unit of the user's systemd. packaging/systemd has those of the system's, with an own user.
fn unit_text(command: &[String], reloads: bool) -> String {
    // Between quotes, systemd replaces these three, and variables and specifiers.
    let quoted = |arg: &String| {
        let escaped = arg.replace('\\', "\\\\").replace('"', "\\\"").replace('$', "$$").replace('%', "%%");
        format!("\"{escaped}\"")
    };
    let command = command.iter().map(quoted).collect::<Vec<_>>().join(" ");
    let reload = if reloads { "ExecReload=/bin/kill -HUP $MAINPID\n" } else { "" };
    format!(
        "# Written by `baton setup`; `baton setup --remove` removes it.\n\
         [Unit]\nDescription=Baton, for language models\n\n\
         [Service]\nType=notify\nTimeoutStartSec=30min\nExecStart={command}\n{reload}\
         Restart=on-failure\nRestartSec=2\n# Running streams have 30 s to end, those of a node 60 s.\n\
         KillMode=mixed\nTimeoutStopSec=75\nLimitNOFILE=65536\n# For the usage of keys.\nStateDirectory=baton\n\n[Install]\nWantedBy=default.target\n"
    )
}

/// An agent of launchd, as packaging/launchd has one. Its program bounds the log; launchd writes there what comes before it runs.
fn agent_text(command: &[String], log: &Path) -> String {
    let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let log = log.display().to_string();
    let mut args = String::new();
    for arg in command.iter().map(String::as_str).chain(["--log-file", &log]) {
        let _ = writeln!(args, "    <string>{}</string>", escaped(arg));
    }
    let log = escaped(&log);
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\" \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">\n\
         <!-- Written by `baton setup`, which removes it, too. -->\n\
         <plist version=\"1.0\">\n<dict>\n  <key>Label</key>\n  <string>{LABEL}</string>\n\
         \x20 <key>ProgramArguments</key>\n  <array>\n{args}  </array>\n\
         \x20 <key>RunAtLoad</key>\n  <true/>\n\
         \x20 <key>KeepAlive</key>\n  <dict>\n    <key>SuccessfulExit</key>\n    <false/>\n  </dict>\n\
         \x20 <key>ExitTimeOut</key>\n  <integer>{EXIT_SECONDS}</integer>\n\
         \x20 <key>SoftResourceLimits</key>\n  <dict>\n    <key>NumberOfFiles</key>\n    <integer>10240</integer>\n  </dict>\n\
         \x20 <key>ProcessType</key>\n  <string>Interactive</string>\n\
         \x20 <key>StandardErrorPath</key>\n  <string>{log}</string>\n</dict>\n</plist>\n"
    )
}

/// A program's first place in PATH.
fn in_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_absolute() && file.is_file())
}

/// This program, by the name that stays the same when a package is upgraded: a package manager may keep each version in a folder
/// of its own and link to it.
pub(super) fn program() -> Result<PathBuf, CommandFailure> {
    let own = env::current_exe()?;
    let linked = in_path("baton").filter(|found| found.canonicalize().ok() == own.canonicalize().ok());
    Ok(linked.unwrap_or(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_units_command_keeps_spaces_quotes_and_signs() {
        let command = ["/home/a b/baton", "--model", "50%\"$HOME\\"].map(str::to_owned);
        let text = unit_text(&command, true);
        assert!(text.contains(r#"ExecStart="/home/a b/baton" "--model" "50%%\"$$HOME\\""#), "{text}");
        assert!(text.contains("ExecReload=") && !unit_text(&command, false).contains("ExecReload="), "{text}");
    }

    #[test]
    fn an_agent_that_still_runs_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        // A launchctl that knows the service for two calls, and sleeps that are noted.
        let tools = "launchctl() { echo $* >> calls; [ $(wc -l < calls) -le 2 ]; }; sleep() { echo slept >> sleeps; }";
        let run = |wait: String| {
            let line = format!("cd '{}'; {tools}; {wait}", folder.path().display());
            Command::new("sh").args(["-c", &line]).status().unwrap();
            let n_lines = |file: &str| {
                let text = std::fs::read_to_string(folder.path().join(file)).unwrap();
                text.lines().count()
            };
            (n_lines("calls"), n_lines("sleeps"))
        };
        assert_eq!(run(gone_within("gui/1/net.baton.serve", 75)), (3, 2));
        let calls = std::fs::read_to_string(folder.path().join("calls")).unwrap();
        assert!(calls.starts_with("print gui/1/net.baton.serve\n"), "{calls}");
        std::fs::write(folder.path().join("calls"), "").unwrap();
        std::fs::write(folder.path().join("sleeps"), "").unwrap();
        assert_eq!(run(gone_within("gui/1/net.baton.serve", 1)), (2, 1), "it is not waited for without end");
    }

    #[test]
    fn an_agents_arguments_are_escaped() {
        let text = agent_text(&["/a/baton".into(), "<&>".into()], Path::new("/l&l.log"));
        assert!(text.contains("<string>&lt;&amp;&gt;</string>"), "{text}");
        assert!(text.contains("<string>--log-file</string>\n    <string>/l&amp;l.log</string>\n  </array>"), "{text}");
        assert!(text.contains("<key>StandardErrorPath</key>\n  <string>/l&amp;l.log</string>"), "{text}");
    }
}
