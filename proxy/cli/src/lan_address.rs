//! The address under which other machines reach this one.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use baton_link::links::own_address;

/// This machine's address in its network, which the system chooses for a packet to another machine. Nothing is sent. A network without a
/// router has no way to another one: then the address is that of a network card.
pub(super) fn lan_address(listening: SocketAddr) -> Option<IpAddr> {
    routed_address(listening).or_else(own_address).filter(|ip| listening.is_ipv6() || ip.is_ipv4())
}

fn routed_address(listening: SocketAddr) -> Option<IpAddr> {
    // Addresses reserved for documentation (RFC 5737 and 3849), so never in use.
    let (any, elsewhere) = match listening {
        SocketAddr::V4(_) => ("0.0.0.0:0", "192.0.2.1:9"),
        SocketAddr::V6(_) => ("[::]:0", "[2001:db8::1]:9"),
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(elsewhere).ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}
