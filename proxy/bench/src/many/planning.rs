//! The cost of a plan in this process, with the endpoint's own planner and nodes whose rates are known.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_planner::rates::Curve;
use baton_proxy::request::plan::{PlanRequest, plan};
use baton_proxy::serve::CommandFailure;
use baton_proxy::targets::models::ServedModel;
use baton_proxy::targets::nodes::{Health, Node};
use baton_schemas::node::Role;
use baton_schemas::{CacheScope, Token};
use baton_tryout::stats::percentile;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

/// Plans of a round.
const N_PLANS: usize = 2_000;

/// Plans before the first round.
const N_WARM_UP: usize = 200;

/// Tokens of a prompt.
const N_PROMPT: usize = 1_000;

/// Earlier prompts that the endpoint remembers of each node.
const N_REMEMBERED: usize = 50;

/// The figures of a cluster's plans, microseconds.
#[derive(Debug, Serialize)]
pub(super) struct PlanningFigures {
    pub(super) n_nodes: u32,
    pub(super) n_prefill: usize,
    /// Routes that each plan looks at.
    pub(super) n_routes: usize,
    /// By round.
    pub(super) p50_us: Vec<f64>,
    pub(super) p99_us: Vec<f64>,
}

/// Measures plans for nodes that all generate, and for as many of which half compute prompts for the others.
pub(super) async fn measure(n_nodes: u32, n_rounds: u32) -> Result<Vec<PlanningFigures>, CommandFailure> {
    let mut figures = Vec::new();
    for n_prefill in [0, n_nodes as usize / 2] {
        if n_prefill == 0 && !figures.is_empty() {
            break;
        }
        let n_decode = n_nodes as usize - n_prefill;
        eprintln!("plans with {n_decode} nodes that generate, {n_prefill} that compute prompts");
        let model = cluster(n_decode, n_prefill).await?;
        let (p50_us, p99_us) = tokio::task::spawn_blocking(move || times(&model, n_rounds)).await??;
        figures.push(PlanningFigures { n_nodes, n_prefill, n_routes: n_decode * (1 + n_prefill), p50_us, p99_us });
    }
    Ok(figures)
}

async fn cluster(n_decode: usize, n_prefill: usize) -> Result<Arc<ServedModel>, CommandFailure> {
    let (mut decode, mut prefill) = (Vec::new(), Vec::new());
    for i in 0..n_decode {
        decode.push(node(i, Role::Decode).await?);
    }
    for i in 0..n_prefill {
        prefill.push(node(n_decode + i, Role::Prefill).await?);
    }
    let model = ServedModel::new(OnceLock::from("sim".to_owned()), Vec::new(), decode, prefill);
    for (p, d) in (0..n_prefill).flat_map(|p| (0..n_decode).map(move |d| (p, d))) {
        model.routes.learn_link(p, d, |link| {
            link.bytes_per_second = 1.25e9;
            link.rtt_ms = 0.2;
            link.lossless.per_token = 131_072.0;
        });
    }
    Ok(Arc::new(model))
}

/// A node whose rates differ a little from those of the others.
async fn node(i: usize, role: Role) -> Result<Arc<Node>, CommandFailure> {
    let engine = Arc::new(SimEngine::new(SimConfig { n_ctx: 8_192, ..SimConfig::default() }));
    let mut info = engine.info().await?;
    info.role = role;
    let health = Health::new(format!("node {i}"));
    health.note_answer(Arc::new(info));
    let url = format!("http://127.0.0.1:{}", 10_000 + i);
    let node = Node::new(format!("node {i}"), Some(url), engine as Arc<dyn Engine>, health);
    let speed = 1.0 + i as f64 / 100.0;
    node.learn(|rates| {
        rates.prefill = Curve::constant(1_000.0 * speed);
        rates.decode = Curve::constant(40.0 / speed);
    });
    let mut random = StdRng::seed_from_u64(i as u64);
    for _ in 0..N_REMEMBERED {
        node.remember(CacheScope::SHARED, &prompt(&mut random));
    }
    Ok(node)
}

fn prompt(random: &mut StdRng) -> Vec<Token> {
    (0..N_PROMPT).map(|_| random.random_range(0..256)).collect()
}

/// The 50th and 99th percentiles of each round.
fn times(model: &Arc<ServedModel>, n_rounds: u32) -> Result<(Vec<f64>, Vec<f64>), CommandFailure> {
    let mut random = StdRng::seed_from_u64(1_000_000);
    let mut one = || -> Result<f64, CommandFailure> {
        let tokens = prompt(&mut random);
        let request = PlanRequest { max_tokens: Some(200), ..PlanRequest::of_tokens(&tokens, CacheScope::SHARED) };
        let began = Instant::now();
        let planned = plan(model, &request);
        let took = began.elapsed();
        planned.map_err(|error| CommandFailure(error.to_string()))?;
        Ok(took.as_secs_f64() * 1e6)
    };
    for _ in 0..N_WARM_UP {
        one()?;
    }
    let mut rounds = (Vec::new(), Vec::new());
    for _ in 0..n_rounds {
        let times = (0..N_PLANS).map(|_| one()).collect::<Result<Vec<f64>, _>>()?;
        rounds.0.push(percentile(&times, 50.0));
        rounds.1.push(percentile(&times, 99.0));
    }
    Ok(rounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_node_and_link_of_the_measured_cluster_is_open_and_predicted() {
        let model = cluster(3, 2).await.unwrap();
        let tokens = prompt(&mut StdRng::seed_from_u64(1));
        let explained =
            baton_proxy::request::plan::explain(&model, &PlanRequest::of_tokens(&tokens, CacheScope::SHARED));
        assert_eq!(explained.candidates.len(), 9);
        assert!(explained.candidates.iter().all(|candidate| candidate.prediction.is_some()));
        assert!(explained.choice.is_some());
    }
}
