//! Memory of the machine and of a process.

use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System};

/// Bytes of memory that this process may use: the machine's, or the limit of its control group if that is less. `None` if
/// the system does not report it.
pub fn total_memory() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory();
    let in_group = system.cgroup_limits().map_or(u64::MAX, |limits| limits.total_memory);
    Some(system.total_memory().min(in_group)).filter(|&bytes| bytes > 0)
}

/// Bytes of resident memory of a process; `None` if it has ended.
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
    fn a_process_holds_less_than_the_machine_has() {
        let own = resident_bytes(std::process::id()).unwrap();
        let total = total_memory().unwrap();
        assert!(own > 1 << 20 && own < total, "{own} of {total}");
        assert_eq!(resident_bytes(u32::MAX), None);
    }
}
