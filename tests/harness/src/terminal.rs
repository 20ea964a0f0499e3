//! A program in a terminal of its own, as a person uses it.

use std::io::{Read, Write};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex};

use pty_process::Size;
use pty_process::blocking::{Command, Pty, open};

use crate::{BATON, Process, eventually};

/// A running `baton` whose standard streams and controlling terminal are a pseudo terminal. Dropping it kills it.
pub struct Terminal {
    pty: Arc<Pty>,
    process: Process,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    /// Starts `baton` with these arguments and variables; none of them is inherited with a name that begins with `BATON_`.
    pub fn start(args: &[&str], variables: &[(&str, &str)]) -> Terminal {
        let (pty, pts) = open().unwrap();
        pty.resize(Size::new(40, 200)).unwrap();
        let mut command = Command::new(&*BATON).args(args).env("TERM", "xterm").env_remove("NO_COLOR");
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BATON_") && name != "BATON_CACHE") {
            command = command.env_remove(name);
        }
        let process = Process(command.envs(variables.iter().copied()).spawn(pts).unwrap());
        let pty = Arc::new(pty);
        let shown: Arc<Mutex<Vec<u8>>> = Arc::default();
        let (reader, seen) = (Arc::clone(&pty), Arc::clone(&shown));
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            // The end of the process is an error here, on Linux.
            while let Ok(n @ 1..) = (&*reader).read(&mut piece) {
                seen.lock().unwrap().extend_from_slice(&piece[..n]);
            }
        });
        Terminal { pty, process, shown }
    }

    /// Everything that was shown so far.
    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    /// Waits until a text was shown `n` times.
    #[track_caller]
    pub fn shows(&self, text: &str, n: usize) {
        let is_there = || (self.shown().matches(text).count() >= n).then_some(());
        let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| eventually(text, is_there)));
        assert!(waited.is_ok(), "{text:?} is not shown {n} times in {:?}", self.shown());
    }

    /// Waits for the `n`th prompt of an editor of lines, and types a line.
    #[track_caller]
    pub fn types_line(&self, n: usize, line: &str) {
        // Every prompt enables bracketed paste. What is typed before it would be lost.
        self.shows("\x1b[?2004h", n);
        self.types(line);
        self.types("\r");
    }

    /// Types keys.
    pub fn types(&self, keys: &str) {
        (&*self.pty).write_all(keys.as_bytes()).unwrap();
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Waits for the end of the process.
    pub fn ends(&mut self) -> ExitStatus {
        let process = &mut self.process;
        eventually("the end of the program", || process.try_wait().unwrap())
    }
}
