//! Finds nodes that do not serve the model that they seem to serve, because they run other weights.

use std::fmt;

use baton_schemas::node::NodeInfo;

use super::pool::ModelPool;
use super::served_model::ServedModel;
use crate::targets::nodes::Node;

/// A decode node that does not serve the model that its name or the configuration suggests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnusedNode {
    /// The node.
    pub node: String,
    /// The model's public name.
    pub model: String,
    /// The model that it serves instead; `None` if it serves none.
    pub serves: Option<String>,
}

impl fmt::Display for UnusedNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UnusedNode { node, model, serves } = self;
        match serves {
            Some(serves) => write!(
                f,
                "{node} runs other weights than the nodes before it: it does not serve {model:?}, only {serves:?}"
            ),
            None => write!(
                f,
                "{node} is not used: what it calls {model:?} are other weights than those served under that name. Start \
                 it with the same weights, or with another --name"
            ),
        }
    }
}

impl ModelPool {
    /// All unused nodes, in the order of the configuration.
    pub fn unused_nodes(&self) -> Vec<UnusedNode> {
        let models = self.models();
        // Until every model's identity is known, a node may still turn out to run one of them.
        if models.iter().any(|model| model.loadable.is_none() && model.identity().is_none()) {
            return Vec::new();
        }
        let name = |model: &ServedModel| model.name.get().cloned().unwrap_or_default();
        let unused = |node: &Node, info: &NodeInfo| {
            let serves = models.iter().find(|model| model.loadable.is_none() && model.bars_decode(info).is_none());
            let meant = models.iter().find(|model| match serves {
                // The operator has given this name to all nodes.
                Some(_) => model.name_is_configured && !model.has_own_engine && model.bars_decode(info).is_some(),
                None => model.has_name(&info.model),
            });
            meant.map(|meant| UnusedNode {
                node: node.name.clone(),
                model: name(meant),
                serves: serves.map(|model| name(model)),
            })
        };
        let undeclared = self.undeclared();
        let nodes = undeclared.decode.iter().filter_map(|node| Some((node, node.info()?)));
        let decoding = nodes.filter(|(_, info)| info.role.decodes());
        decoding.filter_map(|(node, info)| unused(node, &info)).collect()
    }
}
