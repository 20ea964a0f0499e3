//! `baton` alone: what this machine is, in eight lines, and the next step with its command.

use std::fmt;
use std::time::Duration;

#[cfg(feature = "llama")]
use baton_engines::llama::devices;
use baton_fetch::cache::default_folder;
use baton_pairing::{About, ClusterFolder};
use baton_proxy::config::transport_args::TransportArgs;
use baton_proxy::config::{API_KEY_VARIABLE, DEFAULT_LISTEN, DEFAULT_MODEL};
use baton_proxy::observe::snapshot::{DiscoveryState, EndpointState};
use baton_proxy::serve::{CommandFailure, look_around};
use baton_proxy::targets::model_loading::total_memory;
use baton_schemas::counted::counted;

use super::endpoint::EndpointArgs;
use super::terminal;

/// How long the network is listened to. A node answers within a second.
const LISTEN_FOR: Duration = Duration::from_secs(2);

/// Names in a line.
const N_NAMED: usize = 4;

/// What this machine is.
struct Overview {
    n_cores: usize,
    memory_bytes: u64,
    devices: Vec<String>,
    n_models: usize,
    pairing: Option<About>,
    /// The endpoint at the usual address, or why none answers there.
    endpoint: Result<EndpointState, String>,
    found: DiscoveryState,
    /// The command that starts what `baton setup` made, where no service does.
    set_up: Option<String>,
}

/// What to do next, by what is there.
#[derive(Debug, PartialEq, Eq)]
enum FirstStep {
    Chat,
    ServeSetUp(String),
    UseFoundNodes,
    Pair,
    Serve,
}

/// Prints what this machine is. `set_up` is [`Overview::set_up`].
pub(super) async fn run(set_up: Option<String>) -> Result<(), CommandFailure> {
    let endpoint = EndpointArgs::at(DEFAULT_LISTEN.to_owned(), std::env::var(API_KEY_VARIABLE).ok());
    let transport = TransportArgs::default().or_paired();
    // A damaged pairing is `baton pair`'s to report.
    let key = transport.cluster_key().unwrap_or_default();
    let (state, found) = tokio::join!(endpoint.state(), look_around(key, transport.transport()?, LISTEN_FOR));
    let overview = Overview {
        n_cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: total_memory().unwrap_or(0),
        devices: devices_here(),
        n_models: n_models(),
        pairing: ClusterFolder::of_user().ok().and_then(|folder| folder.about().ok().flatten()),
        endpoint: state.map_err(|CommandFailure(reason)| reason),
        found,
        set_up,
    };
    Ok(terminal::print_line(overview)?)
}

#[cfg(feature = "llama")]
fn devices_here() -> Vec<String> {
    let described = |device: &devices::Device| match device.memory >> 30 {
        0 => format!("{} ({})", device.name, device.description),
        gib => format!("{} ({}, {gib} GiB)", device.name, device.description),
    };
    devices::all().map_or_else(|error| vec![error.to_string()], |devices| devices.iter().map(described).collect())
}

#[cfg(not(feature = "llama"))]
fn devices_here() -> Vec<String> {
    vec!["cpu (this build has no llama.cpp)".to_owned()]
}

/// Model files in the folder of `baton pull`.
fn n_models() -> usize {
    let entries = default_folder().ok().and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten();
    entries
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|kind| kind.eq_ignore_ascii_case("gguf")))
        .count()
}

impl Overview {
    fn first_step(&self) -> FirstStep {
        match (&self.endpoint, &self.set_up, self.found.found.is_empty(), &self.pairing) {
            (Ok(_), _, _, _) => FirstStep::Chat,
            (_, Some(command), _, _) => FirstStep::ServeSetUp(command.clone()),
            (_, None, false, Some(_)) => FirstStep::UseFoundNodes,
            (_, None, false, None) => FirstStep::Pair,
            (_, None, true, _) => FirstStep::Serve,
        }
    }

    fn paired(&self) -> String {
        match &self.pairing {
            None => "with no other machine".to_owned(),
            Some(About { cluster, machine, admitted_by: None, .. }) => {
                format!("{machine}, the first of cluster {cluster}")
            }
            Some(About { cluster, machine, admitted_by: Some(first), .. }) => {
                format!("{machine}, with {first}, in cluster {cluster}")
            }
        }
    }

    fn endpoint(&self) -> String {
        match &self.endpoint {
            Err(reason) => reason.clone(),
            Ok(state) => {
                let models: Vec<&str> = state.models.iter().map(|model| model.name.as_str()).collect();
                format!("http://{DEFAULT_LISTEN} serves {}", named(&models, "its upstreams' models"))
            }
        }
    }

    fn network(&self) -> String {
        if let Some(problem) = &self.found.problem {
            return format!("cannot be searched: {problem}");
        }
        let nodes: Vec<String> =
            self.found.found.iter().map(|node| format!("{} ({})", node.name, node.reason)).collect();
        let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
        named(&nodes, "no other Baton announces itself")
    }
}

fn named(names: &[&str], none: &str) -> String {
    let shown = names.iter().take(N_NAMED).copied().collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => none.to_owned(),
        n if n > N_NAMED => format!("{shown} and {} more", n - N_NAMED),
        _ => shown,
    }
}

impl fmt::Display for Overview {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
        let cores = counted(self.n_cores, "core");
        let version = env!("CARGO_PKG_VERSION");
        writeln!(f, "baton {version} on {os} {arch}, {cores}, {} GiB of memory", self.memory_bytes >> 30)?;
        writeln!(f, "devices   {}", self.devices.join(", "))?;
        writeln!(f, "models    {} here; `baton pull NAME` fetches one", self.n_models)?;
        writeln!(f, "paired    {}", self.paired())?;
        writeln!(f, "endpoint  {}", self.endpoint())?;
        writeln!(f, "network   {}", self.network())?;
        let (command, does) = match self.first_step() {
            FirstStep::Chat => ("baton chat".to_owned(), "chats with it".to_owned()),
            FirstStep::ServeSetUp(command) => (command, "starts what `baton setup` has set up".to_owned()),
            FirstStep::UseFoundNodes => {
                ("baton serve --discover".to_owned(), "serves with the nodes that were found".to_owned())
            }
            FirstStep::Pair => {
                ("baton pair CODE".to_owned(), "joins the machine that shows a code with `baton pair`".to_owned())
            }
            FirstStep::Serve => {
                ("baton serve".to_owned(), format!("serves {DEFAULT_MODEL} at http://{DEFAULT_LISTEN}"))
            }
        };
        writeln!(f, "next      {command}    ({does})")?;
        write!(
            f,
            "or        baton setup    (asks what this machine shall do, also at every boot); baton --help lists all commands"
        )
    }
}

#[cfg(test)]
mod tests {
    use baton_proxy::observe::snapshot::{FoundNode, ModelState};

    use super::*;

    fn bare() -> Overview {
        Overview {
            n_cores: 2,
            memory_bytes: 24 << 30,
            devices: vec!["cpu (EPYC)".into()],
            n_models: 0,
            pairing: None,
            endpoint: Err("no endpoint answers at 127.0.0.1:8080: refused".into()),
            found: DiscoveryState::default(),
            set_up: None,
        }
    }

    fn spark() -> DiscoveryState {
        let node = FoundNode { name: "spark".into(), reason: "found".into(), ..FoundNode::default() };
        DiscoveryState { problem: None, found: vec![node; 6] }
    }

    #[test]
    fn a_machine_is_told_in_eight_lines_with_the_command_to_type_next() {
        let text = bare().to_string();
        assert_eq!(text.lines().count(), 8, "{text}");
        for part in
            ["2 cores, 24 GiB", "devices   cpu (EPYC)", "next      baton serve ", "baton setup", "no other Baton"]
        {
            assert!(text.contains(part), "{part:?} in\n{text}");
        }
        let text = Overview { found: spark(), ..bare() }.to_string();
        assert!(text.contains("and 2 more") && text.contains("baton pair CODE") && text.lines().count() == 8, "{text}");
    }

    #[test]
    fn the_next_step_follows_from_what_is_there() {
        let model = ModelState { name: "m".into(), ..ModelState::default() };
        let running = Overview {
            endpoint: Ok(EndpointState { models: vec![model], ..EndpointState::default() }),
            found: spark(),
            ..bare()
        };
        assert_eq!(running.first_step(), FirstStep::Chat);
        assert!(running.to_string().contains("http://127.0.0.1:8080 serves m\n"), "{running}");
        let set_up = Some("baton serve --config baton.toml".to_owned());
        assert_eq!(Overview { set_up: set_up.clone(), ..running }.first_step(), FirstStep::Chat);
        let stopped = Overview { set_up, found: spark(), ..bare() };
        assert!(stopped.to_string().contains("next      baton serve --config baton.toml    (starts what"), "{stopped}");
        assert_eq!(bare().first_step(), FirstStep::Serve);
        assert_eq!(Overview { found: spark(), ..bare() }.first_step(), FirstStep::Pair);
    }
}
