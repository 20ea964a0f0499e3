//! Anthropic's dialect: its routes, and the translation of request steps to its events. The JSON types are in
//! `baton_schemas::anthropic`.

mod failure;
mod head;
mod messages;
mod stream;
mod whole;

use super::openapi::Routes;

pub(super) fn routes() -> Routes {
    Routes::of("Anthropic").also_without_v1().post("/v1/messages", messages::create, messages::create_operation()).post(
        "/v1/messages/count_tokens",
        messages::count_tokens,
        messages::count_operation(),
    )
}
