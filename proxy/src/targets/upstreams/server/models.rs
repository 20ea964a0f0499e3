//! The names of an upstream's models, and what its list says of them.

use std::collections::HashSet;

use baton_planner::upstream_learning::LearnedUpstream;
use baton_upstream::{ModelCapability, UpstreamSettings};

use super::{UpstreamHealth, UpstreamServer};
use crate::model_name;

impl UpstreamServer {
    /// Returns true if its models are those that it lists, and it has not listed any yet in a form that can be read.
    pub fn is_unlisted(&self) -> bool {
        let known = self.lock();
        let has_list = known.health == UpstreamHealth::Answering && known.is_list_readable;
        self.client.settings().models.is_empty() && known.listed.is_empty() && !has_list
    }

    /// The upstream's own name for a model. `discovered`: also for listed models that are not configured.
    pub fn model(&self, name: &str, discovered: bool) -> Option<String> {
        let settings = self.client.settings();
        // A server that was found is never a last resort, under no name: another Baton would send the request back.
        if settings.is_adopted && !discovered {
            return None;
        }
        if let Some((_, theirs)) = self.alias(name) {
            return Some(theirs);
        }
        if self.hides(name) {
            return None;
        }
        let named = &settings.models;
        if named.is_empty() && discovered {
            return self.listed(name);
        }
        named.iter().find(|model| model_name::are_same(&model.ours, name)).map(|model| model.theirs.clone())
    }

    /// Our names for its models.
    pub fn models(&self) -> Vec<String> {
        let named = &self.client.settings().models;
        let mut names: Vec<String> = if named.is_empty() {
            self.lock().listed.iter().map(|listed| listed.name.clone()).collect()
        } else {
            named.iter().map(|model| model.ours.clone()).collect()
        };
        let hidden: HashSet<String> = self.client.settings().hidden.iter().map(|name| model_name::key(name)).collect();
        if !hidden.is_empty() {
            names.retain(|name| !hidden.contains(&model_name::key(name)));
        }
        let aliases = self.client.settings().aliases.iter().filter_map(|alias| self.alias(&alias.ours));
        names.extend(aliases.map(|(ours, _)| ours));
        names
    }

    /// What its replies have shown of models, by our names.
    pub fn measured_models(&self) -> Vec<(String, LearnedUpstream)> {
        let shown = self.measures.shown().into_iter();
        shown.filter_map(|(theirs, learned)| Some((self.name_of(&theirs)?, learned))).collect()
    }

    /// Our name for a model that it calls so; an alias only if it has no other name here.
    fn name_of(&self, theirs: &str) -> Option<String> {
        let UpstreamSettings { aliases, models, .. } = self.client.settings();
        let named = models.iter().find(|model| model.theirs == theirs).map(|model| model.ours.clone());
        let listed = || (models.is_empty() && !self.hides(theirs)).then(|| theirs.to_owned());
        let alias = || aliases.iter().find(|alias| alias.theirs == theirs).map(|alias| alias.ours.clone());
        named.or_else(listed).or_else(alias)
    }

    /// Returns true if this name, where it is no alias, means a model of another target.
    fn hides(&self, name: &str) -> bool {
        self.client.settings().hidden.iter().any(|hidden| model_name::are_same(hidden, name))
    }

    /// An alias of this name whose model it serves, with the upstream's own name for that.
    fn alias(&self, name: &str) -> Option<(String, String)> {
        let UpstreamSettings { aliases, models, .. } = self.client.settings();
        let own_name = |theirs: &str| match models.is_empty() {
            true => self.listed(theirs),
            false => models.iter().find(|model| model.theirs == theirs).map(|model| model.theirs.clone()),
        };
        let of_name = aliases.iter().filter(|alias| model_name::are_same(&alias.ours, name));
        of_name.filter_map(|alias| Some((alias.ours.clone(), own_name(&alias.theirs)?))).next()
    }

    /// Our name for the model that a request calls so.
    pub(in crate::targets::upstreams) fn public_name(&self, name: &str) -> Option<String> {
        if let Some((ours, _)) = self.alias(name) {
            return Some(ours);
        }
        if self.hides(name) {
            return None;
        }
        let named = &self.client.settings().models;
        if named.is_empty() {
            return self.listed(name);
        }
        named.iter().find(|model| model_name::are_same(&model.ours, name)).map(|model| model.ours.clone())
    }

    /// The name under which it lists a model.
    fn listed(&self, name: &str) -> Option<String> {
        let known = self.lock();
        let found = known.listed.iter().find(|listed| model_name::are_same(&listed.name, name));
        found.map(|listed| listed.name.clone())
    }

    /// The size of a model's context, by the upstream's own name, if its list has it.
    pub(in crate::targets::upstreams) fn n_ctx(&self, model: &str) -> Option<u32> {
        self.lock().listed.iter().find(|listed| listed.name == model)?.n_ctx
    }

    /// True if a model of that name at the upstream sees images; `None` if its list does not say.
    pub(in crate::targets::upstreams) fn listed_sight(&self, model: &str) -> Option<bool> {
        self.lock().listed.iter().find(|listed| listed.name == model)?.sees_images
    }

    /// The first of these that the model lacks, by the upstream's own name, as the configuration or the list says.
    pub(in crate::targets::upstreams) fn lacks(
        &self,
        model: &str,
        needs: &[ModelCapability],
    ) -> Option<ModelCapability> {
        if let Some(has) = &self.client.settings().capabilities {
            return needs.iter().copied().find(|need| !has.contains(need));
        }
        let known = self.lock();
        let listed = known.listed.iter().find(|listed| listed.name == model)?;
        needs.iter().copied().find(|need| listed.lacks.contains(need))
    }

    /// A model that it serves, by its own name.
    pub(super) fn any_model(&self) -> Option<String> {
        let named = self.client.settings().models.first().map(|model| model.theirs.clone());
        named.or_else(|| self.lock().listed.first().map(|listed| listed.name.clone()))
    }
}
