//! Finds the instances of a service.

use mdns_sd::{Receiver, ServiceDaemon, ServiceEvent};

use super::instance::Instance;
use super::{MdnsError, ServiceType, daemon};

/// A search that goes on until it is dropped.
pub struct Browser {
    daemon: ServiceDaemon,
    service: ServiceType,
    events: Receiver<ServiceEvent>,
}

/// What a search saw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sighting {
    /// An instance that is new, or whose addresses or properties have changed.
    Found(Instance),
    /// The instance with this [`id`](Instance::id) said goodbye, lost all its addresses, or was silent for too long.
    Gone(String),
}

/// Searches for a service on all networks of this machine. Errors: mDNS does not work here.
pub fn browse(service: ServiceType) -> Result<Browser, MdnsError> {
    let daemon = daemon()?;
    let events = daemon.browse(service.as_str()).map_err(|error| MdnsError::Unavailable(error.to_string()))?;
    Ok(Browser { daemon, service, events })
}

impl Browser {
    /// The next sighting. Dropping the future loses none. `None`: the search has ended, because its thread did or because
    /// sightings were not taken for long; search again.
    pub async fn next(&mut self) -> Option<Sighting> {
        loop {
            match self.events.recv_async().await.ok()? {
                ServiceEvent::ServiceResolved(service) => {
                    let id = service.fullname.clone();
                    return Some(Instance::of(&service).map_or(Sighting::Gone(id), Sighting::Found));
                }
                ServiceEvent::ServiceRemoved(_, id) => return Some(Sighting::Gone(id)),
                ServiceEvent::SearchStopped(_) => return None,
                // Its addresses are not known yet, or it is news about the search.
                _ => {}
            }
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // If the thread has ended, nothing is left to do.
        let _ = self.daemon.stop_browse(self.service.as_str());
        let _ = self.daemon.shutdown();
    }
}
