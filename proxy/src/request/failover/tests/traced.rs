//! The spans of a stream that is started a second time.

use std::sync::Mutex;

use baton_link::trace::TARGET;
use tracing::Subscriber;
use tracing::span::{Attributes, Id};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use super::*;
use crate::targets::nodes::FallbackReason;

/// What became of the spans of traces, a line each.
#[derive(Clone, Default)]
struct Lives(Arc<Mutex<Vec<String>>>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Lives {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if attributes.metadata().target() == TARGET {
            let parent = context.span(id).unwrap().parent().map_or("nothing", |parent| parent.name());
            self.0.lock().unwrap().push(format!("{} in {parent}", attributes.metadata().name()));
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let metadata = context.span(&id).unwrap().metadata();
        if metadata.target() == TARGET {
            self.0.lock().unwrap().push(format!("{} ends", metadata.name()));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_second_start_has_a_span_of_its_own_until_its_stream_ends() {
    for (by, other) in [(20, 0), (3, 20)] {
        let lives = Lives::default();
        let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(lives.clone()));
        let (model, _) = late_by(Duration::from_secs(by), Duration::from_secs(other), HEDGED).await;
        let whole = tracing::info_span!(target: TARGET, "whole");
        run_under(whole, &model).await.unwrap();
        assert_eq!(count(&model, FallbackReason::Hedged), 1);
        let expected = ["whole in nothing", "decode in whole", "decode ends", "whole ends"];
        assert_eq!(*lives.0.lock().unwrap(), expected, "{by} {other}");
    }
}
