//! The places of a request's sequences on the nodes of a model.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;

use crate::admission::{DEFAULT_MAX_WAIT, Place, RequestPlaces};
use crate::error::RequestError;
use crate::request::failover::StartRetry;
use crate::request::plan::{self, Plan, PlanRequest};
use crate::targets::models::{NodeWait, ServedModel};
use crate::targets::nodes::{FallbackReason, Node};

/// The multiple of the predicted wait for which a request waits for a place on the planned node.
const LATE: f64 = 2.0;

/// The places that a request has on one node for the sequences that start next.
pub struct Seats {
    pub places: RequestPlaces,
    /// All on one node. Empty before the first place, and while the request waits for one on another node.
    pub held: Vec<Place>,
    /// The most sequences that start together.
    n_most: usize,
    wait: NodeWait,
    /// Nodes whose machines were woken for the request.
    woken: Vec<Arc<Node>>,
}

impl Seats {
    /// No places yet, for so many sequences.
    pub fn none(places: RequestPlaces, n_most: usize, wait: NodeWait) -> Seats {
        Seats { places, held: Vec::new(), n_most, wait, woken: Vec::new() }
    }

    /// Waits for a place on any node of the model; also for nodes that are starting. If no node can answer, a machine that sleeps is
    /// woken.
    ///
    /// Errors: the turn did not come in time, or no node is ready.
    pub async fn take_any(&mut self, model: &ServedModel, name: Option<&str>) -> Result<(), RequestError> {
        let mut asleep = Vec::new();
        loop {
            let known = model.places();
            if known.is_empty() {
                asleep = model.decode.iter().filter(|node| node.is_asleep()).map(Arc::clone).collect();
                self.places.note_waking(!asleep.is_empty() && self.wait == NodeWait::ForNodes);
            }
            let place = tokio::select! {
                biased;
                place = self.places.next(&known) => place?,
                // The place comes from the new list.
                changed = model.other_places(name, &known, self.wait) => {
                    changed?;
                    continue;
                }
            };
            self.places.note_waking(false);
            self.woken.extend(asleep.into_iter().filter(|node| place.is_at(&node.places)));
            self.held = vec![place];
            return Ok(());
        }
    }

    /// Wakes the sleeping machines of a plan, and waits for twice the time that they are expected to take. Meanwhile the request has no
    /// place and waits in the queue. Returns false if one of them is not ready then.
    ///
    /// Errors: the queue is full, or the wait took too long.
    async fn wake(&mut self, nodes: &[&Arc<Node>]) -> Result<bool, RequestError> {
        self.held.clear();
        self.places.note_waking(true);
        let outcomes = tokio::select! {
            biased;
            outcomes = join_all(nodes.iter().copied().map(wake_in_time)) => outcomes,
            // There is no target, so no place comes.
            refused = self.places.next(&[]) => return refused.map(|_| false),
        };
        let are_awake = outcomes.into_iter().all(|is_awake| is_awake);
        if are_awake {
            self.woken.extend(nodes.iter().map(|node| Arc::clone(node)));
        }
        Ok(are_awake)
    }

    /// Takes a place on this node instead. If it has none free, the request gives its own back before it waits, so that it
    /// keeps nobody from another node. After `patience` it takes a place on any node. Returns false if it had to wait, or if
    /// other nodes became ready meanwhile: what was planned may be outdated.
    ///
    /// Errors: the turn did not come in time, or no node is ready.
    pub async fn move_to(
        &mut self,
        model: &ServedModel,
        node: &Node,
        patience: Duration,
    ) -> Result<bool, RequestError> {
        if self.held.first().is_some_and(|place| place.is_at(&node.places)) {
            return Ok(true);
        }
        if !self.held.is_empty()
            && let Some(place) = self.places.try_next(&node.places)
        {
            self.held = vec![place];
            return Ok(true);
        }
        self.held.clear();
        let known = model.places();
        let place = tokio::select! {
            biased;
            place = self.places.next(std::slice::from_ref(&node.places)) => place?,
            changed = model.other_places(None, &known, self.wait) => {
                changed?;
                return Ok(false);
            }
            () = tokio::time::sleep(patience) => {
                self.take_any(model, None).await?;
                return Ok(false);
            }
        };
        self.held = vec![place];
        Ok(false)
    }

    /// The node where the places are, as an index of the model's list.
    pub fn node(&self, model: &ServedModel) -> Option<usize> {
        let place = self.held.first()?;
        model.decode.iter().position(|node| place.is_at(&node.places))
    }

    /// Takes the places that are free on the same node, for the sequences that can start together.
    fn fill(&mut self, node: &Node) {
        while self.held.len() < self.n_most
            && let Some(more) = self.places.try_next(&node.places)
        {
            self.held.push(more);
        }
    }
}

/// Wakes a machine, and waits for twice the time that it is expected to take. Returns false if its node is not ready then.
async fn wake_in_time(node: &Arc<Node>) -> bool {
    let expected = node.time_to_wake().and_then(Result::ok).unwrap_or_default();
    node.wake(expected.mul_f64(LATE).min(node.longest_wake())).await
}

/// Plans a request, and takes its places on the planned node. If it had to wait there, it is planned once more, because the
/// nodes have changed meanwhile, and stays on that node. If a machine is woken first, it is planned anew once that is awake, and
/// without machines that sleep if it does not wake.
pub async fn planned(
    request: &PlanRequest<'_>,
    seats: &mut Seats,
    model: &Arc<ServedModel>,
    retry: &StartRetry,
) -> Result<Plan, RequestError> {
    let exclude_prefill = retry.mark().avoided_prefill(model);
    let mut stays = false;
    let mut may_wake = request.may_wake;
    loop {
        let seat = seats.node(model);
        let exclude = match seat.filter(|_| stays) {
            Some(own) => (0..model.decode.len()).filter(|idx| *idx != own).collect(),
            None => retry.exclude(model),
        };
        let request = PlanRequest { seat, exclude: &exclude, exclude_prefill: &exclude_prefill, may_wake, ..*request };
        let plan = plan::plan(model, &request)?.after_waking(&seats.woken);
        let asleep = plan.sleeping();
        if may_wake && !asleep.is_empty() {
            may_wake = false;
            if !seats.wake(&asleep).await? {
                model.fallbacks.count(FallbackReason::NotWoken);
            }
            seats.take_any(model, None).await?;
            continue;
        }
        // The node may be slower than predicted, or hang.
        let patience = plan.prediction.map_or(0.0, |predicted| predicted.queue_ms * LATE / 1e3);
        let patience = Duration::try_from_secs_f64(patience).unwrap_or(DEFAULT_MAX_WAIT);
        if seats.move_to(model, plan.decode(), patience).await? {
            seats.fill(plan.decode());
            return Ok(plan);
        }
        stays = true;
    }
}
