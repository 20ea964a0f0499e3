//! Finds nodes that cannot do what the configuration gives them to do, or what their name suggests.

use std::fmt;
use std::sync::Arc;

use baton_planner::reason::BarReason;
use baton_schemas::kv::RowTypes;
use baton_schemas::model_difference::ModelDifference;
use baton_schemas::no_handoff::NoHandoffReason;
use baton_schemas::node::NodeInfo;

use super::pool::ModelPool;
use super::served_model::ServedModel;
use crate::targets::nodes::{Node, NodeRefusal, Task};

/// A node that is not used for a task, although it answers. Its text says why and what to do; it names models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnusedNode {
    /// The node.
    pub node: String,
    /// What it was to do.
    pub task: Task,
    /// Why it does not.
    pub cause: UnusedCause,
}

/// Why a node is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnusedCause {
    /// It answers, and works for other endpoints only.
    Refuses {
        /// Why.
        refusal: NodeRefusal,
        /// The same in words, with what differs.
        words: String,
    },
    /// Its role excludes the task.
    WrongRole,
    /// It would generate, but runs other weights than the model of this public name.
    OtherWeights {
        /// The model's public name.
        model: String,
        /// The model that it serves instead; `None` if it serves none.
        serves: Option<String>,
    },
    /// It would compute prompts, but no decode node runs its model.
    OtherModel {
        /// The node's model, by its own name.
        runs: String,
        /// The public name of the model that decode nodes run.
        model: String,
    },
    /// Its KV cache keeps rows in other types than the nodes of the model.
    OtherCacheTypes {
        /// The public name of the model that decode nodes run.
        model: String,
        /// Their types.
        ours: RowTypes,
        /// This node's.
        theirs: RowTypes,
    },
    /// It would compute prompts, but its engine keeps the KV in another form than decode nodes do.
    OtherKvForm {
        /// The public name of the model that decode nodes run.
        model: String,
    },
    /// It would compute prompts, but decode nodes refuse the KV of its weights.
    OtherKv {
        /// The public name of the model that decode nodes run.
        model: String,
    },
    /// It would draft, but has another vocabulary than all nodes that generate.
    OtherVocabulary {
        /// The node's model, by its own name.
        runs: String,
        /// The public name of a model that decode nodes run.
        model: String,
    },
    /// The KV of this model cannot be handed over.
    NoHandoff {
        /// The model's public name.
        model: String,
        /// Why not.
        reason: NoHandoffReason,
    },
}

impl UnusedNode {
    /// The same in words that anyone may see: without models.
    pub fn public_words(&self) -> String {
        let why = match &self.cause {
            UnusedCause::Refuses { refusal: NodeRefusal::OtherKey, .. } => "has another cluster key",
            UnusedCause::Refuses { refusal: NodeRefusal::OtherVersion, .. } => {
                "speaks another version of the node protocol"
            }
            UnusedCause::WrongRole => "has a role that excludes its task",
            UnusedCause::OtherWeights { .. } => "runs other weights than the model it stands for",
            UnusedCause::OtherKv { .. } => "runs other weights than the nodes it would compute prompts for",
            UnusedCause::OtherCacheTypes { .. } => "has a KV cache of other types than the nodes of its model",
            UnusedCause::OtherKvForm { .. } => {
                "keeps its KV in another form than the nodes it would compute prompts for"
            }
            UnusedCause::OtherModel { .. } => "runs another model than the nodes it would compute prompts for",
            UnusedCause::OtherVocabulary { .. } => "has another vocabulary than the nodes it would draft for",
            UnusedCause::NoHandoff { .. } => "runs a model that cannot be handed over",
        };
        format!("{} {why}", self.node)
    }
}

impl fmt::Display for UnusedNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UnusedNode { node, task, cause } = self;
        match (cause, task) {
            (UnusedCause::Refuses { refusal: NodeRefusal::OtherKey, .. }, _) => write!(
                f,
                "{node} is not used: it has another cluster key. Start this endpoint and all nodes with the same \
                 BATON_CLUSTER_KEY"
            ),
            (UnusedCause::Refuses { refusal: NodeRefusal::OtherVersion, words }, _) => {
                write!(f, "{node} is not used: {words}")
            }
            (UnusedCause::WrongRole, Task::Decode) => write!(
                f,
                "{node} is not used: it is to generate (--decode), but only helps others (--role prefill or draft). Name it \
                 with --prefill, or start it with --role both"
            ),
            (UnusedCause::WrongRole, Task::Prefill) => write!(
                f,
                "{node} is not used for prompts: it is to compute them (--prefill), but only generates (--role decode). \
                 Name it with --decode, or start it with --role both"
            ),
            (UnusedCause::OtherWeights { model, serves: Some(serves) }, _) => write!(
                f,
                "{node} runs other weights than the nodes before it: it does not serve {model:?}, only {serves:?}"
            ),
            (UnusedCause::OtherWeights { model, serves: None }, _) => write!(
                f,
                "{node} is not used: what it calls {model:?} are other weights than those served under that name. Start \
                 it with the same weights, or with another --name"
            ),
            (UnusedCause::OtherModel { runs, model }, _) => write!(
                f,
                "{node} is not used for prompts: it runs {runs:?}, and no node generates with that model. Start it with the \
                 file of {model:?}"
            ),
            (UnusedCause::OtherCacheTypes { model, ours, theirs }, task) => write!(
                f,
                "{node} is not used {}{model:?}: its KV cache is {theirs}, and the other nodes of this model keep theirs in \
                 {ours}. Start all with the same --cache-type-k and --cache-type-v",
                match task {
                    Task::Prefill => "for the prompts of ",
                    Task::Decode => "for ",
                }
            ),
            (UnusedCause::OtherKvForm { model }, _) => write!(
                f,
                "{node} is not used for prompts: its engine keeps the KV of {model:?} in another form than the nodes that \
                 generate. Start both with the same --engine"
            ),
            (UnusedCause::OtherKv { model }, _) => write!(
                f,
                "{node} is not used for prompts: the nodes that generate refuse its KV, because its weights are not those \
                 of {model:?}. Start it with the same file, adapters and RoPE options, or start those nodes with \
                 --max-canary-distance"
            ),
            (UnusedCause::OtherVocabulary { runs, model }, _) => write!(
                f,
                "{node} drafts nothing: {runs:?} has another vocabulary than {model:?}. Start it with a smaller model of the same \
                 family"
            ),
            (UnusedCause::NoHandoff { model, reason }, _) => write!(
                f,
                "{node} is not used for prompts: {model:?} {}. Its prompts are computed where it generates, so this node \
                 can serve something else",
                reason.words()
            ),
        }
    }
}

impl ModelPool {
    /// All unused nodes, in the order of the configuration, decode nodes first.
    pub fn unused_nodes(&self) -> Vec<UnusedNode> {
        let undeclared = self.undeclared();
        let models = self.models();
        let refusal = |node: &Node| {
            let status = node.health.status();
            Some(UnusedCause::Refuses { refusal: status.refusal()?, words: status.words.clone() })
        };
        let decode = undeclared.decode.iter().filter_map(|node| {
            let cause = refusal(node).or_else(|| unused_decode(&models, &*node.info()?))?;
            Some(UnusedNode { node: node.name.clone(), task: Task::Decode, cause })
        });
        let prefill = undeclared.prefill.iter().filter_map(|node| {
            let cause = refusal(node).or_else(|| unused_prefill(&models, node, &*node.info()?))?;
            Some(UnusedNode { node: node.name.clone(), task: Task::Prefill, cause })
        });
        decode.chain(prefill).collect()
    }
}

fn public_name(model: &ServedModel) -> String {
    model.name.get().cloned().unwrap_or_default()
}

fn unused_decode(models: &[Arc<ServedModel>], info: &NodeInfo) -> Option<UnusedCause> {
    if !info.role.decodes() {
        return Some(UnusedCause::WrongRole);
    }
    // Until every model's identity is known, a node may still turn out to run one of them.
    if models.iter().any(|model| model.loadable.is_none() && model.identity().is_none()) {
        return None;
    }
    let serves = models.iter().find(|model| model.loadable.is_none() && model.bars_decode(info).is_none());
    let meant = models.iter().find(|model| match serves {
        // The operator has given this name to all nodes.
        Some(_) => model.name_is_configured && model.own_engine.is_none() && model.bars_decode(info).is_some(),
        None => model.has_name(&info.model),
    })?;
    let model = public_name(meant);
    Some(match meant.bars_decode(info) {
        Some(BarReason::Differs(ModelDifference::OtherCacheTypes { ours, theirs })) => {
            UnusedCause::OtherCacheTypes { model, ours, theirs }
        }
        _ => UnusedCause::OtherWeights { model, serves: serves.map(|model| public_name(model)) },
    })
}

fn unused_prefill(models: &[Arc<ServedModel>], node: &Arc<Node>, info: &NodeInfo) -> Option<UnusedCause> {
    if info.role.drafts() {
        let mut with_node = models.iter().filter(|model| model.prefill.iter().any(|known| Arc::ptr_eq(known, node)));
        let first = with_node.next()?;
        let drafts = first.may_draft(info) || with_node.any(|model| model.may_draft(info));
        let cause = || UnusedCause::OtherVocabulary { runs: info.model.clone(), model: public_name(first) };
        return (!drafts).then(cause);
    }
    if !info.role.prefills() {
        return Some(UnusedCause::WrongRole);
    }
    let with_node = models.iter().filter(|model| model.prefill.iter().any(|known| Arc::ptr_eq(known, node)));
    // A single model that uses it, or may still turn out to be its model, is enough.
    let causes: Option<Vec<UnusedCause>> = with_node.map(|model| why_no_kv(model, info)).collect();
    causes?.into_iter().next()
}

/// Why a model does not use the KV of a prefill node; `None` if it does, or may.
fn why_no_kv(model: &ServedModel, info: &NodeInfo) -> Option<UnusedCause> {
    let public = public_name(model);
    match model.bars_prefill(info)? {
        BarReason::Differs(difference) => Some(match difference {
            ModelDifference::OtherModel => UnusedCause::OtherModel { runs: info.model.clone(), model: public },
            ModelDifference::OtherWeights => UnusedCause::OtherKv { model: public },
            ModelDifference::OtherKvForm => UnusedCause::OtherKvForm { model: public },
            ModelDifference::OtherCacheTypes { ours, theirs } => {
                UnusedCause::OtherCacheTypes { model: public, ours, theirs }
            }
        }),
        BarReason::NoHandoff(reason) => Some(UnusedCause::NoHandoff { model: public, reason }),
        _ => None,
    }
}
