//! The prompt: a line with editing, and the history of typed lines in a file that only its owner reads.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use baton_proxy::config::state_folder;
use baton_proxy::serve::CommandFailure;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config, Editor};

/// Lines that the history keeps.
const MAX_LINES: usize = 1_000;

/// A longer line is not kept: it is a pasted text.
const MAX_LINE_BYTES: usize = 4 << 10;

/// A longer file is written anew with the last lines, when a chat begins.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The history's name in the folder of states.
const FILE: &str = "chat_history";

/// What the person typed.
pub(super) enum Line {
    Text(String),
    /// Ctrl-C or Ctrl-D.
    End,
}

/// An editor of lines. Reading blocks a thread.
pub(super) struct LineEditor {
    editor: Editor<(), FileHistory>,
    /// `None`: no history is kept.
    file: Option<PathBuf>,
}

impl LineEditor {
    /// Opens the history. Returns what prevents it from being kept, too.
    pub(super) fn open(keeps_history: bool) -> Result<(LineEditor, Option<String>), CommandFailure> {
        let config = Config::builder().max_history_size(MAX_LINES)?.history_ignore_space(true).build();
        let history = FileHistory::with_config(&config);
        let mut editor = Editor::with_history(config, history)?;
        if !keeps_history {
            return Ok((LineEditor { editor, file: None }, None));
        }
        let opened = state_folder::of_user(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
            .ok_or_else(|| io::Error::other("neither XDG_STATE_HOME nor HOME is set"))
            .and_then(|folder| prepare(&folder));
        let loaded = opened.map_err(ReadlineError::from).and_then(|path| {
            editor.load_history(&path)?;
            if fs::metadata(&path)?.len() > MAX_FILE_BYTES {
                editor.save_history(&path)?;
            }
            Ok(path)
        });
        Ok(match loaded {
            Ok(path) => (LineEditor { editor, file: Some(path) }, None),
            Err(error) => {
                (LineEditor { editor, file: None }, Some(format!("the history of typed lines is not kept: {error}")))
            }
        })
    }

    /// Reads a line and keeps it. A line that begins with a space is not kept.
    pub(super) fn read(&mut self, prompt: &str) -> Result<Line, CommandFailure> {
        let typed = loop {
            match self.editor.readline(prompt) {
                // A Ctrl-C that stopped an earlier reply: the editor notices it when the window changes.
                Err(ReadlineError::Signal(_)) => {}
                typed => break typed,
            }
        };
        match typed {
            Ok(line) => {
                if line.len() <= MAX_LINE_BYTES && !line.trim().is_empty() {
                    self.editor.add_history_entry(&line)?;
                    if let Some(path) = &self.file
                        && let Err(error) = self.editor.append_history(path)
                    {
                        tracing::warn!(%error, "a typed line could not be kept");
                    }
                }
                Ok(Line::Text(line))
            }
            Err(ReadlineError::Interrupted | ReadlineError::Eof) => Ok(Line::End),
            Err(error) => Err(error.into()),
        }
    }
}

/// Creates the folder and the file if they are missing. Only the owner reads them.
fn prepare(folder: &Path) -> io::Result<PathBuf> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let path = folder.join(FILE);
    let file = fs::OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
    // An older file may be open to others.
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_history_is_its_owners_alone() {
        let home = tempfile::tempdir().unwrap();
        let folder = state_folder::of_user(|name| (name == "HOME").then(|| home.path().into())).unwrap();
        let path = prepare(&folder).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(prepare(&folder).unwrap(), path);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
