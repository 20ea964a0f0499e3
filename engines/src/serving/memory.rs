//! The memory that an engine may use.

/// Memory that can be allocated without swapping, bytes; unlimited if the system does not report it.
pub(crate) fn available_memory() -> u64 {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let available = system.available_memory();
    // Not the group's `free_memory`: it counts the page cache as used, and with it a model file that was just read.
    let in_cgroup = system.cgroup_limits().map_or(u64::MAX, |limits| limits.total_memory.saturating_sub(limits.rss));
    if available == 0 { u64::MAX } else { available.min(in_cgroup) }
}
