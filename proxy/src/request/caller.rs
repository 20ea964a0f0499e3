//! Who sends a request, as far as the layers below HTTP need to know.

use std::sync::Arc;

use baton_planner::policy::Policy;
use baton_schemas::CacheScope;

use super::admission::QueuePlace;
use crate::account::Account;

/// Who sends a request, and how it is to be handled.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Separates callers in the prefix cache; derived from the API key that was presented.
    pub cache_scope: CacheScope,
    /// The id in `x-request-id`, for the log.
    pub request_id: String,
    /// What the presented key allows its holder to see.
    pub role: CallerRole,
    /// Holds the limits that apply.
    pub account: Arc<Account>,
    /// The request's position in the queue while it waits for admission.
    pub place: QueuePlace,
    /// Overrides the configured policy.
    pub policy: Option<&'static dyn Policy>,
    /// The client's span, if the request names one.
    pub trace: Option<opentelemetry::Context>,
}

/// What the presented key allows its holder to see of the endpoint itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallerRole {
    /// This endpoint requires no key.
    Anyone,
    /// The key may see the endpoint at work.
    Operator,
    /// The key may not; or the endpoint requires keys, and this path does not.
    Guest,
}
