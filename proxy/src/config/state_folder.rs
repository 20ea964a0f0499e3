//! The default folder of data that outlives the process.

use std::ffi::OsString;
use std::path::PathBuf;

/// Set by systemd for a service with a `StateDirectory`.
const SYSTEMD_VARIABLE: &str = "STATE_DIRECTORY";

/// The folder of this user's states: `baton` in `XDG_STATE_HOME` or in the platform's folder. `var` reads the environment. `None`:
/// there is no home.
pub fn of_user(var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    // The XDG specification says to ignore a relative path here.
    let xdg = var("XDG_STATE_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let of_home = |home: PathBuf| match cfg!(target_os = "macos") {
        true => home.join("Library/Application Support"),
        false => home.join(".local/state"),
    };
    Some(xdg.or_else(|| var("HOME").map(PathBuf::from).map(of_home))?.join("baton"))
}

/// The folder of a service, or else that of the user, if it exists.
pub fn existing() -> Option<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    // systemd separates several folders by colons.
    let of_service =
        var(SYSTEMD_VARIABLE).and_then(|folders| Some(PathBuf::from(folders.to_str()?.split(':').next()?)));
    of_service.or_else(|| of_user(var)).filter(|folder| folder.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_folder_of_states_is_ignored() {
        let of = |xdg: &str| of_user(|name| Some(if name == "HOME" { "/home/me".into() } else { xdg.into() }));
        assert_eq!(of("/state"), Some("/state/baton".into()));
        assert!(of("state").is_some_and(|folder| folder.starts_with("/home/me")));
        assert_eq!(of_user(|_| None), None);
    }
}
