//! Runs tests that measure their process (open files, memory) in a process of their own.

use std::process::Command;

/// The variable with the name of the test that this process was started for.
const VARIABLE: &str = "BATON_TEST_IN_OWN_PROCESS";

/// Returns true in the process that runs only this test. In any other process, starts that process, fails if the test
/// fails there, and returns false. `test` is the test's full name.
pub(crate) fn is_own(test: &str) -> bool {
    if std::env::var(VARIABLE).is_ok_and(|name| name == test) {
        return true;
    }
    let runner = std::env::current_exe().unwrap();
    let output = Command::new(runner).args([test, "--exact", "--nocapture"]).env(VARIABLE, test).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    println!("{stdout}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && stdout.contains("1 passed"), "{test} failed in its own process");
    false
}
