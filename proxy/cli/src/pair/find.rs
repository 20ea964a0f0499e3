//! Announces the machine that shows a code, and finds it. Nothing in an announcement is trusted: the exchange proves it.

use std::net::SocketAddr;
use std::time::Duration;

use baton_link::links::is_on_link;
use baton_link::mdns::{self, Announced, Announcement, Instance, ServiceType, Sighting};
use baton_pairing::{About, Joiner, MAX_FAILED_ATTEMPTS, PairingError, PairingSession, join};
use baton_proxy::serve::CommandFailure;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::terminal;

/// Machines that show a code.
const SERVICE: ServiceType = ServiceType::new("_baton-pair._tcp.local.");

/// The property with the public part of the code.
const ROOM: &str = "room";

/// How long to search. An answer takes a second or two.
const SEARCH_DEADLINE: Duration = Duration::from_secs(15);

/// How long to search on after one that shows the same room has failed: it may not be the right one.
const AFTER_FAILURE: Duration = Duration::from_secs(1);

/// After this time no further address of a machine is tried.
const ADDRESSES_DEADLINE: Duration = Duration::from_secs(15);

/// How long its addresses are tried together before they are tried one by one.
const OPEN_DEADLINE: Duration = Duration::from_secs(2);

/// Machines to try. Whoever announces the same room can be one of them, and gets one guess at the code by it.
const MAX_TRIED: usize = 3;

/// Announces this machine, unless only itself can reach it. Without mDNS, the others need its address.
pub(super) fn announce(session: &PairingSession, listening: SocketAddr) -> Option<Announced> {
    if listening.ip().is_loopback() {
        return None;
    }
    let room = format!("{:03}", session.code().room());
    // A name may have 63 bytes.
    let machine: String = session.about().machine.as_str().chars().take(40).collect();
    let name = format!("{machine} code {room}");
    let properties = vec![(ROOM, room)];
    let announced = mdns::announce(&Announcement { service: SERVICE, name, listening, properties });
    announced
        .inspect_err(|error| {
            terminal::note(format_args!("baton pair: other machines cannot find this one, and need --at: {error}"));
        })
        .ok()
}

/// Searches the local network for the machine that shows this code, and joins its cluster.
pub(super) async fn join_found(joiner: &Joiner) -> Result<About, CommandFailure> {
    joiner.check()?;
    let room = format!("{:03}", joiner.code.room());
    let by_hand = "give its address with --at HOST";
    terminal::note(format_args!(
        "baton pair: searching the local network for the machine that shows this code, for {} s at most",
        SEARCH_DEADLINE.as_secs()
    ));
    let mut browser = mdns::browse(SERVICE)
        .map_err(|error| CommandFailure(format!("the local network cannot be searched: {error}. {by_hand}")))?;
    let mut deadline = Instant::now() + SEARCH_DEADLINE;
    let mut tried = Vec::new();
    let mut failure = None;
    while tried.len() < MAX_TRIED {
        let Ok(Some(sighting)) = tokio::time::timeout_at(deadline, browser.next()).await else { break };
        let Sighting::Found(instance) = sighting else { continue };
        let shows_it = instance.properties.get(ROOM) == Some(&room);
        if !shows_it || tried.contains(&instance.id) {
            continue;
        }
        terminal::note(format_args!("baton pair: asking {}", instance.name));
        match join_instance(joiner, &instance).await {
            Ok(about) => return Ok(about),
            Err(error) => failure = Some(error),
        }
        deadline = deadline.min(Instant::now() + AFTER_FAILURE);
        tried.push(instance.id);
    }
    Err(failure.map_or_else(
        || {
            let seconds = SEARCH_DEADLINE.as_secs();
            CommandFailure(format!(
                "no machine that shows a code {room}-… was found in {seconds} s. A code that expired, was \
                 ended, or had {MAX_FAILED_ATTEMPTS} wrong attempts is void: show a new one there. If it is still shown: {by_hand}"
            ))
        },
        CommandFailure::from,
    ))
}

/// The address that takes a connection first: a machine also announces its bridges, which nobody else reaches. Such a connection says
/// nothing, and costs no attempt.
async fn first_open(addresses: &[SocketAddr]) -> Option<SocketAddr> {
    let mut connecting = JoinSet::new();
    for &address in addresses {
        connecting.spawn(async move { TcpStream::connect(address).await.is_ok().then_some(address) });
    }
    let first = async {
        while let Some(opened) = connecting.join_next().await {
            if let Ok(Some(address)) = opened {
                return Some(address);
            }
        }
        None
    };
    tokio::time::timeout(OPEN_DEADLINE, first).await.ok().flatten()
}

/// Joins at the first of its addresses that answers. An answer ends it: each run is an attempt there.
async fn join_instance(joiner: &Joiner, instance: &Instance) -> Result<About, PairingError> {
    let mut failure = None;
    let deadline = Instant::now() + ADDRESSES_DEADLINE;
    // Anybody may have announced the others.
    let near: Vec<SocketAddr> = instance.addresses.iter().copied().filter(|address| is_on_link(*address)).collect();
    let open = first_open(&near).await;
    let others = near.iter().filter(|address| Some(**address) != open);
    // Whoever announces a machine may name many addresses at which nothing answers.
    for address in open.iter().chain(others).take_while(|_| Instant::now() < deadline) {
        match join(joiner, &address.to_string()).await {
            Err(error @ PairingError::Unreachable { .. }) => failure = Some(error),
            answer => return answer,
        }
    }
    Err(failure.unwrap_or_else(|| {
        let address = instance.addresses.first().map_or_else(String::new, SocketAddr::to_string);
        PairingError::Unreachable { address, error: std::io::Error::other("it is in no network of this machine") }
    }))
}
