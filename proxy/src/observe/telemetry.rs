//! Traces over OTLP (HTTP, protobuf) to a collector that the operator names. Off unless there is one.
//!
//! Spans wait in a bounded queue, and a thread of its own sends them. A slow or lost collector costs spans, and delays no
//! request.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use baton_link::trace::TARGET;
use baton_link::transport::{ShortBodyError, short_body};
use bytes::Bytes;
use opentelemetry::global;
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, SdkTracerProvider};
use reqwest::redirect::Policy;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::registry::LookupSpan;

/// The first holds the full URL of the collector, the second the part before `/v1/traces`.
pub const ENDPOINT_VARIABLES: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// The path after a collector's address.
const PATH: &str = "/v1/traces";

/// Spans that wait to be sent; more of them are dropped.
const MAX_QUEUED: usize = 2_048;

/// The pause between two sends.
const INTERVAL: Duration = Duration::from_secs(1);

/// The deadline of one send. The next send waits for it; requests never do.
const SEND_DEADLINE: Duration = Duration::from_secs(5);

/// The deadline of the last send, when the process ends.
const LAST_DEADLINE: Duration = Duration::from_secs(2);

/// The most bytes read of a collector's answer.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// The reason why traces cannot be sent. For the operator.
#[derive(Debug, thiserror::Error)]
#[error("traces cannot be sent to {endpoint}: {reason}")]
pub struct TelemetryError {
    endpoint: String,
    reason: String,
}

/// The collector's URL for traces: from the environment, else from the configuration.
pub fn endpoint(configured: Option<&str>) -> Option<String> {
    let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.trim().is_empty());
    let below = |base: &str| format!("{}{PATH}", base.trim_end_matches('/'));
    let [traces, all] = ENDPOINT_VARIABLES;
    variable(traces).or_else(|| variable(all).map(|base| below(&base))).or_else(|| configured.map(below))
}

/// Sends traces to a collector.
pub struct Traces(SdkTracerProvider);

impl Traces {
    /// Begins to send to `endpoint`, as this service.
    pub fn start(endpoint: &str, service: &'static str) -> Result<Traces, TelemetryError> {
        let failed = |reason: &dyn std::fmt::Display| TelemetryError {
            endpoint: endpoint.to_owned(),
            reason: reason.to_string(),
        };
        let exporter = SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(endpoint)
            .with_timeout(SEND_DEADLINE)
            .with_http_client(Collector::new().map_err(|e| failed(&e))?)
            .build()
            .map_err(|e| failed(&e))?;
        let bounds = BatchConfigBuilder::default().with_max_queue_size(MAX_QUEUED).with_scheduled_delay(INTERVAL);
        let processor = BatchSpanProcessor::builder(exporter).with_batch_config(bounds.build()).build();
        let provider = SdkTracerProvider::builder()
            .with_span_processor(processor)
            .with_resource(Resource::builder().with_service_name(service).build())
            .build();
        global::set_text_map_propagator(TraceContextPropagator::new());
        Ok(Traces(provider))
    }

    /// The layer that takes the spans of [`TARGET`] and no others.
    pub fn layer<S: tracing::Subscriber + for<'a> LookupSpan<'a>>(&self) -> impl Layer<S> + use<S> {
        let tracer = self.0.tracer("baton");
        let layer = tracing_opentelemetry::layer().with_tracer(tracer).with_location(false).with_threads(false);
        let layer = layer.with_target(false).with_level(false).with_tracked_inactivity(false);
        layer.with_filter(Targets::new().with_target(TARGET, LevelFilter::INFO))
    }

    /// Sends the remaining spans, for 2 s at most.
    pub fn finish(self) {
        if let Err(error) = self.0.shutdown_with_timeout(LAST_DEADLINE) {
            tracing::debug!(%error, "the last spans were not sent");
        }
    }
}

/// A collector's client. Only the exporter's own thread calls it, and that thread may block.
#[derive(Debug)]
struct Collector {
    client: reqwest::Client,
    runtime: tokio::runtime::Runtime,
    is_lost: AtomicBool,
}

impl Collector {
    fn new() -> Result<Collector, Box<dyn std::error::Error>> {
        let client = reqwest::Client::builder().redirect(Policy::none()).timeout(SEND_DEADLINE).build()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Collector { client, runtime, is_lost: AtomicBool::new(false) })
    }

    async fn send(&self, request: http::Request<Bytes>) -> Result<http::Response<Bytes>, HttpError> {
        let answer = self.client.execute(request.try_into()?).await?.error_for_status()?;
        let status = answer.status();
        let body = match short_body(answer, MAX_ANSWER_BYTES).await {
            // It has taken the traces, whatever else it says.
            Err(ShortBodyError::TooLong(_)) => Vec::new(),
            read => read?,
        };
        Ok(http::Response::builder().status(status).body(body.into())?)
    }
}

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: http::Request<Bytes>) -> Result<http::Response<Bytes>, HttpError> {
        let outcome = self.runtime.block_on(self.send(request));
        let was_lost = self.is_lost.swap(outcome.is_err(), Ordering::Relaxed);
        match &outcome {
            Err(error) if !was_lost => tracing::warn!(error, "the collector takes no traces; they are dropped"),
            Ok(_) if was_lost => tracing::warn!("the collector takes traces again"),
            _ => {}
        }
        outcome
    }
}
