//! `POST /api/pull`: succeeds for a model that is served. Others are fetched to this machine, for an operator and if the
//! configuration allows it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_schemas::EngineError;
use baton_schemas::json_output::write_line;
use baton_schemas::machine_models::{ClusterOrder, ModelTransfer, TransferState};
use baton_schemas::ollama::{ModelRequest, OllamaErrorReply, OllamaPullProgress};
use bytes::{Bytes, BytesMut};
use futures::Stream;
use http::{HeaderValue, header};
use sha2::{Digest, Sha256};

use super::failure::{self, OllamaFailure};
use super::model_name::{to_fetch, without_tag};
use crate::error::RequestError;
use crate::http::baton::models::{LOCAL, may_manage};
use crate::http::body::ReadBody;
use crate::http::{HttpBackend, HttpFailure, HttpState};
use crate::request::caller::Caller;
use crate::request::models;

/// The pause between two lines of progress.
const INTERVAL: Duration = Duration::from_millis(500);

/// Answers like Ollama. A model that is fetched is served under the name by which the client asked for it.
pub(super) async fn pull(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: ReadBody,
) -> Result<Response, OllamaFailure> {
    let request = body?.parse(ModelRequest::parse).await?;
    let failed = |error: &RequestError| OllamaFailure::of_request(error, &caller.request_id);
    if let Err(missing) = models::find(state.models_for(&caller), &request.model) {
        if !state.access.load().manages_models {
            let OllamaFailure(mut failure) = failed(&missing);
            failure.error.message += ": this server fetches models only with 'allow_model_management = true'";
            return Err(OllamaFailure(failure));
        }
        may_manage(&state, &caller)?;
        let name = Some(without_tag(&request.model).to_owned());
        let order = ClusterOrder::Pull { model: to_fetch(&request.model).to_owned(), on: LOCAL.to_owned(), name };
        let taken = state.backend.order_models(order).await.map_err(|error| failed(&error))?;
        let pull = RunningPull { backend: Arc::clone(&state.backend), number: taken.transfer.unwrap_or_default() };
        return match request.stream {
            true => Ok(lines(Body::from_stream(pull.progress()))),
            false => pull.end().await.map_err(|error| failed(&error)),
        };
    }
    if !request.stream {
        return Ok(Json(OllamaPullProgress::of("success")).into_response());
    }
    let mut written = BytesMut::new();
    write_line(&mut written, &OllamaPullProgress::of("pulling manifest"));
    write_line(&mut written, &OllamaPullProgress::of("success"));
    Ok(lines(Body::from(written.freeze())))
}

fn lines(body: Body) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"))], body).into_response()
}

/// A model on its way to this machine. Dropping it ends the transfer, as in Ollama, and no later one; what has arrived is kept.
struct RunningPull {
    backend: Arc<dyn HttpBackend>,
    number: u64,
}

impl RunningPull {
    /// Its transfer. `None`: a later one has begun.
    fn transfer(&self) -> Option<ModelTransfer> {
        self.backend.model_transfer().filter(|transfer| transfer.number == self.number)
    }

    /// Lines of progress, then one with the outcome.
    fn progress(self) -> impl Stream<Item = Result<Bytes, Infallible>> {
        async_stream::stream! {
            yield Ok(line(&OllamaPullProgress::of("pulling manifest")));
            loop {
                let transfer = self.transfer();
                match outcome(transfer.as_ref()) {
                    Some(Ok(())) => {
                        yield Ok(line(&OllamaPullProgress::of("verifying sha256 digest")));
                        yield Ok(line(&OllamaPullProgress::of("success")));
                        break;
                    }
                    Some(Err(error)) => {
                        let reply: OllamaErrorReply = failure::line(HttpFailure::from(&error));
                        yield Ok(line(&reply));
                        break;
                    }
                    None => {}
                }
                if let Some(ModelTransfer { model, done_bytes, total_bytes: Some(total), .. }) = transfer {
                    yield Ok(line(&OllamaPullProgress {
                        status: format!("pulling {model}").into(),
                        digest: Some(digest_of(&model)),
                        total: Some(total),
                        completed: Some(done_bytes),
                    }));
                }
                tokio::time::sleep(INTERVAL).await;
            }
        }
    }

    /// The reply to a client that wants only the outcome.
    async fn end(self) -> Result<Response, RequestError> {
        loop {
            if let Some(outcome) = outcome(self.transfer().as_ref()) {
                return outcome.map(|()| Json(OllamaPullProgress::of("success")).into_response());
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

impl Drop for RunningPull {
    fn drop(&mut self) {
        self.backend.cancel_transfer(self.number);
    }
}

/// Tells a model from others in the form of Ollama's digests. Clients in Go cut twelve digits out of it, and end if there are none.
fn digest_of(model: &str) -> String {
    let hash = Sha256::digest(model.as_bytes());
    hash.iter().fold("sha256:".to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

fn line(value: &impl serde::Serialize) -> Bytes {
    let mut written = BytesMut::new();
    write_line(&mut written, value);
    written.freeze()
}

/// How a transfer ended; `None` while it runs.
fn outcome(transfer: Option<&ModelTransfer>) -> Option<Result<(), RequestError>> {
    let failed = |problem: &str| Some(Err(RequestError::Engine(EngineError::invalid(problem))));
    let Some(transfer) = transfer else { return failed("the transfer has ended") };
    match transfer.state {
        TransferState::Preparing | TransferState::Receiving => None,
        TransferState::Done => match &transfer.problem {
            None => Some(Ok(())),
            Some(problem) => failed(problem),
        },
        TransferState::Failed => failed(transfer.problem.as_deref().unwrap_or("the transfer failed")),
        TransferState::Cancelled => failed("the transfer was cancelled"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_digests_that_clients_can_cut() {
        let digests = ["smollm2", "me/one:Q8_0", "\u{fc}"].map(digest_of);
        assert!(
            digests.iter().all(|digest| digest.len() == 71 && digest[7..19].bytes().all(|b| b.is_ascii_hexdigit()))
        );
        assert!(digests[0] != digests[1] && digests[0] == digest_of("smollm2"));
    }
}
