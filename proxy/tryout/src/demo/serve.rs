//! The endpoints of the demonstrations.

use std::ffi::OsString;
use std::time::Duration;

use baton_proxy::serve::CommandFailure;
use baton_schemas::node::KEY_VARIABLE;

use super::ask::MODEL;
use crate::endpoint_process::{EndpointProcess, EndpointStart};

/// The longest start of an endpoint; loading the model takes much less.
const START_DEADLINE: Duration = Duration::from_secs(120);

/// Starts an endpoint with these arguments and variables, on a port of its own.
pub(super) async fn serve(
    key: &str,
    args: impl IntoIterator<Item = OsString>,
    variables: &[(&str, &str)],
) -> Result<EndpointProcess, CommandFailure> {
    let own = ["--listen", "127.0.0.1:0", "--name", MODEL].map(OsString::from);
    let args = own.into_iter().chain(args).collect();
    let variables = [&[(KEY_VARIABLE, key)], variables].concat();
    EndpointProcess::start(EndpointStart { args, variables: &variables, deadline: START_DEADLINE }).await
}
