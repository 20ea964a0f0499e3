//! The networks that this machine is in.
//!
//! mDNS crosses no router, so a machine that is heard has an address in one of these networks. What it announces beside that,
//! any stranger may have made up: a call to it would leave through the router, or reach a service that only this machine sees,
//! such as a cloud's metadata at 169.254.169.254.

use std::net::{IpAddr, SocketAddr};

use if_addrs::{IfAddr, Interface};

/// Returns true if a packet to this address needs no router: it is in a network of this machine now, or link-local with a scope.
/// Whoever calls an address that was only announced asks this first. Takes some 50 µs.
pub fn is_on_link(address: SocketAddr) -> bool {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_else(|error| {
        tracing::warn!(%error, "the networks of this machine cannot be listed, so no found node is asked");
        Vec::new()
    });
    is_in(address, &interfaces)
}

/// An address of this machine in one of its networks, to show to people; the first of IPv4, if there is one. Loopback and link-local
/// addresses are left out. It needs no route to anywhere else.
pub fn own_address() -> Option<IpAddr> {
    first_address(&if_addrs::get_if_addrs().ok()?)
}

fn first_address(interfaces: &[Interface]) -> Option<IpAddr> {
    let is_shown = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local() && !ip.is_unspecified(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local() && !ip.is_unspecified(),
    };
    let addresses = || interfaces.iter().map(Interface::ip).filter(is_shown);
    addresses().find(IpAddr::is_ipv4).or_else(|| addresses().next())
}

fn is_in(address: SocketAddr, interfaces: &[Interface]) -> bool {
    match address {
        SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => v6.scope_id() != 0,
        address => interfaces.iter().any(|interface| has(&interface.addr, address.ip().to_canonical())),
    }
}

/// Returns true if the address is in the network of one of this machine's own.
fn has(own: &IfAddr, ip: IpAddr) -> bool {
    let (differs, n_bits, prefix) = match (own, ip) {
        (IfAddr::V4(own), IpAddr::V4(ip)) => (u128::from(own.ip.to_bits() ^ ip.to_bits()), 32, own.prefixlen),
        (IfAddr::V6(own), IpAddr::V6(ip)) => (own.ip.to_bits() ^ ip.to_bits(), 128, own.prefixlen),
        _ => return false,
    };
    // A network of all addresses is no network.
    prefix > 0 && prefix <= n_bits && differs.checked_shr(u32::from(n_bits - prefix)).unwrap_or(0) == 0
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use if_addrs::{IfOperStatus, Ifv4Addr, Ifv6Addr};

    use super::*;

    fn interface(text: &str) -> Interface {
        let (ip, prefix) = text.split_once('/').unwrap();
        let prefixlen = prefix.parse().unwrap();
        let addr = match ip.parse().unwrap() {
            IpAddr::V4(ip) => IfAddr::V4(Ifv4Addr { ip, netmask: Ipv4Addr::UNSPECIFIED, prefixlen, broadcast: None }),
            IpAddr::V6(ip) => IfAddr::V6(Ifv6Addr { ip, netmask: Ipv6Addr::UNSPECIFIED, prefixlen, broadcast: None }),
        };
        Interface {
            name: "eth0".into(),
            addr,
            index: Some(1),
            oper_status: IfOperStatus::Up,
            is_p2p: false,
            #[cfg(windows)]
            adapter_name: String::new(),
        }
    }

    #[test]
    fn people_are_shown_an_address_that_others_reach() {
        let first = |texts: &[&str]| first_address(&texts.iter().map(|text| interface(text)).collect::<Vec<_>>());
        let shown = |text: &str| Some(text.parse::<IpAddr>().unwrap());
        assert_eq!(first(&["127.0.0.1/8", "fd00::7/64", "169.254.3.4/16", "192.168.0.7/24"]), shown("192.168.0.7"));
        assert_eq!(first(&["::1/128", "fe80::7/64", "fd00::7/64"]), shown("fd00::7"));
        assert_eq!(first(&["127.0.0.1/8", "::1/128", "fe80::7/64"]), None);
    }

    #[test]
    fn an_announced_address_is_asked_only_in_a_network_of_this_machine() {
        let own = ["192.168.0.7/24", "10.9.8.7/32", "fd00::7/64", "100.64.0.1/0"].map(interface);
        for (address, on_link) in [
            ("192.168.0.9:9000", true),
            ("[::ffff:192.168.0.9]:9000", true),
            ("192.168.1.9:9000", false),
            ("10.9.8.7:9000", true),
            ("10.9.8.8:9000", false),
            ("[fd00::9]:9000", true),
            ("[fd00:0:0:1::9]:9000", false),
            ("[fe80::9%1]:9000", true),
            ("[fe80::9]:9000", false),
            ("8.8.8.8:80", false),
            ("169.254.169.254:80", false),
            ("[2001:db8::1]:80", false),
        ] {
            assert_eq!(is_in(address.parse().unwrap(), &own), on_link, "{address}");
        }
        assert!(is_on_link("127.0.0.1:1".parse().unwrap()), "loopback is a network of every machine");
    }
}
