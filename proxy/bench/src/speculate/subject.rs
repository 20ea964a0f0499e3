//! What is measured: Baton and llama-server, each with several drafters.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use baton_link::Engine;
use baton_model::gguf::Gguf;
use baton_model::options::CacheTypes;
use baton_proxy::serve::CommandFailure;
use baton_schemas::handoff::KvSource;
use baton_schemas::sequence::Timings;
use baton_schemas::{SequenceEvent, SequenceRequest};
use baton_tryout::node_process::NodeProcess;
use futures::StreamExt;

use super::args::SpeculateBenchArgs;
use super::guesser::Guesser;
use super::llama_server;
use super::question::SpeculationQuestion;
use super::spoken::Spoken;
use crate::llama_server::PeerServer;

/// The process that answers.
enum SpeculationServer {
    Node(Arc<NodeProcess>),
    Peer(PeerServer),
}

/// A server with a drafter.
pub(super) struct DraftingServer {
    pub(super) guesser: Guesser,
    server: SpeculationServer,
    /// The draft node that its requests name.
    draft_node: Option<NodeProcess>,
}

/// Starts all subjects. The first one is Baton without speculation.
pub(super) async fn start(args: &SpeculateBenchArgs, model: &Path) -> Result<Vec<DraftingServer>, CommandFailure> {
    let n_slots = args.streams.iter().max().copied().unwrap_or(1);
    let key = uuid::Uuid::new_v4().to_string();
    let started = async |model: &Path, more: Vec<OsString>| {
        let mut node_args: Vec<OsString> = vec!["--model".into(), model.into()];
        node_args.extend(["--slots".into(), n_slots.to_string().into()]);
        node_args.extend(args.threads.into_iter().flat_map(|n| ["--threads".into(), n.to_string().into()]));
        node_args.extend(more);
        NodeProcess::start(&key, node_args).await
    };
    let node = async |speculation: &str, draft: Option<&Path>| {
        let mut more: Vec<OsString> = vec!["--speculation".into(), speculation.into()];
        more.extend(draft.into_iter().flat_map(|file| ["--draft".into(), file.into()]));
        started(model, more).await.map(Arc::new)
    };
    let of_node = |guesser, node: &Arc<NodeProcess>| DraftingServer {
        guesser,
        server: SpeculationServer::Node(node.clone()),
        draft_node: None,
    };
    let mut subjects = vec![of_node(Guesser::Nothing, &node("off", None).await?)];
    let lookup = node("auto", None).await?;
    // A model's own head guesses beside prompt lookup.
    let has_head = Gguf::open(model).is_ok_and(|file| file.prediction_head(CacheTypes::default()).is_ok());
    let own = if has_head { Guesser::Head } else { Guesser::PromptLookup };
    subjects.push(of_node(own, &lookup));
    if let Some(draft) = &args.draft {
        subjects.push(of_node(Guesser::DraftModel, &node("auto", Some(draft)).await?));
        let draft_node = started(draft, vec!["--role".into(), "draft".into()]).await?;
        let target = of_node(Guesser::DraftNode, &node("auto", None).await?);
        subjects.push(DraftingServer { draft_node: Some(draft_node), ..target });
    }
    subjects.push(of_node(Guesser::Prediction, &lookup));
    if let Some(program) = &args.peer {
        let of_draft = args.draft.is_some().then_some(Guesser::DraftModel);
        for guesser in [Guesser::Nothing, own].into_iter().chain(of_draft) {
            let server = llama_server::start(program, guesser, args, model, n_slots).await?;
            subjects.push(DraftingServer { guesser, server: SpeculationServer::Peer(server), draft_node: None });
        }
    }
    Ok(subjects)
}

impl DraftingServer {
    /// The server's name in reports.
    pub(super) fn server(&self) -> &'static str {
        match &self.server {
            SpeculationServer::Node(_) => "Baton",
            SpeculationServer::Peer(_) => "llama-server",
        }
    }

    /// True if it is ours.
    pub(super) fn is_baton(&self) -> bool {
        matches!(self.server, SpeculationServer::Node(_))
    }

    /// The node of a subject that is ours.
    pub(super) fn node(&self) -> Result<&NodeProcess, CommandFailure> {
        match &self.server {
            SpeculationServer::Node(node) => Ok(node),
            SpeculationServer::Peer(_) => Err(CommandFailure("llama-server is no node".into())),
        }
    }

    /// The reply to a question.
    pub(super) async fn ask(&self, question: SpeculationQuestion) -> Result<Spoken, CommandFailure> {
        match &self.server {
            SpeculationServer::Node(node) => {
                let draft_source = self.draft_node.as_ref().map(|node| KvSource::at(&node.url));
                reply(node, SequenceRequest { draft_source, ..question.request }).await
            }
            SpeculationServer::Peer(peer) => llama_server::reply(peer, question).await,
        }
    }
}

async fn reply(node: &NodeProcess, request: SequenceRequest) -> Result<Spoken, CommandFailure> {
    let mut spoken = Spoken { tokens: Vec::new(), arrived: Vec::new(), timings: Timings::default() };
    let mut events = node.engine.generate(request).await?;
    while let Some(event) = events.next().await {
        match event? {
            SequenceEvent::Token(token) => {
                spoken.tokens.push(token.id);
                spoken.arrived.push(Instant::now());
            }
            SequenceEvent::Finished { timings, .. } => spoken.timings = timings,
            SequenceEvent::Started { .. } | SequenceEvent::PrefillBegun | SequenceEvent::Handoff(_) => {}
        }
    }
    Ok(spoken)
}
