//! `POST /v1/responses`.

mod stream;

use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_schemas::FinishReason;
use baton_schemas::openai::ResponsesRequest;
use baton_schemas::openai::logprobs::TokenLogprob;
use baton_schemas::openai::responses::Head;
use baton_schemas::openai::responses::response::{Part, ResponseUsage};
use futures::StreamExt;
use uuid::Uuid;

use self::stream::ResponseWriter;
use crate::error::RequestError;
use crate::generate::{Caller, Event, TokenLogprobs};
use crate::http::body::JsonBody;
use crate::http::route_header::insert_route;
use crate::http::steps::{DrainDeadline, Step, Steps, steps};
use crate::http::tally::Tally;
use crate::http::{Failure, HttpState, streamed};

/// Reads, generates, answers.
pub async fn create(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Option<Extension<DrainDeadline>>,
    JsonBody(body): JsonBody,
) -> Result<Response, Failure> {
    let ResponsesRequest { generate, stream, echo } = ResponsesRequest::parse(&body, rand::random())?;
    // Not held while the answer is made: 32 slow streams would keep 32 bodies.
    drop(body);
    let head = Head {
        id: format!("resp_{}", Uuid::new_v4().simple()),
        item_id: format!("msg_{}", Uuid::new_v4().simple()),
        created_at: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        model: generate.model.clone(),
        echo,
    };
    let steps = steps(state.backend, generate, caller.clone(), drain.map(|Extension(drain)| drain).unwrap_or_default());
    let response = if stream {
        streamed::respond(steps, ResponseWriter::new(head), &state.config, &caller).await
    } else {
        whole(steps, head).await
    };
    response.map_err(|error| Failure::of_request(&error, &caller.request_id))
}

/// Waits for all of a request. Dropping the future cancels it.
async fn whole(mut steps: Steps, head: Head) -> Result<Response, RequestError> {
    let (mut text, mut chosen_route) = (Text::new(), String::new());
    while let Some(step) = steps.next().await {
        let step = step?;
        text.record(&step);
        if let Step::Accepted { route, .. } = step {
            chosen_route = route;
        }
    }
    let (part, reason, usage) = text.end();
    let mut response = Json(head.finished(reason, part, usage)).into_response();
    insert_route(response.headers_mut(), &chosen_route);
    Ok(response)
}

/// The one text of a response so far.
struct Text {
    part: Part,
    tally: Tally,
    /// Set at the end; steps end only after it.
    reason: Option<FinishReason>,
}

impl Text {
    fn new() -> Self {
        Text { part: Part::default(), tally: Tally::new(1), reason: None }
    }

    fn record(&mut self, step: &Step) {
        self.tally.record(step);
        match step {
            Step::Event(Event::Text { text, tokens, .. }) => {
                self.part.text.push_str(text);
                self.part.logprobs.extend(logprobs(tokens));
            }
            Step::Event(Event::Finished { reason, .. }) => self.reason = Some(*reason),
            // No functions are passed on, and what the model thinks is not shown here.
            Step::Accepted { .. }
            | Step::Event(
                Event::Started { .. } | Event::Handoff { .. } | Event::Reasoning { .. } | Event::ToolCall { .. },
            ) => {}
        }
    }

    fn end(self) -> (Part, FinishReason, ResponseUsage) {
        let Tally { n_prompt, n_cached, n_completion, n_reasoning, .. } = self.tally;
        let usage = ResponseUsage::new(n_prompt, n_cached, n_completion, n_reasoning);
        (self.part, self.reason.unwrap_or(FinishReason::Stop), usage)
    }
}

/// Empty unless they were asked for.
fn logprobs(tokens: &[TokenLogprobs]) -> Vec<TokenLogprob> {
    tokens.iter().map(|token| TokenLogprob::new(&token.bytes, &token.logprobs)).collect()
}
