//! What every subject is asked: the same tokens.

use baton_link::Engine;
use baton_proxy::serve::CommandFailure;
use baton_schemas::generate::Sampling;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::{KeyTag, SequenceRequest, Token};
use baton_tryout::node_process::NodeProcess;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;

use super::args::SpeculateBenchArgs;
use super::cases::SpeculationCase;

/// A request, and its schema as a client writes it.
#[derive(Debug, Clone)]
pub(super) struct SpeculationQuestion {
    pub(super) request: SequenceRequest,
    pub(super) schema: Option<Value>,
}

impl SpeculationQuestion {
    /// The questions of `n_streams` at once. Each has a beginning of its own, so that no prompt is cached.
    pub(super) async fn of_round(
        node: &NodeProcess,
        case: &SpeculationCase,
        round: u32,
        n_streams: u32,
        args: &SpeculateBenchArgs,
    ) -> Result<Vec<SpeculationQuestion>, CommandFailure> {
        let has_template = node.engine.info().await?.has_chat_template;
        let mut questions = Vec::new();
        for stream in 0..n_streams {
            let number = (round * n_streams + stream) * 100 + n_streams;
            let prompt = match has_template {
                true => node.engine.render(&case.conversation(number), KeyTag::NONE).await?,
                false => {
                    let text = case.text(number).into();
                    let text = TokenizeRequest { text, add_special: true, parse_special: false, key: KeyTag::NONE };
                    node.engine.tokenize(&text).await?
                }
            };
            let sampling = Sampling { temperature: args.temperature, seed: u64::from(round), ..Sampling::default() };
            let request = SequenceRequest {
                prompt,
                sampling,
                max_tokens: Some(args.tokens),
                ignore_eos: !has_template,
                constraint: case.constraint()?,
                ..SequenceRequest::default()
            };
            questions.push(SpeculationQuestion { request, schema: case.schema() });
        }
        Ok(questions)
    }

    /// The same question with a prediction of its reply, in which each token is right with this probability.
    pub(super) fn predicting(&self, reply: &[Token], right: f64, seed: u64) -> SpeculationQuestion {
        let mut random = StdRng::seed_from_u64(seed);
        let said = |token: &Token| if random.random::<f64>() < right { *token } else { token.saturating_sub(1) };
        let predicted = reply.iter().map(said).collect();
        SpeculationQuestion {
            request: SequenceRequest { predicted, ..self.request.clone() },
            schema: self.schema.clone(),
        }
    }
}
