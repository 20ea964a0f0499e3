//! The memory of a process, as the kernel reports it. Only on Linux.

/// A field of `/proc/PID/status`, MiB.
fn status(pid: u32, field: &str) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib / 1024.0)
}

/// Resident memory, MiB; `None` if the system does not report it.
pub(super) fn resident_mib(pid: u32) -> Option<f64> {
    status(pid, "VmRSS")
}

/// Memory of a process in which a page that several processes have counts for each with its share, MiB.
pub(super) fn proportional_mib(pid: u32) -> Option<f64> {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib / 1024.0)
}

/// A process, and all that it and its descendants have started.
pub(super) fn family(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        // The thread that has started a process is its parent.
        let threads = std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
        let children = threads.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
        found.extend(
            children.collect::<Vec<_>>().join(" ").split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()),
        );
        next += 1;
    }
    found
}

/// Peak resident memory since the start or the last [`forget_peak`], MiB.
pub(super) fn peak_mib(pid: u32) -> Option<f64> {
    status(pid, "VmHWM")
}

/// Resets the peak to the memory that is resident now (`/proc/PID/clear_refs`, proc_pid_clear_refs(5)). `None` if that
/// fails.
pub(super) fn forget_peak(pid: u32) -> Option<()> {
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").ok()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_at_least_what_is_there_now() {
        let pid = std::process::id();
        let resident = resident_mib(pid).unwrap();
        let peak = peak_mib(pid).unwrap();
        assert!(resident > 1.0 && peak >= resident * 0.99, "{resident} {peak}");
        assert_eq!(resident_mib(0), None);
        assert!(proportional_mib(pid).unwrap() > 1.0 && proportional_mib(0).is_none());
    }

    #[test]
    fn a_family_has_the_children_of_all_threads() {
        let start = || std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut children = [start(), std::thread::spawn(start).join().unwrap()];
        let found = family(std::process::id());
        let are_found = children.each_ref().map(|child| found.contains(&child.id()));
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(found[0] == std::process::id() && are_found == [true; 2], "{found:?}");
    }
}
