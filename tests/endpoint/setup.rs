//! `baton setup` makes services and undoes them; `baton` alone says what this machine is. With a systemd that only takes notes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use harness::{BATON, Terminal};

/// A home folder, and tools that note their calls. Lingering is on while there is a file `lingers`, and cannot be changed while there is
/// a file `refuses`.
struct Home {
    folder: tempfile::TempDir,
}

impl Home {
    fn new() -> Home {
        let folder = tempfile::tempdir().unwrap();
        let tools = folder.path().join("tools");
        fs::create_dir_all(&tools).unwrap();
        fs::create_dir(folder.path().join("home")).unwrap();
        let lingering = "case $1 in\nshow-user) [ ! -e lingers ] || echo Linger=yes ;;\n\
                         *) [ ! -e refuses ] || { echo not allowed >&2; exit 1; } ;;\nesac\n\
                         case $1 in enable-linger) touch lingers ;; disable-linger) rm lingers ;; esac\n";
        for (tool, does) in [("systemctl", ""), ("loginctl", lingering)] {
            let at = folder.path().display();
            let note = format!("#!/bin/sh\ncd '{at}' && echo {tool} \"$*\" >> calls\n{does}");
            fs::write(tools.join(tool), note).unwrap();
            fs::set_permissions(tools.join(tool), fs::Permissions::from_mode(0o755)).unwrap();
        }
        Home { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("home")
    }

    fn variables(&self) -> Vec<(&'static str, String)> {
        let tools = format!("{}:/usr/bin:/bin", self.folder.path().join("tools").display());
        vec![("HOME", self.path().display().to_string()), ("PATH", tools)]
    }

    fn baton(&self, args: &[&str]) -> Output {
        let mut command = Command::new(&*BATON);
        command.args(args).envs(self.variables());
        for name in ["XDG_CONFIG_HOME", "XDG_CACHE_HOME", "BATON_CLUSTER_FOLDER", "BATON_CLUSTER_KEY", "BATON_CACHE"] {
            command.env_remove(name);
        }
        command.output().unwrap()
    }

    /// What a successful command prints.
    fn prints(&self, args: &[&str]) -> String {
        let output = self.baton(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Makes a file that the tools look for.
    fn has(&self, name: &str) {
        fs::write(self.folder.path().join(name), "").unwrap();
    }

    /// The tools' calls since the last time that change something.
    fn calls(&self) -> Vec<String> {
        let path = self.folder.path().join("calls");
        let calls = fs::read_to_string(&path).unwrap_or_default();
        let _ = fs::remove_file(path);
        calls.lines().filter(|call| !call.contains("show-user")).map(str::to_owned).collect()
    }

    /// All files and folders, by their path in the home folder.
    fn all(&self) -> Vec<String> {
        fn below(folder: &Path, home: &Path, found: &mut Vec<String>) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                found.push(path.strip_prefix(home).unwrap().display().to_string());
                if path.is_dir() {
                    below(&path, home, found);
                }
            }
        }
        let mut found = Vec::new();
        below(&self.path(), &self.path(), &mut found);
        found.sort();
        found
    }
}

const CONFIG: &str = ".config/baton/baton.toml";
const UNIT: &str = ".config/systemd/user/baton.service";
const START: [&str; 4] = [
    "systemctl --user daemon-reload",
    "systemctl --user enable baton.service",
    "systemctl --user restart --no-block baton.service",
    "loginctl enable-linger",
];
const STOP: [&str; 2] = ["systemctl --user disable --now baton.service", "loginctl disable-linger"];

#[test]
fn a_service_is_set_up_again_without_change_and_removed_without_a_trace() {
    let home = Home::new();
    let setup = ["setup", "--yes", "--service", "on"];
    home.prints(&setup);
    assert_eq!(home.calls(), START);
    let unit = fs::read_to_string(home.path().join(UNIT)).unwrap();
    let config = home.path().join(CONFIG);
    assert!(unit.contains(&format!("\"serve\" \"--config\" \"{}\"", config.display())), "{unit}");
    assert!(home.baton(&["check-config", config.to_str().unwrap()]).status.success());
    let made = home.all();
    home.prints(&setup);
    assert_eq!((home.all(), fs::read_to_string(home.path().join(UNIT)).unwrap()), (made, unit));
    home.calls();
    let said = home.prints(&["setup", "--yes", "--remove"]);
    assert!(STOP.iter().all(|stop| said.contains(stop)) && said.contains(CONFIG), "{said}");
    assert_eq!((home.calls(), home.all()), (STOP.map(str::to_owned).to_vec(), Vec::new()));
    assert!(home.prints(&["setup", "--yes", "--remove"]).contains("has made nothing"));
}

#[test]
fn folders_and_lingering_that_were_there_before_stay() {
    let home = Home::new();
    home.has("lingers");
    let folders = [".config", ".config/systemd", ".config/systemd/user"].map(str::to_owned);
    fs::create_dir_all(home.path().join(&folders[2])).unwrap();
    let said = home.prints(&["setup", "--yes", "--service", "on"]);
    assert_eq!(
        (home.calls(), said.contains("linger")),
        (START[..3].iter().map(|call| (*call).to_owned()).collect(), false)
    );
    home.prints(&["setup", "--yes", "--remove"]);
    assert_eq!((home.calls(), home.all()), (vec![STOP[0].to_owned()], folders.to_vec()));
}

#[test]
fn lingering_that_cannot_be_turned_on_or_off_is_named() {
    let home = Home::new();
    home.has("refuses");
    let said = home.prints(&["setup", "--yes", "--service", "on"]);
    assert!(said.contains("only when you log in: `loginctl enable-linger` failed: not allowed"), "{said}");
    home.calls();
    home.prints(&["setup", "--yes", "--remove"]);
    assert_eq!(home.calls(), STOP[..1], "it was not turned on");

    fs::remove_file(home.folder.path().join("refuses")).unwrap();
    home.prints(&["setup", "--yes", "--service", "on"]);
    home.has("refuses");
    let said = home.prints(&["setup", "--yes", "--remove"]);
    assert!(said.contains("Lingering stays on: `loginctl disable-linger` failed: not allowed"), "{said}");
    assert!(home.all().is_empty(), "everything else goes");
}

#[test]
fn a_configuration_that_its_owner_wrote_or_changed_is_kept() {
    let home = Home::new();
    let config = home.path().join(CONFIG);
    fs::create_dir_all(config.parent().unwrap()).unwrap();
    fs::write(&config, "# mine\n").unwrap();
    assert!(home.prints(&["setup", "--yes", "--model", "other"]).contains("keep"));
    home.prints(&["setup", "--yes", "--remove"]);
    assert_eq!(fs::read_to_string(&config).unwrap(), "# mine\n");

    fs::remove_file(&config).unwrap();
    home.prints(&["setup", "--yes"]);
    let changed = fs::read_to_string(&config).unwrap() + "# and mine\n";
    fs::write(&config, &changed).unwrap();
    home.prints(&["setup", "--yes", "--model", "other"]);
    let said = home.prints(&["setup", "--yes", "--remove"]);
    assert!(said.contains("was changed since"), "{said}");
    assert_eq!(fs::read_to_string(&config).unwrap(), changed);
}

#[test]
fn a_setup_without_a_service_stops_the_one_before() {
    let home = Home::new();
    home.prints(&["setup", "--yes", "--service", "on"]);
    home.calls();
    home.prints(&["setup", "--yes", "--service", "off"]);
    assert_eq!(home.calls(), STOP);
    home.prints(&["setup", "--yes", "--remove"]);
    assert!(home.calls().is_empty(), "it is stopped once");
}

#[test]
fn nothing_is_done_without_a_yes() {
    let home = Home::new();
    let output = home.baton(&["setup"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("--yes"), "{error}");
    // A node without a key would be refused when it starts.
    assert!(!home.baton(&["setup", "--yes", "--role", "prefill"]).status.success());
    let variables = home.variables();
    let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let terminal = Terminal::start(&["setup", "--model", "smollm2", "--service", "on", "--adopt", "off"], &variables);
    terminal.shows("endpoint, prefill, decode or worker [endpoint]: ", 1);
    terminal.types("endpoint\r");
    terminal.shows("Pair it with other machines?", 1);
    terminal.types("no\r");
    terminal.shows(CONFIG, 1);
    terminal.shows("Do this? [no]: ", 1);
    terminal.types("\r");
    terminal.shows("nothing was changed", 1);
    assert_eq!((home.all(), home.calls()), (Vec::new(), Vec::new()));
}

#[test]
fn no_service_is_proposed_where_nothing_starts_services() {
    let home = Home::new();
    let folder = home.path().display().to_string();
    let flags = ["setup", "--role", "endpoint", "--model", "smollm2", "--pair", "no", "--adopt", "off"];
    // Without systemctl, as in a container.
    let mut terminal = Terminal::start(&flags, &[("HOME", &folder), ("PATH", "/nowhere")]);
    terminal.shows("Do this? [no]: ", 1);
    assert!(!terminal.shown().contains("boot"), "{}", terminal.shown());
    terminal.types("yes\r");
    assert!(terminal.ends().success(), "{}", terminal.shown());
    assert!(home.path().join(CONFIG).is_file());
}

/// Servers of other programs are looked for at the ports that these use, so this needs one of them free.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_runs_here_is_offered_and_used_after_a_yes() {
    const PORTS: std::ops::RangeInclusive<u16> = 8081..=8085;
    let Some(listener) = PORTS.rev().find_map(|port| std::net::TcpListener::bind(("127.0.0.1", port)).ok()) else {
        return harness::skip("all of the ports 8081 to 8085 are in use, so no server can be found there");
    };
    let mock = harness::mock::Mock::at(listener, |_, _| harness::mock::says("hi"));
    mock.list(&["a-model-of-another-server"]);
    for (answer, adopts) in [("yes", true), ("no", false), ("", true)] {
        let home = Home::new();
        let variables = home.variables();
        let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let flags = ["setup", "--role", "endpoint", "--model", "smollm2", "--pair", "no", "--service", "off"];
        let mut terminal = Terminal::start(&flags, &variables);
        terminal.shows("on this machine, too? [yes]: ", 1);
        assert!(terminal.shown().contains("openai with 1 model"), "{}", terminal.shown());
        if adopts {
            // What is no answer is asked for again.
            terminal.types("perhaps\r");
            terminal.shows("must be yes or no", 1);
            terminal.shows("on this machine, too? [yes]: ", 2);
        }
        terminal.types(answer);
        terminal.types("\r");
        terminal.shows("Do this? [no]: ", 1);
        assert_eq!(terminal.shown().contains("use     the models of other servers"), adopts, "{}", terminal.shown());
        terminal.types("yes\r");
        assert!(terminal.ends().success(), "{}", terminal.shown());
        let config = fs::read_to_string(home.path().join(CONFIG)).unwrap();
        assert!(config.contains(&format!("\nadopt = {adopts}\n")), "{answer:?}: {config}");
    }
}

#[test]
fn baton_alone_says_in_eight_lines_what_this_machine_is() {
    let home = Home::new();
    let said = home.prints(&[]);
    assert_eq!(said.lines().count(), 8, "{said}");
    assert!(said.contains("next      baton ") && said.contains("baton setup"), "{said}");
}

#[test]
fn baton_alone_names_the_command_of_a_setup_without_a_service() {
    let home = Home::new();
    home.prints(&["setup", "--yes"]);
    let command = format!("serve --config {}", home.path().join(CONFIG).display());
    let said = home.prints(&[]);
    // Unless another endpoint of this machine answers at the usual address.
    assert!(said.contains("endpoint  http://") || said.contains(&command), "{said}");
    // A service starts by itself.
    home.prints(&["setup", "--yes", "--service", "on"]);
    let said = home.prints(&[]);
    assert!(!said.contains(&command), "{said}");
}

#[test]
fn every_command_has_a_manual_page() {
    let home = Home::new();
    home.prints(&["man", home.path().to_str().unwrap()]);
    let pages = home.all();
    for page in ["baton.1", "baton-serve.1", "baton-node.1", "baton-setup.1"] {
        assert!(pages.contains(&page.to_owned()), "{page} in {pages:?}");
    }
    assert!(!pages.contains(&"baton-render.1".to_owned()), "hidden commands have none");
}
