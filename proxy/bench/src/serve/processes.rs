//! Processor time and memory of processes.

use std::time::Duration;

use sysinfo::{Pid, Process, ProcessRefreshKind, ProcessesToUpdate, System};

/// A process and all its descendants, or several.
pub(super) struct ProcessGroup {
    system: System,
    pids: Vec<Pid>,
}

/// What processes used since their start, and hold now.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProcessUse {
    /// User and system time. The kernel counts it in steps of 10 ms.
    pub(super) cpu: Duration,
    pub(super) resident_bytes: u64,
}

impl ProcessGroup {
    /// The processes with these ids and their descendants, as they are now. `None` if one does not exist.
    pub(super) fn find(roots: &[u32]) -> Option<ProcessGroup> {
        let mut system = System::new();
        system.refresh_processes_specifics(ProcessesToUpdate::All, true, ProcessRefreshKind::nothing());
        let mut pids: Vec<Pid> = roots.iter().map(|pid| Pid::from_u32(*pid)).collect();
        if pids.iter().any(|pid| system.process(*pid).is_none()) {
            return None;
        }
        let mut next = 0;
        while let Some(parent) = pids.get(next).copied() {
            let is_child = |process: &&Process| process.parent() == Some(parent) && process.thread_kind().is_none();
            let children = system.processes().values().filter(is_child).map(Process::pid);
            let new: Vec<Pid> = children.filter(|pid| !pids.contains(pid)).collect();
            pids.extend(new);
            next += 1;
        }
        Some(ProcessGroup { system, pids })
    }

    /// `None` if a process has ended: its time is lost.
    pub(super) fn read(&mut self) -> Option<ProcessUse> {
        let kind = ProcessRefreshKind::nothing().with_cpu().with_memory().without_tasks();
        self.system.refresh_processes_specifics(ProcessesToUpdate::Some(&self.pids), true, kind);
        let mut used = ProcessUse { cpu: Duration::ZERO, resident_bytes: 0 };
        for pid in &self.pids {
            let process = self.system.process(*pid)?;
            used.cpu += Duration::from_millis(process.accumulated_cpu_time());
            used.resident_bytes += process.memory();
        }
        Some(used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_measured_with_its_children() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut with_child = ProcessGroup::find(&[std::process::id()]).unwrap();
        let mut alone = ProcessGroup::find(&[child.id()]).unwrap();
        assert!(with_child.pids.contains(&Pid::from_u32(child.id())));
        let (both, one) = (with_child.read().unwrap(), alone.read().unwrap());
        assert!(both.resident_bytes > one.resident_bytes && one.resident_bytes > 0, "{both:?} {one:?}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(alone.read().is_none(), "it has ended");
        assert!(ProcessGroup::find(&[u32::MAX >> 2]).is_none());
    }
}
