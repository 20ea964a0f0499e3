//! The caller of a request, without the details of HTTP.

use std::sync::Arc;

use baton_planner::policy::Policy;
use baton_schemas::CacheScope;

use super::kv_loss::KvLoss;
use super::poison_case::PoisonCase;
use super::warnings::Warnings;
use crate::account::Account;
use crate::account::request_memory::RequestHold;
use crate::admission::RequestAdmission;
use crate::usage::SecretId;

/// The caller of a request, with the settings of this request.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Separates callers in the prefix cache; derived from the API key that was presented.
    pub cache_scope: CacheScope,
    /// The id in `x-request-id`, for the log.
    pub request_id: String,
    /// What the caller may see.
    pub role: CallerRole,
    /// The account with the limits that apply.
    pub account: Arc<Account>,
    /// The presented secret of the key; `None` without keys.
    pub secret: Option<SecretId>,
    /// The request's admission, and its position in the queue meanwhile. The prompts of one request share it.
    pub admission: RequestAdmission,
    /// What its prompts share in quarantine.
    pub poison: PoisonCase,
    /// The memory that the request holds, and how long its body waited for the parser. Its prompts share it.
    pub memory: RequestHold,
    /// What the request asks for and does not get. Its prompts share it.
    pub warnings: Warnings,
    /// Its right to KV that went through no lossy codec.
    pub kv_loss: KvLoss,
    /// Overrides the configured policy.
    pub policy: Option<&'static dyn Policy>,
    /// The client's trace span, if the request names one.
    pub trace: Option<opentelemetry::Context>,
}

/// What a caller may see of the endpoint's own state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallerRole {
    /// This endpoint requires no key.
    Anyone,
    /// The key may see the endpoint's state.
    Operator,
    /// The key may not see the state, or the endpoint requires keys but this path does not.
    Guest,
}
