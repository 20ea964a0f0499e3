//! Who asks.

use std::sync::Arc;

use baton_planner::policy::Policy;
use baton_schemas::sequence::CacheScope;

use crate::request::admission::{Account, QueuePlace};

/// Who asks, as far as the layers below HTTP need to know.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Separates callers in the prefix cache; derived from the API key that was presented.
    pub cache_scope: CacheScope,
    /// The id in `x-request-id`, for the log.
    pub request_id: String,
    /// What the presented key says of who asks.
    pub standing: Standing,
    /// Whose limits it is under.
    pub account: Arc<Account>,
    /// Where it stands while it waits to be admitted.
    pub place: QueuePlace,
    /// How this request is to be planned, if not as configured.
    pub policy: Option<&'static dyn Policy>,
    /// The span of the client's trace that asks, if its request names one.
    pub trace: Option<opentelemetry::Context>,
}

/// What the presented key says of who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Nobody has to present a key here.
    Anyone,
    /// A key of the endpoint's owner.
    Operator,
    /// Somebody else's key, or none where one is needed and this path does without.
    Guest,
}
