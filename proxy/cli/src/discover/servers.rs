//! `baton discover --servers`: other servers on this machine and on named ones, which `baton serve --adopt` uses.

use baton_proxy::serve::{ProbeOutcome, ServerFound, ServerSeen};
use baton_schemas::ollama::OllamaCapability;

use crate::columns::table;

/// A line for each model, and one for each server that cannot be used.
pub(super) fn render(seen: &[ServerSeen]) -> String {
    if seen.is_empty() {
        return "No other server answers at its usual port: Ollama 11434, LM Studio 1234, vLLM 8000, llama-server and mlx_lm.server \
                8080 to 8085."
            .to_owned();
    }
    let rows = seen.iter().flat_map(rows);
    let text = table(&["SERVER", "ADDRESS", "MODEL", "CAPABILITIES"], rows);
    text + "`baton serve --adopt` uses those of this machine."
}

fn rows(ServerSeen { place, outcome }: &ServerSeen) -> Vec<Vec<String>> {
    let address = format!("{}:{}", place.host, place.port);
    let without_models = |server: &str, words: &str| vec![vec![server.to_owned(), address.clone(), words.to_owned()]];
    match outcome {
        ProbeOutcome::Server(ServerFound { program, models }) if models.is_empty() => {
            without_models(program.as_str(), "(no models)")
        }
        ProbeOutcome::Server(ServerFound { program, models }) => {
            let capabilities =
                |all: &[OllamaCapability]| all.iter().map(|one| one.as_str()).collect::<Vec<_>>().join(", ");
            let row = |model: &baton_proxy::serve::FoundModel| {
                let capabilities = capabilities(&model.capabilities);
                vec![program.as_str().to_owned(), address.clone(), model.name.clone(), capabilities]
            };
            models.iter().map(row).collect()
        }
        ProbeOutcome::Failing => without_models("?", "answers with an error now, or too late: look again"),
        ProbeOutcome::NeedsKey => without_models("?", "needs a key: name it in [[upstream]]"),
        ProbeOutcome::BreaksOff => {
            without_models("llama-cpp-python", "breaks off its reply at another request: see docs/upstreams.md")
        }
        ProbeOutcome::Nobody | ProbeOutcome::Own | ProbeOutcome::Unknown => without_models("?", "(no model server)"),
    }
}

/// The servers that can be used, in words: `ollama with 3 models`.
pub(crate) fn usable(seen: &[ServerSeen]) -> Vec<String> {
    let words = seen.iter().filter_map(|seen| match &seen.outcome {
        ProbeOutcome::Server(ServerFound { program, models }) => {
            let n_models = baton_schemas::counted::counted(models.len() as u64, "model");
            Some(format!("{} with {n_models}", program.as_str()))
        }
        _ => None,
    });
    words.collect()
}

#[cfg(test)]
mod tests {
    use baton_proxy::serve::{FoundModel, ServerPlace, ServerProgram};

    use super::*;

    #[test]
    fn each_model_has_its_server_and_what_cannot_be_used_its_reason() {
        let place = |port| ServerPlace { url: String::new(), host: "127.0.0.1".to_owned(), port, is_loopback: true };
        let model = FoundModel {
            name: "qwen3:8b".to_owned(),
            capabilities: vec![OllamaCapability::Completion, OllamaCapability::Thinking],
        };
        let found = ServerFound { program: ServerProgram::Ollama, models: vec![model] };
        let seen = [
            ServerSeen { place: place(11434), outcome: ProbeOutcome::Server(found) },
            ServerSeen { place: place(8000), outcome: ProbeOutcome::NeedsKey },
        ];
        let text = render(&seen);
        assert!(text.contains("ollama  127.0.0.1:11434  qwen3:8b"), "{text}");
        assert!(text.contains("completion, thinking") && text.contains("needs a key"), "{text}");
        assert_eq!(usable(&seen), ["ollama with 1 model"]);
        assert!(render(&[]).contains("No other server"));
    }
}
