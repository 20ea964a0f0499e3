//! Tells the operator whether `--mlock` has locked the weights. llama.cpp only warns, in its own log, which is quiet.

/// Warns if less memory is locked than the weights have. Only Linux says how much is locked.
pub(super) fn warn_unless_locked(weights_bytes: u64) {
    let Some(locked_bytes) = locked_bytes() else { return };
    if locked_bytes < weights_bytes {
        tracing::warn!(
            "--mlock: {} of {} MiB of weights are locked in memory; the rest may be swapped out. Either the limit is too low \
             (`ulimit -l`, LimitMEMLOCK= in a systemd unit), or llama.cpp has rearranged tensors, which it does not lock",
            locked_bytes >> 20,
            weights_bytes >> 20
        );
    }
}

/// Memory that this process has locked, bytes.
fn locked_bytes() -> Option<u64> {
    of_status(&std::fs::read_to_string("/proc/self/status").ok()?)
}

fn of_status(status: &str) -> Option<u64> {
    let kib = status.lines().find_map(|line| line.strip_prefix("VmLck:")?.trim().strip_suffix("kB"))?;
    Some(kib.trim().parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_line_is_read() {
        assert_eq!(of_status("Name:\tbaton\nVmLck:\t   93184 kB\nVmPin:\t 0 kB\n"), Some(93_184 << 10));
        assert_eq!(of_status("Name:\tbaton\n"), None);
    }
}
