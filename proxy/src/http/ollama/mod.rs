//! Ollama's dialect: its routes, and the translation of request steps to its lines. The JSON types are in
//! `baton_schemas::ollama`.

mod answer;
mod chat;
mod copy;
mod delete;
mod embed;
mod failure;
mod generate;
mod line;
mod model_name;
mod models;
mod pull;
mod stream;
mod unsupported;
mod whole;

use baton_schemas::ollama::OllamaCopyBody;
use baton_schemas::ollama::embed::{EmbedReply, OlderEmbedReply};
use baton_schemas::ollama::model::{OllamaModelList, Show};
use baton_schemas::ollama::reply::OllamaReplyLine;
use baton_schemas::ollama::{ModelBody, OlderEmbedBody, OllamaChatBody, OllamaEmbedBody, OllamaGenerateBody};
use baton_schemas::ollama::{OllamaPullProgress, Version};

use super::openapi::{Operation, Routes};

/// All routes under `/api`.
pub(super) fn routes() -> Routes {
    let generates = |summary| {
        let operation = Operation::new(summary).replies::<OllamaReplyLine<'_>>().streams_lines::<OllamaReplyLine<'_>>();
        operation.planned()
    };
    let lists = |summary| Operation::new(summary).replies::<OllamaModelList>();
    let show = Operation::new("Describe a model").takes::<ModelBody>().replies::<Show>().of_model();
    let pull =
        Operation::new("Check that a model is present, or fetch it").takes::<ModelBody>().fails(&[404, 500, 503]);
    let pull = pull.replies::<OllamaPullProgress>().streams_lines::<OllamaPullProgress>();
    let delete = Operation::new("Delete a model's files on this machine").takes::<ModelBody>();
    let delete = delete.replies_text("text/plain").fails(&[500]);
    let copy = Operation::new("Give a model that was fetched a second name").takes::<OllamaCopyBody>();
    let copy = copy.replies_text("text/plain").fails(&[404, 500]);
    let embed = Operation::new("Compute the embeddings of texts").takes::<OllamaEmbedBody>().replies::<EmbedReply>();
    let older =
        Operation::new("Compute the embedding of a text").takes::<OlderEmbedBody>().replies::<OlderEmbedReply>();
    let version = Operation::new("The version of Ollama's API that is served").replies::<Version>();
    let refused = || Operation::new("Refused: the operator chooses the models").unlisted();
    Routes::of("Ollama")
        .post("/api/chat", chat::chat, generates("Continue a chat").takes::<OllamaChatBody>())
        .post("/api/generate", generate::generate, generates("Answer or continue a text").takes::<OllamaGenerateBody>())
        .post("/api/embed", embed::embed, embed.of_model())
        .post("/api/embeddings", embed::embed_older, older.of_model())
        .get("/api/tags", models::tags, lists("List the models"))
        .get("/api/ps", models::running, lists("List the models that are ready"))
        .post("/api/show", models::show, show)
        .post("/api/pull", pull::pull, pull)
        .get("/api/version", models::version, version)
        .post("/api/create", unsupported::change, refused())
        .post("/api/copy", copy::copy, copy)
        .post("/api/push", unsupported::change, refused())
        .delete("/api/delete", delete::delete, delete)
        .head("/api/blobs/{digest}", unsupported::change, refused())
        .post("/api/blobs/{digest}", unsupported::change, refused())
}
