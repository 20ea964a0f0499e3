//! llama-server's own routes. The JSON itself is in `baton_schemas::llama_server`.

mod state;
mod text;

use baton_schemas::llama_server::{ApplyTemplateBody, DetokenizeBody, TokenizeBody};
use baton_schemas::llama_server::{ApplyTemplateReply, DetokenizeReply, Props, Slot, TokenizeReply};

use super::openapi::{Operation, Routes};

/// All of them but `/health`.
pub(super) fn routes() -> Routes {
    let tokenize = Operation::new("Tokens of a text").takes::<TokenizeBody>().replies::<TokenizeReply>();
    let detokenize = Operation::new("Text of tokens").takes::<DetokenizeBody>().replies::<DetokenizeReply>();
    let template = Operation::new("Prompt of a chat").takes::<ApplyTemplateBody>().replies::<ApplyTemplateReply>();
    let of_model = |operation: Operation| operation.asks("model", "Of which model; by default of the first one");
    let props = of_model(Operation::new("Describe a model and its defaults")).replies::<Props>();
    let slots = of_model(Operation::new("Whether slots are taken"))
        .asks("fail_on_no_slot", "503 if none is free, whatever stands here")
        .replies::<Vec<Slot>>();
    Routes::default()
        .post("/tokenize", text::tokenize, tokenize.of_model())
        .post("/detokenize", text::detokenize, detokenize.of_model())
        .post("/apply-template", text::apply_template, template.of_model())
        .get("/props", state::props, props.of_model())
        .get("/slots", state::list_slots, slots.of_model())
}
