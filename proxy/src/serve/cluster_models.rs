//! The model files of all machines: asks each for its own, and passes orders on to the machine that they are about.

use std::sync::Arc;
use std::time::Duration;

use baton_fetch::fetched::is_model_name;
use baton_schemas::EngineError;
use baton_schemas::machine_models::{ClusterModels, ClusterOrder, MachineReport, ModelOrder, OrderTaken};
use futures::future::join_all;
use tokio::time::timeout;

use super::models_folder::ModelsFolder;
use super::own_models::OwnModels;
use crate::error::RequestError;
use crate::http::baton::models::LOCAL;
use crate::model_name;
use crate::targets::models::{ModelPool, ServedModel};
use crate::targets::nodes::Node;

/// How long a machine may take to list its files.
const REPORT_DEADLINE: Duration = Duration::from_secs(5);

/// The machines of an endpoint: its own, and those of its nodes.
pub(super) struct Machines<'a> {
    /// The models of this machine; `None` in tests.
    pub own: Option<&'a Arc<OwnModels>>,
    pub pool: &'a ModelPool,
}

/// A machine that can be asked.
enum ModelHost<'a> {
    Local(&'a Arc<OwnModels>, &'a ModelsFolder),
    Node(Arc<Node>),
}

impl Machines<'_> {
    /// The files of all machines, asked at once.
    pub(super) async fn report(&self) -> ClusterModels {
        let local = self.local().map(|(_, folder)| async {
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
                    ModelHost::Local(..) => None,
                };
                let from = from.ok_or_else(|| RequestError::InvalidField {
                    field: "from",
                    problem:
                        "is a machine on which no node listens, so no other can fetch from it: run `baton node` there"
                            .to_owned(),
                })?;
                (self.find("to", &to)?, ModelOrder::Copy { model, from })
            }
            ClusterOrder::Pull { model, on, name } => return self.pull(model, &on, name).await,
            ClusterOrder::Name { model, name } => {
                self.check_new_name(&name)?;
                let (own, _) = self.local().ok_or_else(|| EngineError::invalid("this machine has no models folder"))?;
                own.add_name(&model, &name).await?;
                return Ok(OrderTaken::default());
            }
            ClusterOrder::Delete { model, on } => (self.find("on", &on)?, ModelOrder::Delete { model }),
            ClusterOrder::Cancel { on } => (self.find("on", &on)?, ModelOrder::Cancel),
        };
        let taken = match (machine, order) {
            (ModelHost::Local(own, _), ModelOrder::Delete { model }) => delete(Arc::clone(own), model).await,
            (ModelHost::Local(own, folder), order) => {
                let model = order.fetches().unwrap_or_default().to_owned();
                folder.order_then(order, serve_arrived(Arc::clone(own), model, None)).await
            }
            (ModelHost::Node(node), order) => node.engine.order_models(&order).await,
        };
        taken.map_err(RequestError::Engine)
    }

    /// Fetches a model from a hub to a machine. This one serves it then, under `name`.
    async fn pull(&self, model: String, on: &str, name: Option<String>) -> Result<OrderTaken, RequestError> {
        let machine = self.find("on", on)?;
        if let Some(name) = &name {
            self.check_new_name(name)?;
        }
        let order = ModelOrder::Pull { model: model.clone() };
        let taken = match machine {
            ModelHost::Local(own, folder) => {
                folder.order_then(order, serve_arrived(Arc::clone(own), model, name)).await
            }
            ModelHost::Node(_) if name.is_some() => {
                let problem = "is for the endpoint's own machine: a node serves what it is started with".to_owned();
                return Err(RequestError::InvalidField { field: "name", problem });
            }
            ModelHost::Node(node) => node.engine.order_models(&order).await,
        };
        taken.map_err(RequestError::Engine)
    }

    /// Checks a name that a model is to get.
    fn check_new_name(&self, name: &str) -> Result<(), RequestError> {
        let refused = |problem: &str| Err(RequestError::InvalidField { field: "name", problem: problem.to_owned() });
        if !is_model_name(name) {
            return refused("must have 1 to 200 printable characters, without spaces");
        }
        let is_known = |model: &Arc<ServedModel>| model.names().any(|known| model_name::are_same(known, name));
        match self.pool.models().iter().any(is_known) {
            true => refused("is the name of another model"),
            false => Ok(()),
        }
    }

    fn local(&self) -> Option<(&Arc<OwnModels>, &ModelsFolder)> {
        self.own.and_then(|own| Some((own, own.folder.as_ref()?)))
    }

    fn find(&self, field: &'static str, name: &str) -> Result<ModelHost<'_>, RequestError> {
        if let Some((own, folder)) = self.local().filter(|_| name == LOCAL) {
            return Ok(ModelHost::Local(own, folder));
        }
        let nodes = self.pool.remote_nodes();
        if let Some(node) = nodes.iter().find(|node| node.name == name) {
            return Ok(ModelHost::Node(Arc::clone(node)));
        }
        let names = self.local().map(|_| LOCAL).into_iter().chain(nodes.iter().map(|node| &*node.name));
        let names = Vec::from_iter(names).join(", ");
        Err(RequestError::InvalidField { field, problem: format!("names no machine; there are: {names}") })
    }
}

/// Serves a model once it has arrived on this machine.
async fn serve_arrived(own: Arc<OwnModels>, model: String, name: Option<String>) -> Result<(), String> {
    own.serve_arrived(&model, name.as_deref()).await
}

/// Deletes in a task of its own: a client that hangs up must not leave a model that is neither served nor deleted.
async fn delete(own: Arc<OwnModels>, model: String) -> Result<OrderTaken, EngineError> {
    let deleted = tokio::spawn(async move { own.delete(&model).await }).await;
    deleted.map_err(EngineError::internal)?.map(|()| OrderTaken::default())
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
