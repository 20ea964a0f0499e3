//! `baton discover`: the nodes in the local network, and why each is or is not used; or other servers.

pub(super) mod servers;

use std::time::Duration;

use baton_proxy::config::AdoptHost;
use baton_proxy::config::transport_args::TransportArgs;
use baton_proxy::observe::snapshot::{DiscoveryState, FoundNode};
use baton_proxy::serve::{CommandFailure, look_around, look_for_servers};
use baton_schemas::counted::counted;
use clap::Args;

use super::endpoint::EndpointArgs;
use super::terminal;

/// Options of `baton discover`.
#[derive(Args)]
pub(super) struct DiscoverArgs {
    #[command(flatten)]
    endpoint: EndpointArgs,
    /// How long to look, if no endpoint that searches runs at the default address
    #[arg(long, value_name = "SECONDS", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    #[command(flatten)]
    transport: TransportArgs,
    /// Print JSON
    #[arg(long, conflicts_with = "servers")]
    json: bool,
    /// Look for other servers on this machine instead: Ollama, LM Studio, llama-server, vLLM, mlx_lm.server, another Baton
    #[arg(long)]
    servers: bool,
    /// With --servers: look on this machine of the network, too; repeat for several
    #[arg(long = "host", value_name = "HOST[:PORT]", requires = "servers", value_parser = host)]
    hosts: Vec<String>,
}

fn host(text: &str) -> Result<String, String> {
    AdoptHost::parse(text).map(|_| text.to_owned()).ok_or_else(|| "must be HOST or HOST:PORT".to_owned())
}

/// Prints what a running endpoint has found, or else what this command finds itself.
pub(super) async fn run(args: DiscoverArgs) -> Result<(), CommandFailure> {
    if args.servers {
        let transport = args.transport.or_paired();
        let seen = look_for_servers(args.hosts, &transport.transport()?).await?;
        return Ok(terminal::print_line(servers::render(&seen))?);
    }
    let state = match of_endpoint(&args.endpoint).await {
        Ok(state) => state,
        // An endpoint that was named must answer.
        Err(failure) if args.endpoint.is_named() => return Err(failure),
        Err(CommandFailure(reason)) => {
            tracing::debug!(reason, "no running endpoint tells what it has found");
            let transport = args.transport.or_paired();
            terminal::note(format_args!("baton discover: listening for {} s", args.seconds));
            look_around(transport.cluster_key()?, transport.transport()?, Duration::from_secs(args.seconds)).await
        }
    };
    let text = if args.json { serde_json::to_string(&state)? } else { table(&state) };
    Ok(terminal::print_line(text)?)
}

/// Errors: there is no endpoint, it does not search, or it does not show its state to this key.
async fn of_endpoint(endpoint: &EndpointArgs) -> Result<DiscoveryState, CommandFailure> {
    let base = endpoint.base()?;
    let state = endpoint.state().await?;
    state.discovery.ok_or_else(|| CommandFailure(format!("{base} does not search: start it with --discover")))
}

/// A line for each, with its addresses.
pub(super) fn table(state: &DiscoveryState) -> String {
    let mut text = lines(state);
    for found in &state.found {
        for address in &found.addresses {
            text += &format!("\n  {}  {}  {}", found.name, address.address, address.state.as_str());
        }
    }
    text
}

/// Prints a line for each find.
pub(super) fn lines(state: &DiscoveryState) -> String {
    if let Some(problem) = &state.problem {
        return format!("Nodes in the network cannot be found: {}", problem);
    }
    if state.found.is_empty() {
        return "No node was found in the network. Unless both machines are paired, `baton serve --pair` shows a code here. On the \
                other one: baton node --pair CODE --role prefill --listen 0.0.0.0:9000".to_owned();
    }
    let line = |found: &FoundNode| {
        let role = found.role.map_or_else(String::new, |role| format!(" ({})", role.as_str()));
        format!("\n  {}{role}: {}", found.name, found.reason)
    };
    let lines: String = state.found.iter().map(line).collect();
    format!("Found in the network: {}{lines}", counted(state.found.len(), "node"))
}

#[cfg(test)]
mod tests {
    use baton_proxy::observe::snapshot::{FoundAddress, FoundState};
    use baton_schemas::node::Role;

    use super::*;

    #[test]
    fn each_node_is_listed_with_its_reason() {
        let of = |name: &str, state: FoundState, role| FoundNode {
            name: name.into(),
            state,
            reason: state.words().into(),
            role,
            node: None,
            addresses: vec![FoundAddress { address: "10.0.0.7:9000".into(), state }],
        };
        let found = vec![of("spark", FoundState::Used, Some(Role::Prefill)), of("other", FoundState::OtherKey, None)];
        let text = table(&DiscoveryState { problem: None, found });
        for part in ["2 nodes", "spark (prefill): used", "found, other key", "10.0.0.7:9000  other_key"] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        assert!(lines(&DiscoveryState::default()).contains("No node was found"));
    }
}
