//! Keys for endpoints under test.

use std::process::Command;

use crate::BATON;

/// A key of `baton key new`.
pub struct NewKey {
    pub secret: String,
    /// Its `[[keys]]` of a configuration.
    pub lines: String,
}

impl NewKey {
    /// A key of this name with more settings: lines of TOML, or none.
    pub fn of(name: &str, more: &str) -> NewKey {
        let made = Command::new(&*BATON).args(["key", "new", "--name", name]).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let printed = String::from_utf8(made.stdout).unwrap();
        let (secret, lines) = printed.split_once("\n\n").unwrap();
        NewKey { secret: secret.to_owned(), lines: format!("{lines}{more}\n") }
    }
}
