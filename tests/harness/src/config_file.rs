//! A configuration file that a test changes while an endpoint serves from it.

use std::path::PathBuf;
use std::process::Stdio;

use rustix::process::Signal;

use crate::BatonServer;

/// A configuration file in a folder of its own. Dropping it removes both.
pub struct TempConfigFile {
    folder: tempfile::TempDir,
}

impl TempConfigFile {
    /// A file with this text.
    pub fn new(text: &str) -> TempConfigFile {
        let file = TempConfigFile { folder: tempfile::tempdir().unwrap() };
        file.write(text);
        file
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("baton.toml")
    }

    /// Replaces the text in one step, as editors do, because the endpoint could reload half a file.
    pub fn write(&self, text: &str) {
        let new = self.folder.path().join("new.toml");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.path()).unwrap();
    }

    /// Replaces the text and tells the server to reload.
    pub fn reload(&self, server: &BatonServer, text: &str) {
        self.write(text);
        server.signal(Signal::HUP);
    }

    /// Serves from this file.
    pub fn serve(&self) -> BatonServer {
        self.serve_logging_to(Stdio::inherit(), &[])
    }

    /// Serves from this file, with this standard error and these environment variables.
    pub fn serve_logging_to(&self, log: impl Into<Stdio>, variables: &[(&str, &str)]) -> BatonServer {
        BatonServer::started(log, &["--config", self.path().to_str().unwrap()], variables)
    }
}
