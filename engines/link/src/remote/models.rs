//! Reads the model files of another node.

use baton_schemas::EngineError;
use baton_schemas::machine_models::ModelOnDisk;
use baton_schemas::node::BASE_PATH;
use http::header::AUTHORIZATION;
use reqwest::{Client, Url};

use super::calls::{CALL_TIMEOUT, read};

/// A node that may be sent the cluster key, and the way to it.
pub struct ModelSource {
    /// A client that reaches it.
    pub client: Client,
    base: String,
    /// The cluster key.
    pub key: String,
}

impl ModelSource {
    pub(crate) fn new(client: Client, base: &str, key: &str) -> ModelSource {
        ModelSource { client, base: base.to_owned(), key: key.to_owned() }
    }

    /// Asks for the description of a model's files. A file without a checksum is being read there.
    pub async fn offer(&self, model: &str) -> Result<ModelOnDisk, EngineError> {
        let mut url = self.url("models/offer")?;
        url.query_pairs_mut().append_pair("model", model);
        let call = self.client.get(url).header(AUTHORIZATION, format!("Bearer {}", self.key));
        read(call.timeout(CALL_TIMEOUT).send().await).await
    }

    /// The call that sends a file; its query names the `model` and the `file`.
    pub fn files_url(&self) -> Result<Url, EngineError> {
        self.url("models/file")
    }

    fn url(&self, call: &str) -> Result<Url, EngineError> {
        let url = Url::parse(&format!("{}{BASE_PATH}/{call}", self.base));
        url.map_err(|error| EngineError::internal(format!("the node's address is no URL: {error}")))
    }
}
