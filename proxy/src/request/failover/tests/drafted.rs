//! A draft node is named wherever a sequence runs: without a handoff, and where it goes on after a loss.

use baton_schemas::node::Role;

use super::*;

/// Notes the draft node that each sequence names.
struct Drafted {
    engine: MortalEngine,
    named: Arc<Mutex<Vec<Option<String>>>>,
}

#[async_trait]
impl EngineWrapper for Drafted {
    fn inner(&self) -> &dyn Engine {
        &self.engine
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        assert!(request.kv_source.is_none(), "nothing is handed over");
        self.named.lock().unwrap().push(request.draft_source.as_ref().map(|source| source.base().to_owned()));
        EngineWrapper::generate(&self.engine, request).await
    }
}

#[tokio::test(start_paused = true)]
async fn direct_generation_and_what_goes_on_after_a_loss_have_a_draft_node() {
    let named: Arc<Mutex<Vec<Option<String>>>> = Arc::default();
    let drafted = |engine| Drafted { engine, named: Arc::clone(&named) };
    let decode = vec![node("mortal", drafted(mortal(3, 9))).await, node("spare", drafted(mortal(0, 0))).await];
    let health = Health::new("draft");
    health.note_answer(Arc::new(NodeInfo { role: Role::Draft, ..sim().info().await.unwrap() }));
    let url = "http://192.0.2.7:9000".to_owned();
    let draft = Node::new("draft".into(), Some(url.clone()), Arc::new(sim()), health);
    let model = ServedModel::new(OnceLock::from("sim".to_owned()), Vec::new(), decode, vec![draft]);
    let (tokens, _, _) = run(&Arc::new(model)).await.unwrap();
    assert_eq!(tokens.len(), 12);
    assert_eq!(*named.lock().unwrap(), [Some(url.clone()), Some(url)]);
}
