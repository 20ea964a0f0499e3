//! Records a node's spans in its caller's trace.

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use baton_schemas::streams::StreamWork;
use futures::StreamExt;
use tracing::{Instrument, Span};

use crate::trace::{self, TARGET};

macro_rules! span {
    ($name:literal) => {
        tracing::info_span!(target: TARGET, parent: None, $name, otel.kind = "server")
    };
}

/// Continues the caller's trace, up to the last byte of the reply. A call without a trace starts none.
pub(super) async fn traced(request: Request, next: Next) -> Response {
    let Some(parent) = trace::parent_in(request.headers()) else { return next.run(request).await };
    let span = span_of(request.uri().path());
    if span.is_disabled() {
        return next.run(request).await;
    }
    trace::continue_from(&span, Some(parent));
    let response = next.run(request).instrument(span.clone()).await;
    // Most of the work happens in the stream after the head.
    response.map(|body| Body::from_stream(body.into_data_stream().map(move |piece| span.in_scope(|| piece))))
}

/// The span of a stream, which continues the trace of its start.
pub(super) fn stream_span(work: StreamWork, traceparent: Option<&str>) -> Span {
    let Some(parent) = traceparent.and_then(trace::parent_of) else { return Span::none() };
    let span = match work {
        StreamWork::Generate => span!("node_generate"),
        StreamWork::Embed => span!("node_embed"),
        StreamWork::Draft => span!("node_draft"),
        StreamWork::Loads => Span::none(),
    };
    trace::continue_from(&span, Some(parent));
    span
}

/// The span of a call. Only calls that compute something have one.
fn span_of(path: &str) -> Span {
    match path.rsplit('/').next() {
        Some("render") => span!("node_render"),
        Some("prefill") => span!("node_prefill"),
        _ => Span::none(),
    }
}
