//! What is known of a model that upstreams alone serve.

use baton_schemas::node::{Memory, ModelFacts, NodeInfo, NodeLoad, Role};
use baton_schemas::ollama::told::ToldModel;
use futures::future::join_all;

use super::{Member, ServedByUpstreams};

/// What its upstreams tell of it. One that does not answer tells nothing: that is no reason to leave it alone, and nobody
/// waits for a place to ask.
pub async fn told(serving: &ServedByUpstreams, request_id: &str) -> ToldModel {
    let asked = serving.members.iter().map(|(member, model)| told_by(member, model, request_id));
    merged(join_all(asked).await)
}

/// The same as `/props` and `/slots` tell of nodes: as many slots as its upstreams generate replies at once, taken by the
/// choices that they are given. What is not known is 0 or empty.
pub async fn info(serving: &ServedByUpstreams, request_id: &str) -> (NodeInfo, NodeLoad) {
    let told = told(serving, request_id).await;
    let sum = |of: fn(&Member, &str) -> usize| {
        let n: usize = serving.members.iter().map(|(member, model)| of(member, model)).sum();
        u32::try_from(n).unwrap_or(u32::MAX)
    };
    let info = NodeInfo {
        model: serving.name.clone(),
        engine: "upstream".to_owned(),
        architecture: told.architecture.unwrap_or_default(),
        n_ctx: told.n_ctx.unwrap_or(0),
        n_ctx_train: told.n_ctx_train.unwrap_or(0),
        n_vocab: 0,
        n_slots: sum(|member, _| n_places(member)),
        memory: Memory::default(),
        has_chat_template: false,
        generates: true,
        embedding: None,
        projector: None,
        devices: Vec::new(),
        role: Role::default(),
        kv: None,
        facts: ModelFacts { n_params: told.n_params.unwrap_or(0), ..ModelFacts::default() },
    };
    // What waits for a place has claimed one, too, and nobody gets one of an upstream that is gone.
    let active_slots = sum(|member, model| match member.can_answer_for(model) {
        true => member.n_claimed().min(n_places(member)),
        false => n_places(member),
    });
    (info, NodeLoad { active_slots, ..NodeLoad::default() })
}

fn n_places(member: &Member) -> usize {
    member.client.settings().max_concurrent
}

async fn told_by(member: &Member, model: &str, request_id: &str) -> ToldModel {
    let told = match member.can_answer_for(model) && !member.is_silent() {
        true => member.client.told(model, request_id).await.unwrap_or_else(|error| {
            tracing::debug!(request_id, upstream = member.name(), %error, "an upstream does not tell of its model");
            ToldModel::default()
        }),
        false => ToldModel::default(),
    };
    ToldModel { n_ctx: told.n_ctx.or(member.client.settings().num_ctx), ..told }
}

/// What the first of them tells that tells anything, with a context that every one of them has.
fn merged(told: Vec<ToldModel>) -> ToldModel {
    let n_ctx: Option<Vec<u32>> = told.iter().map(|told| told.n_ctx).collect();
    let n_ctx = n_ctx.and_then(|all| all.into_iter().min());
    let first = told.into_iter().find(|told| told.architecture.is_some() || !told.capabilities.is_empty());
    ToldModel { n_ctx, ..first.unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_told_only_if_every_upstream_has_it() {
        let has = |n_ctx| ToldModel { n_ctx, ..ToldModel::default() };
        let named = ToldModel { architecture: Some("llama".to_owned()), ..has(Some(8192)) };
        let both = merged(vec![has(Some(4096)), named.clone()]);
        assert_eq!((both.n_ctx, both.architecture.as_deref()), (Some(4096), Some("llama")));
        assert_eq!(merged(vec![has(None), named]).n_ctx, None);
    }
}
