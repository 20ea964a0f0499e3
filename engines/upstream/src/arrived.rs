//! Reads replies that have already arrived, with the code that reads them from the network. For the fuzz targets.

use baton_schemas::embed::EmbedTask;
use bytes::Bytes;
use http::HeaderMap;
use tokio::time::Instant;

use crate::kinds::tokens;
use crate::reply::foreign::tree;
use crate::reply::stream::{ReplyReading, deltas};
use crate::reply::{model_list, refusal};
use crate::request::fields::Fields;
use crate::{
    ApiCall, ApiPath, ModelListing, ReplyDelivery, TextStream, TokenQuestion, UpstreamDeadlines, UpstreamError,
    UpstreamKind,
};

impl UpstreamKind {
    /// The deltas of a streamed reply that arrives in these pieces.
    #[doc(hidden)]
    pub fn read_stream(self, wants_logprobs: bool, pieces: Vec<Bytes>, deadlines: UpstreamDeadlines) -> TextStream {
        let mut body = Fields::default();
        if wants_logprobs {
            body.set("logprobs", true);
        }
        let call = ApiCall { path: ApiPath::Api("chat/completions"), form: ReplyDelivery::Streamed, body };
        let protocol = self.protocol();
        let reading = ReplyReading {
            framing: protocol.framing(),
            deadlines,
            first_due: Instant::now() + deadlines.first,
            reader: protocol.delta_reader(&call),
        };
        deltas(futures::stream::iter(pieces.into_iter().map(Ok::<_, String>)), reading, (), drop)
    }

    /// Reads a whole reply as each of the things that it may be. Returns true if it was any of them.
    #[doc(hidden)]
    pub fn read_whole(self, reply: &[u8], n_vectors: usize) -> bool {
        let Ok(reply) = tree(reply) else { return false };
        let protocol = self.protocol();
        let has_names = model_list::read(&reply).is_ok_and(|list| !list.models.is_empty());
        let has_info = protocol.read_model_info("m", &reply) != Default::default();
        let tasks = [EmbedTask::Embed, EmbedTask::Rerank { query: "".into() }];
        let has_vectors = tasks.iter().any(|task| {
            protocol.read_embed_reply(task, &reply, n_vectors).is_ok_and(|read| {
                assert_eq!(read.vectors.len(), n_vectors, "one vector for each text");
                assert!(read.vectors.iter().flatten().all(|value| value.is_finite()), "a value is not finite");
                true
            })
        });
        let has_tokens = tokens::read(TokenQuestion::Detokenize(&[]), &reply).is_ok()
            || tokens::read(TokenQuestion::TokenizeChat(&Default::default()), &reply).is_ok();
        let mut call = ApiCall::new(ApiPath::Api("completions"), []);
        let has_kv = protocol.prefill_steps().is_some_and(|steps| (steps.add_kv)(&mut call, &reply));
        has_names || has_info || has_vectors || has_tokens || has_kv
    }

    /// The models that a reply lists, and how many entries have no name. `None`: it is no list.
    #[doc(hidden)]
    pub fn read_models(reply: &[u8]) -> Option<ModelListing> {
        model_list::read(&tree(reply).ok()?).ok()
    }

    /// The error that a refused call becomes.
    #[doc(hidden)]
    pub fn read_refusal(self, status: u16, headers: &HeaderMap, body: &[u8]) -> UpstreamError {
        refusal::of_status(status, headers, body, "chat/completions")
    }
}
