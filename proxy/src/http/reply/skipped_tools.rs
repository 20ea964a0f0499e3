//! `x-baton-warning`: the tools of a request that the model does not get, because they run on the servers of OpenAI or
//! Anthropic.

use axum::response::Response;
use baton_schemas::GenerateRequest;
use baton_schemas::tools::HostedTool;

use super::warning::warn;

/// The tools that a request leaves out.
pub(in crate::http) struct SkippedTools(Option<String>);

impl SkippedTools {
    /// Finds and logs them.
    pub(in crate::http) fn of(request: &GenerateRequest) -> SkippedTools {
        let tools: Vec<&str> = request.tools.skipped.iter().map(|tool| HostedTool::as_str(*tool)).collect();
        if tools.is_empty() {
            return SkippedTools(None);
        }
        let tools = tools.join(", ");
        tracing::warn!(tools, model = request.model, "tools that run on the API owner's servers are not offered");
        SkippedTools(Some(format!("tools that run on the API owner's servers are not offered: {tools}")))
    }

    /// Adds the header.
    pub(in crate::http) fn noted_in(self, mut response: Response) -> Response {
        if let Some(warning) = self.0 {
            warn(response.headers_mut(), &warning);
        }
        response
    }
}
