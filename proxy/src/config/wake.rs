//! `[[wake]]`: nodes whose machines sleep, and how they are woken.

use std::net::SocketAddrV4;
use std::time::Duration;

use baton_link::wake_on_lan::PORT;
use baton_pairing::mac_address::MacAddress;
use schemars::JsonSchema;
use serde::Deserialize;

use super::error::ConfigProblem;
use super::node_address::{is_node_address, node_url};
use super::transport_args::TransportArgs;
use crate::targets::nodes::{MAX_WAKE, WakeSettings};

/// How long a machine is waited for: from sleep 2 to 20 s, from being off about a minute, and then the model loads.
const DEFAULT_WAIT: Duration = Duration::from_secs(90);

/// Machines of a cluster. A larger number is mistyped.
const MAX_MACHINES: usize = 64;

/// One of `[[wake]]` as written.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RawWake {
    /// The node: its address as in `model.prefill` or `model.decode`, or the name of a found one.
    pub node: String,
    /// The address of its machine's network card, unless the machine was paired here and told it.
    pub mac: Option<String>,
    /// Where magic packets are sent.
    pub broadcast: Option<String>,
    /// Seconds until it must be ready.
    #[schemars(range(min = 1, max = MAX_WAKE.as_secs() as u32))]
    pub max_wait_seconds: Option<f64>,
}

/// A node whose machine can be woken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeWake {
    /// Its URL, or the name of a found node.
    pub node: String,
    pub settings: WakeSettings,
}

/// The nodes that other parts of the configuration name.
pub(super) struct KnownNodes<'a> {
    /// The addresses in `model.prefill` and `model.decode`.
    pub urls: Vec<String>,
    /// Nodes are searched for in the network.
    pub are_found: bool,
    pub reached: &'a TransportArgs,
}

/// Every mistake in `[[wake]]`.
pub(super) fn problems(machines: &[RawWake], nodes: &KnownNodes<'_>) -> Vec<ConfigProblem> {
    let mut found = Vec::new();
    for (i, machine) in machines.iter().enumerate() {
        let mut problem = |field: &str, message: String| {
            let key = format!("wake[{i}].{field}");
            found.push(ConfigProblem { flag: key.clone(), key, message });
        };
        if i >= MAX_MACHINES {
            problem("node", format!("is one machine too many: there may be {MAX_MACHINES}"));
            break;
        }
        let node = node(&machine.node, nodes.reached);
        if is_node_address(&machine.node) {
            if !nodes.urls.contains(&node) {
                problem(
                    "node",
                    "must be an address of model.decode or model.prefill, or the name of a found node".into(),
                );
            }
        } else if machine.node.trim().is_empty() {
            problem("node", "must not be empty".into());
        } else if !nodes.are_found {
            let message = "is a name, which only found nodes have (discover = true). Write the address of another one";
            problem("node", message.into());
        }
        if machines[..i].iter().any(|other| self::node(&other.node, nodes.reached) == node) {
            problem("node", format!("names {node} twice"));
        }
        match &machine.mac {
            Some(mac) => {
                if let Err(error) = mac.parse::<MacAddress>() {
                    problem("mac", format!("{error}, not {mac:?}"));
                }
            }
            None if learned(&machine.node, nodes.reached).is_none() => {
                let message =
                    "is missing: no machine of this name that was paired here has told the address of its network card";
                problem("mac", message.into());
            }
            None => {}
        }
        if let Some(text) = machine.broadcast.as_ref().filter(|text| target(text).is_none()) {
            problem(
                "broadcast",
                format!("must be an IPv4 address like 192.168.1.255 or 192.168.1.255:9, not {text:?}"),
            );
        }
    }
    found
}

/// The checked form; what [`problems`] finds is left out.
pub(super) fn checked(machines: &[RawWake], reached: &TransportArgs) -> Vec<NodeWake> {
    let checked = |machine: &RawWake| {
        let settings = WakeSettings {
            mac: match &machine.mac {
                Some(mac) => mac.parse().ok()?,
                None => learned(&machine.node, reached)?,
            },
            to: machine.broadcast.as_deref().and_then(target),
            longest: machine.max_wait_seconds.map_or(DEFAULT_WAIT, Duration::from_secs_f64),
        };
        Some(NodeWake { node: node(&machine.node, reached), settings })
    };
    machines.iter().filter_map(checked).collect()
}

/// An address as its URL, a name as it is.
fn node(text: &str, reached: &TransportArgs) -> String {
    if is_node_address(text) { reached.node_url(text) } else { text.trim().to_owned() }
}

/// The address that the node's machine told when it was paired. Machines are known by the first part of their host names, as nodes announce it, with
/// a port unless that is the usual one.
fn learned(node: &str, reached: &TransportArgs) -> Option<MacAddress> {
    let machines =
        reached.pairing()?.machines().inspect_err(|error| tracing::warn!(%error, "network cards are not known"));
    let host = if is_node_address(node) {
        reqwest::Url::parse(&node_url(node)).ok()?.host_str()?.to_owned()
    } else {
        node.trim().to_owned()
    };
    let without_port =
        host.rsplit_once('-').filter(|(_, port)| port.parse::<u16>().is_ok()).map(|(host, _)| host.to_owned());
    let first_part = |name: &str| name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    let machines = machines.ok()?;
    // A machine may be called `spark-2`.
    let mut wanted = [Some(host), without_port].into_iter().flatten().map(|name| first_part(&name));
    wanted.find_map(|wanted| machines.iter().find(|(name, _)| first_part(name) == wanted).map(|(_, mac)| *mac))
}

/// Nobody listens on port 0.
fn target(text: &str) -> Option<SocketAddrV4> {
    let without_port = || Some(SocketAddrV4::new(text.parse().ok()?, PORT));
    text.parse().ok().or_else(without_port).filter(|target: &SocketAddrV4| target.port() != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_that_a_paired_machine_told_is_found_by_the_machines_name() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("machines.json"), r#"{"Anna-s-Mac.local": "a4:83:e7:12:34:56", "spark": "a4:83:e7:00:00:01", "spark-2": "a4:83:e7:00:00:02"}"#).unwrap();
        let reached = TransportArgs { paired: Some(folder.path().to_owned()), ..TransportArgs::default() };
        let told = "a4:83:e7:12:34:56".parse().ok();
        for node in ["anna-s-mac", "anna-s-mac-9001", "anna-s-mac.local:9000", "https://Anna-s-Mac.lan:9001"] {
            assert_eq!(learned(node, &reached), told, "{node}");
        }
        for (node, mac) in [("spark-2", "a4:83:e7:00:00:02"), ("spark-9002", "a4:83:e7:00:00:01")] {
            assert_eq!(learned(node, &reached), mac.parse().ok(), "{node}");
        }
        for node in ["anna-s-mac-2-", "ann", "192.168.0.7:9000"] {
            assert_eq!(learned(node, &reached), None, "{node}");
        }
        assert_eq!(learned("anna-s-mac", &TransportArgs::default()), None);
        let known = KnownNodes { urls: Vec::new(), are_found: true, reached: &reached };
        let machine = |node: &str| RawWake { node: node.into(), ..RawWake::default() };
        assert!(problems(&[machine("anna-s-mac")], &known).is_empty());
        assert_eq!(problems(&[machine("mini")], &known)[0].key, "wake[0].mac");
        assert_eq!(checked(&[machine("anna-s-mac")], &reached)[0].settings.mac, told.unwrap());
    }
}
