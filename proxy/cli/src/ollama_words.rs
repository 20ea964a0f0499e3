//! Commands that Ollama's users type: each is answered with Baton's that does it.

use baton_proxy::serve::CommandFailure;
use clap::Args;

/// The arguments after the word.
#[derive(Args)]
pub(super) struct OllamaArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

/// A command of Ollama that Baton has under another name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OllamaWord {
    List,
    Ps,
    Rm,
    Run,
    Stop,
}

impl OllamaArgs {
    /// The failure that names the command.
    pub(super) fn instead(&self, word: OllamaWord) -> CommandFailure {
        // Only a plain name is repeated: the line is there to be pasted.
        let is_plain = |name: &&String| name.chars().all(|c| c.is_ascii_alphanumeric() || ":/._-".contains(c));
        let named = self.rest.iter().find(|word| !word.starts_with('-')).filter(is_plain);
        let model = named.map_or("MODEL", String::as_str);
        let (name, instead) = match word {
            OllamaWord::List => {
                let files = "`baton models` lists the model files of all machines";
                ("list", format!("{files}, and `baton status` the models that are served"))
            }
            OllamaWord::Ps => ("ps", "`baton status` shows what is loaded and what runs".to_owned()),
            OllamaWord::Rm => ("rm", format!("`baton models delete {model} --on local` deletes a model's files")),
            OllamaWord::Run if named.is_none() => {
                ("run", "`baton chat` chats with the running endpoint, or with one of its own".to_owned())
            }
            OllamaWord::Run => {
                ("run", format!("`baton chat {model}` chats with it, and `baton serve --model {model}` serves it"))
            }
            OllamaWord::Stop => {
                ("stop", format!("`baton models unload {model}` unloads a model, and Ctrl-C ends `baton serve`"))
            }
        };
        CommandFailure(format!("there is no `baton {name}`: {instead}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_a_command_with_the_model_that_was_named() {
        let answer = |word, rest: &[&str]| {
            let rest = rest.iter().map(|&word| word.to_owned()).collect();
            let CommandFailure(message) = OllamaArgs { rest }.instead(word);
            message
        };
        assert!(answer(OllamaWord::Run, &["--verbose", "llama3:8b", "hi"]).contains("`baton chat llama3:8b`"));
        assert!(answer(OllamaWord::Run, &[]).contains("`baton chat` chats"));
        assert!(answer(OllamaWord::Rm, &["a; rm -r"]).contains("delete MODEL --on local"));
        assert!(answer(OllamaWord::Stop, &["m"]).contains("`baton models unload m`"));
        assert!(answer(OllamaWord::List, &[]).starts_with("there is no `baton list`: `baton models`"));
        assert!(answer(OllamaWord::Ps, &[]).contains("`baton status`"));
    }
}
