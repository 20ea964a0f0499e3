//! Nodes that are up and not used as somebody may expect, because of the weights they run.

use std::fmt;

use baton_schemas::node::NodeInfo;

use super::{Node, Pool, ServedModel};

/// A decode node that does not serve a model it might be thought to serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unused {
    /// The node.
    pub node: String,
    /// The model's public name.
    pub model: String,
    /// The model that it serves instead; `None` if it is not used at all.
    pub serves: Option<String>,
}

impl fmt::Display for Unused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unused { node, model, serves } = self;
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

impl Pool {
    /// All of them, in the order of the configuration.
    pub fn unused(&self) -> Vec<Unused> {
        let models = self.models();
        // Nobody has said yet what a model is: whether a node runs it cannot be told.
        if models.iter().any(|model| model.resident.is_none() && model.identity().is_none()) {
            return Vec::new();
        }
        let name = |model: &ServedModel| model.name.get().cloned().unwrap_or_default();
        let unused = |node: &Node, info: &NodeInfo| {
            let serves = models.iter().find(|model| model.resident.is_none() && model.bars_decode(info).is_none());
            let meant = models.iter().find(|model| match serves {
                // The operator has given the name to all of these nodes.
                Some(_) => model.name_is_configured && !model.has_own_engine && model.bars_decode(info).is_some(),
                None => model.is_called(&info.model),
            });
            meant.map(|meant| Unused {
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
