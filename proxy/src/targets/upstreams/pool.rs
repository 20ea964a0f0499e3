//! All upstreams, and which of them serve a model.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use baton_engines::transport::Transport;
use baton_engines::upstream::{Upstream, UpstreamSettings};

use super::{Life, Member};
use crate::model_name;

/// The configured upstreams. A changed configuration makes another pool; running streams keep what they have of this one.
#[derive(Default)]
pub struct UpstreamPool {
    /// In the order of the configuration.
    pub members: Vec<Arc<Member>>,
    turn: AtomicUsize,
}

/// A model, and the upstreams that serve it.
pub struct ServedByUpstreams {
    /// Its public name.
    pub name: String,
    /// Each with its own name for the model. At least one.
    pub members: Vec<(Arc<Member>, String)>,
    /// Counts requests, so that equals take turns.
    pub(super) turn: usize,
}

impl UpstreamPool {
    /// These upstreams. Those that are in `before` and have not changed are taken over with all that is known of them.
    pub fn new(
        settings: &[UpstreamSettings],
        transport: &Transport,
        before: &UpstreamPool,
    ) -> Result<UpstreamPool, String> {
        let member = |settings: &UpstreamSettings| {
            if let Some(known) = before.members.iter().find(|member| member.client.settings() == settings) {
                return Ok(Arc::clone(known));
            }
            let client = Upstream::new(settings.clone(), transport)
                .map_err(|error| format!("the upstream {} cannot be used: {error}", settings.name))?;
            let member = Member::new(client);
            let is_same =
                |known: &&Arc<Member>| known.name() == settings.name && known.client.settings().url == settings.url;
            if let Some(known) = before.members.iter().find(is_same) {
                member.inherit(known);
            }
            Ok(member)
        };
        let members = settings.iter().map(member).collect::<Result<_, String>>()?;
        Ok(UpstreamPool { members, turn: AtomicUsize::new(0) })
    }

    /// The upstreams that serve a model of this name. `discovered`: also those that only happen to list it.
    pub fn serving(&self, name: &str, discovered: bool) -> Option<ServedByUpstreams> {
        let members = self.members.iter();
        let members: Vec<_> =
            members.filter_map(|member| Some((Arc::clone(member), member.model(name, discovered)?))).collect();
        let (first, _) = members.first()?;
        let public = first.models().into_iter().find(|known| model_name::are_same(known, name))?;
        Some(ServedByUpstreams { name: public, members, turn: self.turn.fetch_add(1, Ordering::Relaxed) })
    }

    /// Every model's public name, each once, with the first upstream that serves it.
    pub fn models(&self) -> Vec<(String, Arc<Member>)> {
        let mut models: Vec<(String, Arc<Member>)> = Vec::new();
        for member in &self.members {
            for name in member.models() {
                if !models.iter().any(|(known, _)| model_name::are_same(known, &name)) {
                    models.push((name, Arc::clone(member)));
                }
            }
        }
        models
    }

    /// Whether a name that nobody knows may still turn out to be a model of theirs.
    pub fn may_yet_list(&self) -> bool {
        self.members.iter().any(|member| member.is_unlisted())
    }

    /// Whether one of them could answer for a model now, as far as is known.
    pub fn answers(&self) -> bool {
        let has_one = |member: &Member| member.models().len() > member.unanswered().len();
        self.members.iter().any(|member| member.life() != Life::Unknown && has_one(member))
    }

    /// A model that none of its upstreams could answer for, among those that `is_local` does not know.
    pub fn unanswered(&self, is_local: impl Fn(&str) -> bool) -> Option<String> {
        let can = |member: &Member, name: &str| {
            member.can_answer() && member.model(name, true).is_some_and(|theirs| member.can_answer_for(&theirs))
        };
        let mut names = self.members.iter().flat_map(|member| member.unanswered());
        names.find(|name| !is_local(name) && !self.members.iter().any(|member| can(member, name)))
    }

    /// Choices that all of them generate at once.
    pub fn n_places(&self) -> usize {
        self.members.iter().map(|member| member.client.settings().max_concurrent).sum()
    }
}

impl ServedByUpstreams {
    /// When the first of them was put into service.
    pub fn since(&self) -> SystemTime {
        self.members.first().map_or(SystemTime::UNIX_EPOCH, |(member, _)| member.since)
    }

    /// Whether one of them could answer now, as far as is known.
    pub fn can_answer(&self) -> bool {
        self.members.iter().any(|(member, model)| member.can_answer_for(model))
    }
}
