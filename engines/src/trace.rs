//! One trace across processes: spans under one target, and the W3C header `traceparent` that joins them.
//!
//! Nothing here costs anything, or is sent anywhere, unless the process exports traces.

use std::collections::HashMap;

use http::HeaderMap;
use opentelemetry::trace::TraceContextExt;
use opentelemetry::{Context, global};
use opentelemetry_http::HeaderExtractor;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The target of spans that are exported; no other is, and none of these holds text of prompts or replies.
pub const TARGET: &str = "baton::trace";

/// The header that names a trace and the span in it that asks.
pub const TRACEPARENT: &str = "traceparent";

/// What the header may have: it has 55 bytes today, and later versions may add some.
const MAX_TRACEPARENT_BYTES: usize = 256;

/// The span that the sender of these headers is in, if it says so.
pub fn parent_in(headers: &HeaderMap) -> Option<Context> {
    let is_sane = headers.get(TRACEPARENT).is_some_and(|value| value.len() <= MAX_TRACEPARENT_BYTES);
    is_sane
        .then(|| {
            global::get_text_map_propagator(|p| p.extract_with_context(&Context::new(), &HeaderExtractor(headers)))
        })
        .filter(is_valid)
}

/// The span that a `traceparent` names, if it is one.
pub fn parent_of(traceparent: &str) -> Option<Context> {
    if traceparent.len() > MAX_TRACEPARENT_BYTES {
        return None;
    }
    let carrier = HashMap::from([(TRACEPARENT.to_owned(), traceparent.to_owned())]);
    let context = global::get_text_map_propagator(|p| p.extract_with_context(&Context::new(), &carrier));
    Some(context).filter(is_valid)
}

/// The `traceparent` of calls that belong to this span, if it is exported.
pub fn traceparent(span: &Span) -> Option<String> {
    if span.is_disabled() {
        return None;
    }
    let mut carrier = HashMap::new();
    global::get_text_map_propagator(|p| p.inject_context(&span.context(), &mut carrier));
    carrier.remove(TRACEPARENT)
}

/// Puts a span that has not been entered yet under one of another process.
pub fn continue_from(span: &Span, parent: Option<Context>) {
    // A span that is not exported has no parent to miss.
    let _ = parent.map(|parent| span.set_parent(parent));
}

fn is_valid(context: &Context) -> bool {
    context.span().span_context().is_valid()
}
