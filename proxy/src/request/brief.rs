//! Starts requests that generate nothing.

use tokio::sync::OwnedSemaphorePermit;

use super::admission::Admission;
use super::caller::Caller;
use crate::error::RequestError;
use crate::targets::model_loading::ModelLease;
use crate::targets::{Target, Targets};

/// An admitted request that generates nothing. The model stays in memory while this lives.
pub(super) struct BriefRequest {
    pub(super) target: Target,
    _lease: Option<ModelLease>,
    _permit: OwnedSemaphorePermit,
}

/// Finds the nodes of a model, loads the model, and admits the request.
///
/// Loading comes before admission: permits bound running work, and loading has a bound of its own.
pub(super) async fn begin(
    admission: &Admission,
    targets: &Targets,
    model: Option<&str>,
    caller: &Caller,
) -> Result<BriefRequest, RequestError> {
    let target = targets.resolve(model, &caller.account)?;
    let lease = targets.lease(&target, None).await?;
    let permit = admission.admit_brief(&caller.account)?;
    Ok(BriefRequest { target, _lease: lease, _permit: permit })
}
