//! Services on the local network, by mDNS and DNS-SD (RFC 6762 and 6763): [`announce()`] and [`browse()`].
//!
//! Anyone in the network can announce anything, so nothing that is found here is trusted: it says where to ask, and the
//! caller must authenticate what answers there, and calls only addresses for which
//! [`is_on_link`](crate::links::is_on_link) is true. Names are short and printable, and addresses are such that a machine
//! in the network can have.

mod announce;
mod browse;
mod instance;

pub use self::announce::{Announced, Announcement, announce};
pub use self::browse::{Browser, Sighting, browse};
pub use self::instance::Instance;

/// A kind of service: its name in DNS-SD, at most 15 bytes after the underscore (RFC 6763, section 7.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceType(&'static str);

impl ServiceType {
    /// Nodes that any endpoint with the cluster key may use.
    pub const NODE: ServiceType = ServiceType("_baton._tcp.local.");

    /// A service over TCP: `_name._tcp.local.`, in lower case.
    pub const fn new(domain: &'static str) -> ServiceType {
        ServiceType(domain)
    }

    /// The name with its domain.
    pub fn as_str(self) -> &'static str {
        self.0
    }
}

/// Why mDNS does not work here. For the operator.
#[derive(Debug, thiserror::Error)]
pub enum MdnsError {
    /// The sockets cannot be opened, or the thread that serves them is gone.
    #[error("mDNS does not work on this machine: {0}")]
    Unavailable(String),
    /// The announcement breaks a rule of DNS-SD: the name or a property is too long.
    #[error("this cannot be announced: {0}")]
    Invalid(String),
}

/// How often changes of the machine's own addresses are looked for.
const ADDRESS_CHECK_SECONDS: u32 = 2;

/// Opens the sockets, on all networks of this machine. Loopback addresses are of no use to other machines.
fn daemon() -> Result<mdns_sd::ServiceDaemon, MdnsError> {
    let unavailable = |error: mdns_sd::Error| MdnsError::Unavailable(error.to_string());
    let daemon = mdns_sd::ServiceDaemon::new().map_err(unavailable)?;
    for loopback in [mdns_sd::IfKind::LoopbackV4, mdns_sd::IfKind::LoopbackV6] {
        daemon.disable_interface(loopback).map_err(unavailable)?;
    }
    daemon.set_ip_check_interval(ADDRESS_CHECK_SECONDS).map_err(unavailable)?;
    Ok(daemon)
}
