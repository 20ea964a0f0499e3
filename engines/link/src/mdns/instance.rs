//! An instance of a service as the network tells it.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use baton_schemas::printable::printable;
use mdns_sd::{ResolvedService, ScopedIp};

/// The most addresses of one instance. A machine has a few for each of its networks.
const MAX_ADDRESSES: usize = 16;

/// The most properties of one instance that are read.
const MAX_PROPERTIES: usize = 16;

/// An announced instance of a service. Nothing of it is verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// Its full name, as the key of what is known about it. Not for people.
    pub id: String,
    /// The name for people: printable, at most 200 characters.
    pub name: String,
    /// Where it claims to be, at least one, in a fixed order; link-local IPv6 addresses with their scope.
    pub addresses: Vec<SocketAddr>,
    /// Its properties: printable, at most 16 of 200 characters.
    pub properties: BTreeMap<String, String>,
}

impl Instance {
    /// `None` if it has no address that a machine in the network can have.
    pub fn of(service: &ResolvedService) -> Option<Instance> {
        let mut addresses: Vec<SocketAddr> =
            service.addresses.iter().filter_map(|ip| usable(ip, service.port)).collect();
        addresses.sort();
        addresses.dedup();
        addresses.truncate(MAX_ADDRESSES);
        if addresses.is_empty() {
            return None;
        }
        let name = service.fullname.strip_suffix(&format!(".{}", service.ty_domain)).unwrap_or(&service.fullname);
        let properties = service.txt_properties.iter().take(MAX_PROPERTIES);
        Some(Instance {
            id: service.fullname.clone(),
            name: printable(name),
            addresses,
            properties: properties.map(|p| (printable(p.key()), printable(p.val_str()))).collect(),
        })
    }
}

/// An address to ask. A stranger must not make this machine ask itself, or everybody.
fn usable(ip: &ScopedIp, port: u16) -> Option<SocketAddr> {
    let address = match ip {
        // Only there is the scope a part of the address.
        ScopedIp::V6(v6) if v6.addr().is_unicast_link_local() => {
            SocketAddr::V6(SocketAddrV6::new(*v6.addr(), port, 0, v6.scope_id().index))
        }
        ip => SocketAddr::new(ip.to_ip_addr().to_canonical(), port),
    };
    let is_scoped = !matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0);
    let is_host = match address.ip() {
        IpAddr::V4(ip) => !(ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || ip.is_broadcast()),
        IpAddr::V6(ip) => !(ip.is_loopback() || ip.is_unspecified() || ip.is_multicast()),
    };
    (port != 0 && is_scoped && is_host).then_some(address)
}

#[cfg(test)]
mod tests {
    use mdns_sd::ServiceInfo;

    use super::*;

    fn instance(name: &str, addresses: &str, port: u16) -> Option<Instance> {
        let properties = [("key", "\u{1b}[31mred"), ("other", "1")];
        let info =
            ServiceInfo::new("_baton._tcp.local.", name, "host.local.", addresses, port, &properties[..]).unwrap();
        Instance::of(&info.as_resolved_service())
    }

    #[test]
    fn a_stranger_cannot_name_addresses_that_no_machine_in_the_network_has() {
        for address in
            ["127.0.0.1", "0.0.0.0", "224.0.0.251", "255.255.255.255", "::1", "::", "ff02::fb", "::ffff:127.0.0.1"]
        {
            assert_eq!(instance("a", address, 9000), None, "{address}");
        }
        // The scope of an address that was told without an interface is unknown.
        assert_eq!(instance("a", "fe80::1", 9000), None);
        assert_eq!(instance("a", "192.168.0.7", 0), None);
        let found = instance("a", "192.168.0.7,fd00::7,127.0.0.1", 9000).unwrap();
        let expected = ["192.168.0.7:9000", "[fd00::7]:9000"].map(|text| text.parse().unwrap());
        assert_eq!(found.addresses, expected);
    }

    #[test]
    fn texts_are_printable() {
        let found = instance("evil\u{1b}[2Jname\u{202e}", "192.168.0.7", 9000).unwrap();
        assert_eq!(found.name, "evil\u{fffd}[2Jname\u{fffd}");
        assert_eq!(found.properties["key"], "\u{fffd}[31mred");
    }

    #[test]
    fn a_host_with_many_addresses_is_asked_at_a_few() {
        let many: Vec<String> = (1..100).map(|i| format!("10.0.0.{i}")).collect();
        assert_eq!(instance("a", &many.join(","), 1).unwrap().addresses.len(), MAX_ADDRESSES);
    }
}
