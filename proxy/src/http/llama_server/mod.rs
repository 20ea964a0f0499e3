//! llama-server's dialect: its own routes. The JSON types are in `baton_schemas::llama_server`.

mod apply_template;
mod generate;
mod health;
mod load;
mod props;
mod rerank;
mod tokenize;

use baton_schemas::llama_server::generate::{
    InfillBody, LlamaCompletion, LlamaCompletionBody, LlamaCompletionChunk, LlamaEmbedding, LlamaEmbeddingBody,
    LlamaReply,
};
use baton_schemas::llama_server::load::{ModelLoadBody, ModelLoadReply};
use baton_schemas::llama_server::rerank::{RerankBody, RerankReply};
use baton_schemas::llama_server::{ApplyTemplateBody, DetokenizeBody, TokenizeBody};
use baton_schemas::llama_server::{ApplyTemplateReply, DetokenizeReply, Props, SlotInfo, TokenizeReply, TokenizerInfo};

use schemars::{JsonSchema, SchemaGenerator};
use serde::Serialize;

use super::HttpState;
use super::openapi::{Operation, Routes};
use crate::request::caller::Caller;

/// Returns the first model that the caller may use if the client named none.
fn model_or_first(model: String, state: &HttpState, caller: &Caller) -> String {
    if !model.is_empty() {
        return model;
    }
    let first = state.models_for(caller).first().and_then(|model| model.names.first().cloned());
    first.unwrap_or_default()
}

/// An event of a stream.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes the events")]
enum LlamaEvent<'a> {
    More(LlamaCompletionChunk<'a>),
    Last(Box<LlamaCompletion>),
}

pub(super) fn routes() -> Routes {
    let tokenize = Operation::new("Tokenize a text").takes::<TokenizeBody>().replies::<TokenizeReply>();
    let detokenize = Operation::new("Convert tokens to text").takes::<DetokenizeBody>().replies::<DetokenizeReply>();
    let template =
        Operation::new("Render the prompt of a chat").takes::<ApplyTemplateBody>().replies::<ApplyTemplateReply>();
    let of_model = |operation: Operation| operation.asks("model", "The model; by default the first one");
    let props = of_model(Operation::new("Describe a model and its defaults")).replies::<Props>();
    let slots = of_model(Operation::new("List the slots and their state"))
        .asks("fail_on_no_slot", "Any value: answer 503 if no slot is free")
        .replies::<Vec<SlotInfo>>();
    let generates = |operation: Operation| {
        let events = |generator: &mut SchemaGenerator| generator.subschema_for::<LlamaEvent<'_>>();
        operation.replies::<LlamaReply>().streams(events).planned()
    };
    let complete = Operation::new("Continue a text").takes::<LlamaCompletionBody>();
    let infill = Operation::new("Fill a gap in a text").takes::<InfillBody>();
    let embed =
        Operation::new("Compute the vectors of texts").takes::<LlamaEmbeddingBody>().replies::<Vec<LlamaEmbedding>>();
    let tokenizer = of_model(Operation::new("Describe a model's tokenizer, as vLLM does")).replies::<TokenizerInfo>();
    let rerank = Operation::new("Score documents for a query, with a reranker").takes::<RerankBody>();
    let rerank = rerank.replies::<RerankReply>().of_model();
    let loads = |summary| Operation::new(summary).takes::<ModelLoadBody>().replies::<ModelLoadReply>().of_model();
    Routes::of("llama-server")
        .post("/completion", generate::complete, generates(complete))
        .post("/infill", generate::infill, generates(infill))
        .post("/embedding", generate::embed, embed.of_model())
        .post("/tokenize", tokenize::tokenize, tokenize.of_model())
        .post("/detokenize", tokenize::detokenize, detokenize.of_model())
        .post("/apply-template", apply_template::apply_template, template.of_model())
        .get("/tokenizer_info", props::tokenizer_info, tokenizer.of_model())
        .get("/props", props::props, props.of_model())
        .get("/slots", props::list_slots, slots.of_model())
        .post("/models/load", load::load, loads("Load a model, for operators"))
        .post("/models/unload", load::unload, loads("Unload a model, for operators"))
        .get("/health", health::health, health::operation())
        .get("/v1/health", health::health, health::operation().unlisted())
        .also_without_v1()
        .post("/v1/rerank", rerank::rerank, rerank.clone())
        .post("/v1/reranking", rerank::rerank, rerank.clone().unlisted())
        .post("/v2/rerank", rerank::rerank, rerank.unlisted())
}
