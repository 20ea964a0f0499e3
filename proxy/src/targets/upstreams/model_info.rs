//! Describes a model that only upstreams serve.

use baton_schemas::node::{Memory, ModelFacts, NodeInfo, NodeLoad, Role};
use baton_schemas::ollama::upstream_model::UpstreamModelInfo;
use futures::future::join_all;

use super::{ServedByUpstreams, ServingUpstream, UpstreamServer};

/// The upstreams' description of the model, empty if none answers. The question does not wait for capacity, and a failure
/// does not count against the upstream.
pub async fn model_info(serving: &ServedByUpstreams, request_id: &str) -> UpstreamModelInfo {
    merged(join_all(serving.upstreams.iter().map(|upstream| described(upstream, request_id))).await)
}

/// Describes the model as a node, for `/props` and `/slots`. It has as many slots as those of its upstreams that can answer now
/// generate choices at once, and their current choices occupy them. Unknown values are 0 or empty.
pub async fn node_info(serving: &ServedByUpstreams, request_id: &str) -> (NodeInfo, NodeLoad) {
    let described = model_info(serving, request_id).await;
    let sum = |of: fn(&ServingUpstream) -> usize| {
        let reached = serving.upstreams.iter().filter(|upstream| upstream.server.can_answer());
        u32::try_from(reached.map(of).sum::<usize>()).unwrap_or(u32::MAX)
    };
    let info = NodeInfo {
        model: serving.name.clone(),
        engine: "upstream".to_owned(),
        architecture: described.architecture.unwrap_or_default(),
        n_ctx: described.n_ctx.unwrap_or(0),
        n_ctx_train: described.n_ctx_train.unwrap_or(0),
        n_vocab: 0,
        n_slots: sum(|upstream| capacity(&upstream.server)),
        memory: Memory::default(),
        has_chat_template: false,
        generates: true,
        embedding: None,
        reranking: None,
        // It has one of its own, of weights that are not known here.
        projector: described.sees_images.unwrap_or(false).then(String::new),
        devices: Vec::new(),
        workers: Vec::new(),
        role: Role::default(),
        fingerprint: None,
        kv: None,
        cache_types: None,
        no_handoff: None,
        takes_other_weights: false,
        reports_begin: false,
        hands_over_images: false,
        facts: ModelFacts { n_params: described.n_params.unwrap_or(0), ..ModelFacts::default() },
        process: 0,
        version: String::new(),
    };
    // An upstream that is busy with others has no free slot.
    let active_slots = sum(|ServingUpstream { server, model }| match server.busy_for(model) {
        None => server.places.n_taken().min(capacity(server)),
        Some(_) => capacity(server),
    });
    let queued = sum(|upstream| upstream.server.places.n_wanted());
    (info, NodeLoad { active_slots, queued, ..NodeLoad::default() })
}

fn capacity(server: &UpstreamServer) -> usize {
    server.client.settings().max_concurrent
}

async fn described(upstream: &ServingUpstream, request_id: &str) -> UpstreamModelInfo {
    let ServingUpstream { server, model } = upstream;
    let described = match server.can_answer_for(model) && !server.is_silent() {
        true => server.client.model_info(model, request_id).await.unwrap_or_else(|error| {
            tracing::debug!(request_id, upstream = server.name(), %error, "an upstream does not describe its model");
            UpstreamModelInfo::default()
        }),
        false => UpstreamModelInfo::default(),
    };
    let settings = server.client.settings();
    // As a request with an image would find it.
    let sees_images = settings.images.or(server.listed_sight(model)).or(described.sees_images);
    UpstreamModelInfo { n_ctx: described.n_ctx.or(settings.num_ctx), sees_images, ..described }
}

/// The first description that says anything, with a context that fits every upstream. Images go to those that see them.
fn merged(all: Vec<UpstreamModelInfo>) -> UpstreamModelInfo {
    let n_ctx: Option<Vec<u32>> = all.iter().map(|described| described.n_ctx).collect();
    let n_ctx = n_ctx.and_then(|all| all.into_iter().min());
    let sees_images = all.iter().any(|described| described.sees_images == Some(true)).then_some(true);
    let says_anything = |info: &UpstreamModelInfo| info.architecture.is_some() || !info.capabilities.is_empty();
    UpstreamModelInfo { n_ctx, sees_images, ..all.into_iter().find(says_anything).unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_reported_only_if_every_upstream_has_it() {
        let has = |n_ctx| UpstreamModelInfo { n_ctx, ..UpstreamModelInfo::default() };
        let named = UpstreamModelInfo { architecture: Some("llama".to_owned()), ..has(Some(8192)) };
        let both = merged(vec![has(Some(4096)), named.clone()]);
        assert_eq!((both.n_ctx, both.architecture.as_deref()), (Some(4096), Some("llama")));
        assert_eq!(merged(vec![has(None), named.clone()]).n_ctx, None);
        let seeing = UpstreamModelInfo { sees_images: Some(true), ..has(None) };
        assert_eq!(merged(vec![named.clone(), seeing]).sees_images, Some(true));
        assert_eq!(merged(vec![named]).sees_images, None);
    }
}
