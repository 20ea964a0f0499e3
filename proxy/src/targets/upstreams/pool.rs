//! All upstreams, and which of them serve a model.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use baton_link::transport::Transport;
use baton_upstream::{Upstream, UpstreamSettings};

use super::{UpstreamHealth, UpstreamServer};
use crate::admission::TargetPlaces;
use crate::model_name;

/// The configured upstreams. A changed configuration makes another pool; running streams keep theirs.
#[derive(Default)]
pub struct UpstreamPool {
    /// In the order of the configuration.
    pub servers: Vec<Arc<UpstreamServer>>,
    turn: AtomicUsize,
}

/// An upstream that serves a model.
#[derive(Clone)]
pub struct ServingUpstream {
    /// The upstream.
    pub server: Arc<UpstreamServer>,
    /// The upstream's own name for the model.
    pub model: String,
}

/// A model, and the upstreams that serve it.
#[derive(Clone)]
pub struct ServedByUpstreams {
    /// The model's public name.
    pub name: String,
    /// At least one.
    pub upstreams: Vec<ServingUpstream>,
    /// Counts requests, so that equally loaded upstreams take turns.
    pub(super) turn: usize,
}

impl UpstreamPool {
    /// A pool of these upstreams. Those of `before` that have not changed are taken over with their state.
    pub fn new(
        settings: &[UpstreamSettings],
        transport: &Transport,
        before: &UpstreamPool,
    ) -> Result<UpstreamPool, String> {
        let server = |settings: &UpstreamSettings| {
            if let Some(known) = before.servers.iter().find(|server| server.client.settings() == settings) {
                return Ok(Arc::clone(known));
            }
            let client = Upstream::new(settings.clone(), transport)
                .map_err(|error| format!("the upstream {} cannot be used: {error}", settings.name))?;
            let is_same = |known: &&Arc<UpstreamServer>| {
                known.name() == settings.name && known.client.settings().url == settings.url
            };
            Ok(UpstreamServer::new(client, before.servers.iter().find(is_same)))
        };
        let servers = settings.iter().map(server).collect::<Result<_, String>>()?;
        Ok(UpstreamPool { servers, turn: AtomicUsize::new(0) })
    }

    /// The same configured upstreams with these adopted ones.
    pub fn with_adopted(&self, adopted: &[UpstreamSettings], transport: &Transport) -> Result<UpstreamPool, String> {
        let configured = self.servers.iter().map(|server| server.client.settings());
        let configured = configured.filter(|settings| !settings.is_adopted).cloned();
        UpstreamPool::new(&configured.chain(adopted.iter().cloned()).collect::<Vec<_>>(), transport, self)
    }

    /// These upstreams of a configuration, with the adopted ones of `before`.
    pub fn with_adopted_of(mut self, before: &UpstreamPool) -> UpstreamPool {
        let adopted = before.servers.iter().filter(|server| server.client.settings().is_adopted);
        self.servers.extend(adopted.map(Arc::clone));
        self
    }

    /// The upstreams that serve a model of this name. If `discovered`, also those that list the model without being
    /// configured for it.
    pub fn serving(&self, name: &str, discovered: bool) -> Option<ServedByUpstreams> {
        let upstream = |server: &Arc<UpstreamServer>| {
            Some(ServingUpstream { server: Arc::clone(server), model: server.model(name, discovered)? })
        };
        let upstreams: Vec<ServingUpstream> = self.servers.iter().filter_map(upstream).collect();
        let public = upstreams.first()?.server.public_name(name)?;
        Some(ServedByUpstreams { name: public, upstreams, turn: self.turn.fetch_add(1, Ordering::Relaxed) })
    }

    /// Every model's public name, each once, with the first upstream that serves it.
    pub fn models(&self) -> Vec<(String, Arc<UpstreamServer>)> {
        let mut known = HashSet::new();
        let mut models: Vec<(String, Arc<UpstreamServer>)> = Vec::new();
        for server in &self.servers {
            for name in server.models() {
                if known.insert(model_name::key(&name)) {
                    models.push((name, Arc::clone(server)));
                }
            }
        }
        models
    }

    /// Returns true if one of them may still list an unknown model.
    pub fn may_yet_list(&self) -> bool {
        self.servers.iter().any(|server| server.is_unlisted())
    }

    /// Returns true if one of them can probably answer for a model now.
    pub fn answers(&self) -> bool {
        let has_one = |server: &UpstreamServer| server.models().len() > server.unanswered().len();
        self.servers.iter().any(|server| server.health() != UpstreamHealth::Unknown && has_one(server))
    }

    /// A model that none of its upstreams can answer for now, other than those for which `is_local` returns true.
    pub fn unanswered(&self, is_local: impl Fn(&str) -> bool) -> Option<String> {
        let can = |server: &UpstreamServer, name: &str| {
            server.can_answer() && server.model(name, true).is_some_and(|theirs| server.can_answer_for(&theirs))
        };
        let mut names = self.servers.iter().flat_map(|server| server.unanswered());
        names.find(|name| !is_local(name) && !self.servers.iter().any(|server| can(server, name)))
    }

    /// The places of the upstreams that can probably answer now.
    pub fn places(&self) -> impl Iterator<Item = Arc<TargetPlaces>> {
        self.servers.iter().filter(|server| server.can_answer()).map(|server| Arc::clone(&server.places))
    }
}

impl ServedByUpstreams {
    /// The ones that serve the same model as this endpoint's own nodes of this name.
    pub fn peers(&self) -> Option<ServedByUpstreams> {
        let is_peer = |upstream: &&ServingUpstream| upstream.server.client.settings().same_models;
        let upstreams: Vec<ServingUpstream> = self.upstreams.iter().filter(is_peer).cloned().collect();
        (!upstreams.is_empty()).then(|| ServedByUpstreams { name: self.name.clone(), upstreams, turn: self.turn })
    }

    /// When the first of them was put into service.
    pub fn since(&self) -> SystemTime {
        self.upstreams.first().map_or(SystemTime::UNIX_EPOCH, |upstream| upstream.server.since)
    }

    /// Returns true if one of them can probably answer now.
    pub fn can_answer(&self) -> bool {
        self.upstreams.iter().any(|upstream| upstream.server.can_answer_for(&upstream.model))
    }
}
