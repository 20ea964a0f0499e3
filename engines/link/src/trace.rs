//! Traces across processes: all spans have one target, and the W3C header `traceparent` connects them.
//!
//! Unless the process exports traces, this costs nothing and sends nothing.

use std::collections::HashMap;

use http::HeaderMap;
use opentelemetry::trace::TraceContextExt;
use opentelemetry::{Context, global};
use opentelemetry_http::HeaderExtractor;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The target of the spans that are exported. No such span holds text of prompts or replies.
pub const TARGET: &str = "baton::trace";

/// The header that names a trace and the caller's span in it.
pub const TRACEPARENT: &str = "traceparent";

/// The longest header that is read: version 00 has 55 bytes, and later versions may add some.
const MAX_TRACEPARENT_BYTES: usize = 256;

/// The caller's span, from the headers of its request.
pub fn parent_in(headers: &HeaderMap) -> Option<Context> {
    let is_sane = headers.get(TRACEPARENT).is_some_and(|value| value.len() <= MAX_TRACEPARENT_BYTES);
    is_sane
        .then(|| {
            global::get_text_map_propagator(|p| p.extract_with_context(&Context::new(), &HeaderExtractor(headers)))
        })
        .filter(is_valid)
}

/// The span that a `traceparent` names. `None` if the text is not valid.
pub fn parent_of(traceparent: &str) -> Option<Context> {
    if traceparent.len() > MAX_TRACEPARENT_BYTES {
        return None;
    }
    let carrier = HashMap::from([(TRACEPARENT.to_owned(), traceparent.to_owned())]);
    let context = global::get_text_map_propagator(|p| p.extract_with_context(&Context::new(), &carrier));
    Some(context).filter(is_valid)
}

/// The `traceparent` for calls within this span. `None` if the span is not exported.
pub fn traceparent(span: &Span) -> Option<String> {
    if span.is_disabled() {
        return None;
    }
    let mut carrier = HashMap::new();
    global::get_text_map_propagator(|p| p.inject_context(&span.context(), &mut carrier));
    carrier.remove(TRACEPARENT)
}

/// Makes a span the child of another process's span. It must not have been entered yet.
pub fn continue_from(span: &Span, parent: Option<Context>) {
    // It fails for a span that is not exported, which needs no parent.
    let _ = parent.map(|parent| span.set_parent(parent));
}

fn is_valid(context: &Context) -> bool {
    context.span().span_context().is_valid()
}
