//! The model files of all machines: asks each for its own, and passes orders on to the machine that they are about.

use std::sync::Arc;
use std::time::Duration;

use baton_schemas::EngineError;
use baton_schemas::machine_models::{ClusterModels, ClusterOrder, MachineReport, ModelOrder, OrderTaken};
use futures::future::join_all;
use tokio::time::timeout;

use super::models_folder::ModelsFolder;
use crate::error::RequestError;
use crate::http::baton::models::LOCAL;
use crate::targets::models::ModelPool;
use crate::targets::nodes::Node;

/// How long a machine may take to list its files.
const REPORT_DEADLINE: Duration = Duration::from_secs(5);

/// The machines of an endpoint: its own, and those of its nodes.
pub(super) struct Machines<'a> {
    /// `None`: this machine has no models folder.
    pub folder: Option<&'a ModelsFolder>,
    pub pool: &'a ModelPool,
}

/// A machine that can be asked.
enum ModelHost<'a> {
    Local(&'a ModelsFolder),
    Node(Arc<Node>),
}

impl Machines<'_> {
    /// The files of all machines, asked at once.
    pub(super) async fn report(&self) -> ClusterModels {
        let local = self.folder.map(|folder| async {
            MachineReport { machine: LOCAL.to_owned(), folder: Some(folder.report().await), problem: None }
        });
        let nodes = self.pool.remote_nodes();
        let asked = join_all(nodes.iter().map(|node| async {
            let answer = timeout(REPORT_DEADLINE, node.engine.machine_models()).await;
            let answer =
                answer.unwrap_or_else(|_| Err(EngineError::Unavailable { reason: "it does not answer".into() }));
            let problem = answer.as_ref().err().map(problem);
            MachineReport { machine: node.name.clone(), folder: answer.ok(), problem }
        }));
        let own = match local {
            Some(local) => Some(local.await),
            None => None,
        };
        ClusterModels { machines: own.into_iter().chain(asked.await).collect(), ..ClusterModels::default() }
    }

    /// Passes an order on. Errors: no machine has that name, or it refuses.
    pub(super) async fn order(&self, order: ClusterOrder) -> Result<OrderTaken, RequestError> {
        let (machine, order) = match order {
            ClusterOrder::Copy { model, from, to } => {
                if from == to {
                    let problem = "is the machine that has the model".to_owned();
                    return Err(RequestError::InvalidField { field: "to", problem });
                }
                let from = match self.find("from", &from)? {
                    ModelHost::Node(node) => node.kv_source(),
                    ModelHost::Local(_) => None,
                };
                let from = from.ok_or_else(|| RequestError::InvalidField {
                    field: "from",
                    problem:
                        "is a machine on which no node listens, so no other can fetch from it: run `baton node` there"
                            .to_owned(),
                })?;
                (self.find("to", &to)?, ModelOrder::Copy { model, from })
            }
            ClusterOrder::Pull { model, on } => (self.find("on", &on)?, ModelOrder::Pull { model }),
            ClusterOrder::Delete { model, on } => (self.find("on", &on)?, ModelOrder::Delete { model }),
            ClusterOrder::Cancel { on } => (self.find("on", &on)?, ModelOrder::Cancel),
        };
        let taken = match machine {
            ModelHost::Local(folder) => folder.order(order).await,
            ModelHost::Node(node) => node.engine.order_models(&order).await,
        };
        taken.map_err(RequestError::Engine)
    }

    fn find(&self, field: &'static str, name: &str) -> Result<ModelHost<'_>, RequestError> {
        if let Some(folder) = self.folder.filter(|_| name == LOCAL) {
            return Ok(ModelHost::Local(folder));
        }
        let nodes = self.pool.remote_nodes();
        if let Some(node) = nodes.iter().find(|node| node.name == name) {
            return Ok(ModelHost::Node(Arc::clone(node)));
        }
        let names = self.folder.map(|_| LOCAL).into_iter().chain(nodes.iter().map(|node| &*node.name));
        let names = Vec::from_iter(names).join(", ");
        Err(RequestError::InvalidField { field, problem: format!("names no machine; there are: {names}") })
    }
}

/// Why a node does not tell its files.
fn problem(error: &EngineError) -> String {
    match error {
        // A node that does not know the call.
        EngineError::InvalidRequest { .. } | EngineError::Unsupported { .. } => {
            "its version of Baton does not list its models".to_owned()
        }
        EngineError::Unauthorized => "it has another cluster key".to_owned(),
        _ => "it does not answer".to_owned(),
    }
}
