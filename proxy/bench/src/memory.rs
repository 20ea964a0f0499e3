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
    }
}
