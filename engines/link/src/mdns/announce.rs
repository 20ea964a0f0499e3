//! Announces a service of this process.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use mdns_sd::{IfKind, ServiceDaemon, ServiceInfo};

use super::{MdnsError, ServiceType, daemon};

/// The longest wait for the goodbye to leave.
const GOODBYE_DEADLINE: Duration = Duration::from_secs(1);

/// The goodbye is repeated after 120 ms, in case that a packet is lost.
const REPEAT: Duration = Duration::from_millis(150);

/// The longest instance name, bytes: a label of DNS.
const MAX_NAME_BYTES: usize = 63;

/// What other machines shall find.
#[derive(Debug, Clone)]
pub struct Announcement {
    pub service: ServiceType,
    /// For people; unique in the network, at most 63 bytes.
    pub name: String,
    /// Where the service listens. A wildcard is announced as all addresses of the machine, of its family only if it is
    /// `0.0.0.0`, and follows their changes.
    pub listening: SocketAddr,
    /// Short facts, each `key` and `value` at most 200 bytes together. Whoever reads them cannot trust them.
    pub properties: Vec<(&'static str, String)>,
}

/// An announcement in force. Dropping it says goodbye without waiting; [`Announced::withdraw`] waits until that has left.
pub struct Announced {
    daemon: ServiceDaemon,
    full_name: String,
}

/// Announces a service until the result is dropped. Errors: mDNS does not work here, or a text is too long.
pub fn announce(announcement: &Announcement) -> Result<Announced, MdnsError> {
    let info = service_info(announcement)?;
    let daemon = daemon()?;
    let full_name = info.get_fullname().to_owned();
    daemon.register(info).map_err(|error| MdnsError::Unavailable(error.to_string()))?;
    Ok(Announced { daemon, full_name })
}

impl Announced {
    /// Says goodbye, so that browsers forget the service at once. Waits up to 1 s.
    pub async fn withdraw(self) {
        let goodbye = async {
            // Without an answer there is nothing to wait for: the thread has ended.
            if let Ok(left) = self.daemon.unregister(&self.full_name)
                && left.recv_async().await.is_ok()
            {
                tokio::time::sleep(REPEAT).await;
            }
        };
        if tokio::time::timeout(GOODBYE_DEADLINE, goodbye).await.is_err() {
            tracing::debug!("the goodbye to the network took too long; others will notice by themselves");
        }
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        // The thread says goodbye for what is still registered, and ends. If it has ended, nothing is left to do.
        let _ = self.daemon.shutdown();
    }
}

fn service_info(announcement: &Announcement) -> Result<ServiceInfo, MdnsError> {
    let Announcement { service, name, listening, properties } = announcement;
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        return Err(MdnsError::Invalid(format!(
            "its name has {} bytes, and may have 1 to {MAX_NAME_BYTES}",
            name.len()
        )));
    }
    // A host name of its own: the machine's usual one may be announced by the system's responder, with other addresses.
    let host = format!("baton-{:016x}.local.", rand::random::<u64>());
    let ip = listening.ip();
    let addresses: &[IpAddr] = if ip.is_unspecified() { &[] } else { &[ip] };
    let info = ServiceInfo::new(service.as_str(), name, &host, addresses, listening.port(), properties.as_slice());
    let mut info = info.map_err(|error| MdnsError::Invalid(error.to_string()))?;
    if ip.is_unspecified() {
        info = info.enable_addr_auto();
    }
    if ip.is_ipv4() {
        info.set_interfaces(vec![IfKind::IPv4]);
    }
    Ok(info)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(name: &str, listening: &str) -> Result<ServiceInfo, MdnsError> {
        let listening = listening.parse().unwrap();
        let properties = vec![("v", "1".to_owned())];
        service_info(&Announcement { service: ServiceType::NODE, name: name.to_owned(), listening, properties })
    }

    #[test]
    fn a_wildcard_follows_the_machines_addresses_and_an_address_stays() {
        let all = made("spark", "0.0.0.0:9000").unwrap();
        assert!(all.is_addr_auto() && all.get_port() == 9000);
        let one = made("spark", "192.168.0.7:9000").unwrap();
        assert!(!one.is_addr_auto());
        assert_eq!(one.get_addresses_v4().len(), 1);
        assert_ne!(all.get_hostname(), one.get_hostname());
    }

    #[test]
    fn names_that_dns_cannot_carry_are_refused() {
        for name in ["", &"x".repeat(64)] {
            assert!(matches!(made(name, "0.0.0.0:1"), Err(MdnsError::Invalid(_))));
        }
        assert!(made(&"x".repeat(63), "0.0.0.0:1").is_ok());
    }
}
