//! What the machine has, and what a process holds of it.

use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System};

/// The machine's memory, or what this group of processes may use of it, bytes. `None` where the system does not say.
pub fn total_memory() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory();
    let in_group = system.cgroup_limits().map_or(u64::MAX, |limits| limits.total_memory);
    Some(system.total_memory().min(in_group)).filter(|&bytes| bytes > 0)
}

/// Resident memory of a process, bytes; `None` if it is gone.
pub(super) fn resident_bytes(pid: u32) -> Option<u64> {
    let mut system = System::new();
    let pid = Pid::from_u32(pid);
    let what = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), true, what);
    system.process(pid).map(sysinfo::Process::memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_holds_less_than_there_is() {
        let (own, total) = (resident_bytes(std::process::id()).unwrap(), total_memory().unwrap());
        assert!(own > 1 << 20 && own < total, "{own} of {total}");
        assert_eq!(resident_bytes(u32::MAX), None);
    }
}
