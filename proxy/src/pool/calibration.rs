//! Measures what no request has measured yet, while nobody is waiting.
//!
//! A plan needs a prefill rate and a decode rate of each decode node, a prefill rate of each prefill node, and the rate
//! of each link between them. What is unknown is found out with one short made-up prompt, and links are looked at
//! again from time to time, since a network changes without any request to show it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use baton_schemas::sequence::{CacheScope, Delta};
use baton_schemas::{EngineError, SequenceRequest, Token};
use futures::StreamExt;
use tokio::time::Instant;

use super::{Node, ServedModel, Task};
use crate::plan::cost::Route;

/// How often the pool is looked at.
const INTERVAL: Duration = Duration::from_millis(500);

/// How old a link's measurement may get on idle nodes.
const LINK_AGE: Duration = Duration::from_secs(300);

/// After a measurement that failed.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// One measurement at most.
const DEADLINE: Duration = Duration::from_secs(60);

/// Tokens of a made-up prompt: enough for a rate, little enough for a slow machine.
const PROMPT_TOKENS: u32 = 256;

/// Tokens of its reply.
const OUTPUT_TOKENS: u32 = 8;

/// What there is to find out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Unknown {
    /// Prefill and decode rates of a decode node.
    Decode(usize),
    /// The prefill rate of a prefill node, and a handoff from it to a decode node.
    Prefill(usize, usize),
    /// The rate of a link.
    Link(usize, usize),
}

/// Calibrates a model's nodes until the model is dropped. A model with one route needs no calibration: there is nothing
/// to choose.
pub fn keep_calibrated(model: &Arc<ServedModel>) {
    if model.prefill.is_empty() && model.decode.len() < 2 {
        return;
    }
    let model = Arc::downgrade(model);
    tokio::spawn(async move {
        let mut due: HashMap<Unknown, Instant> = HashMap::new();
        while let Some(model) = model.upgrade() {
            for unknown in unknowns(&model, &due) {
                let measured = tokio::time::timeout(DEADLINE, measure(&model, unknown)).await;
                let again = match measured {
                    Ok(Ok(())) => LINK_AGE,
                    Ok(Err(error)) => {
                        tracing::debug!(?unknown, %error, "not measured");
                        RETRY_AFTER
                    }
                    Err(_) => RETRY_AFTER,
                };
                due.insert(unknown, Instant::now() + again);
            }
            drop(model);
            tokio::time::sleep(INTERVAL).await;
        }
    });
}

fn unknowns(model: &ServedModel, due: &HashMap<Unknown, Instant>) -> Vec<Unknown> {
    let idle = |node: &Node, task| node.load().active_slots == 0 && node.is_trusted(task);
    let decodes = |node: &Node| model.ready_decode(node).is_some_and(|info| info.generates) && idle(node, Task::Decode);
    let prefills = |node: &Node| node.info().is_some_and(|info| model.bars_prefill(&info).is_none()) && idle(node, Task::Prefill);
    let is_due = |unknown: &Unknown| due.get(unknown).is_none_or(|at| *at <= Instant::now());
    let links = model.routes.view().links;
    let mut found = Vec::new();
    for (d, decode) in model.decode.iter().enumerate().filter(|(_, node)| decodes(node)) {
        let rates = decode.rates();
        if !rates.decode.is_known() || !rates.prefill.is_known() {
            found.push(Unknown::Decode(d));
        }
        for (p, prefill) in model.prefill.iter().enumerate().filter(|(_, node)| prefills(node)) {
            if prefill.url.is_none() || prefill.name == decode.name {
                continue;
            }
            found.push(Unknown::Link(p, d));
            // A tail that one handoff does not show, on a slow link, more of them do not either.
            let tried = due.contains_key(&Unknown::Prefill(p, d));
            if !prefill.rates().prefill.is_known() || (links[p][d].tail_ms <= 0.0 && !tried) {
                found.push(Unknown::Prefill(p, d));
            }
        }
    }
    found.retain(is_due);
    found
}

async fn measure(model: &ServedModel, unknown: Unknown) -> Result<(), EngineError> {
    match unknown {
        Unknown::Decode(decode) => try_out(model, Route { decode, prefill: None }).await,
        Unknown::Prefill(prefill, decode) => try_out(model, Route { decode, prefill: Some(prefill) }).await,
        Unknown::Link(prefill, decode) => {
            let Some(source) = model.prefill[prefill].kv_source() else { return Ok(()) };
            let link = model.decode[decode].engine.measure_link(&source).await?;
            model.routes.learn_link(prefill, decode, |known| {
                known.learn_probe(link.rtt_ms, link.n_bytes, link.seconds);
            });
            Ok(())
        }
    }
}

/// Sends a made-up prompt that nothing has cached down a route, in a cache scope of its own and with nothing kept on
/// the decode node.
async fn try_out(model: &ServedModel, route: Route) -> Result<(), EngineError> {
    let node = &model.decode[route.decode];
    let Some(info) = node.info() else { return Ok(()) };
    let n_prompt = PROMPT_TOKENS.min(info.n_ctx.saturating_sub(OUTPUT_TOKENS + 1)).max(1);
    let request = SequenceRequest {
        prompt: (0..n_prompt).map(|_| rand::random_range(0..info.n_vocab.max(1)) as Token).collect(),
        max_tokens: Some(OUTPUT_TOKENS),
        ignore_eos: true,
        ephemeral: true,
        cache_scope: CacheScope(rand::random()),
        kv_source: route.prefill.and_then(|p| model.prefill[p].kv_source()),
        ..SequenceRequest::default()
    };
    let mut deltas = node.engine.generate(request).await?;
    while let Some(delta) = deltas.next().await {
        match delta? {
            Delta::Handoff(timings) => model.learn_handoff(route, &timings),
            Delta::Finished { timings, .. } => model.learn_stream(route, &timings),
            Delta::Started { .. } | Delta::Token(_) => {}
        }
    }
    Ok(())
}
