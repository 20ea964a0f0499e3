//! How long machines take to wake, by the addresses of their network cards, kept in a file of the state folder.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_pairing::mac_address::MacAddress;

/// The file's name.
const FILE: &str = "wake-times.json";

/// The time to wake before it was measured.
const UNMEASURED: Duration = Duration::from_secs(60);

/// The longest that a machine may take to wake.
pub const MAX_WAKE: Duration = Duration::from_secs(600);

/// Measurements that are kept of a machine. Their median forgets a machine's old disk after five.
const N_KEPT: usize = 9;

/// Machines in a file at most.
const MAX_MACHINES: usize = 1_000;

/// The largest file, bytes: more than that many machines take.
const MAX_BYTES: u64 = 1 << 20;

/// Seconds by machine, the latest last.
type WakeSeconds = BTreeMap<String, Vec<f64>>;

/// The measured times of all machines. The default forgets them with the process.
#[derive(Debug, Default)]
pub struct WakeTimes {
    measured: Mutex<WakeSeconds>,
    file: Option<PathBuf>,
}

impl WakeTimes {
    /// The times that the file in this folder has. A file that cannot be read, or is none of Baton's, counts as empty.
    pub fn open(folder: Option<&Path>) -> WakeTimes {
        let file = folder.map(|folder| folder.join(FILE));
        let read = file.as_deref().map(read);
        let measured = match read {
            Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, "how long machines take to wake is measured anew: {FILE} cannot be read");
                WakeSeconds::default()
            }
            Some(Ok(measured)) => measured,
            Some(Err(_)) | None => WakeSeconds::default(),
        };
        WakeTimes { measured: Mutex::new(measured), file }
    }

    /// How long this machine will probably take: the median of what was measured.
    pub fn expected(&self, mac: MacAddress) -> Duration {
        let mut times = self.lock().get(&mac.to_string()).cloned().unwrap_or_default();
        times.sort_by(f64::total_cmp);
        let median = times.get(times.len() / 2).and_then(|seconds| Duration::try_from_secs_f64(*seconds).ok());
        median.unwrap_or(UNMEASURED)
    }

    /// The machine took so long. Writes the file; call it where that may block.
    pub fn note(&self, mac: MacAddress, took: Duration) {
        let mut measured = self.lock();
        if measured.len() >= MAX_MACHINES && !measured.contains_key(&mac.to_string()) {
            measured.pop_first();
        }
        let times = measured.entry(mac.to_string()).or_default();
        times.push(took.as_secs_f64());
        let n_old = times.len().saturating_sub(N_KEPT);
        times.drain(..n_old);
        if let Some(file) = &self.file
            && let Err(error) = write(file, &measured)
        {
            tracing::warn!(%error, "how long a machine took to wake is forgotten when this process ends");
        }
    }

    fn lock(&self) -> MutexGuard<'_, WakeSeconds> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(file: &Path) -> io::Result<WakeSeconds> {
    let invalid = |problem: String| io::Error::new(io::ErrorKind::InvalidData, problem);
    if std::fs::metadata(file)?.len() > MAX_BYTES {
        return Err(invalid(format!("it has more than {MAX_BYTES} bytes")));
    }
    let measured: WakeSeconds =
        serde_json::from_slice(&std::fs::read(file)?).map_err(|error| invalid(error.to_string()))?;
    let is_measured = |(mac, times): (&String, &Vec<f64>)| {
        let are_times = times.iter().all(|seconds| (0.0..=MAX_WAKE.as_secs_f64()).contains(seconds));
        mac.parse::<MacAddress>().is_ok() && are_times && times.len() <= N_KEPT
    };
    if measured.len() > MAX_MACHINES || !measured.iter().all(is_measured) {
        return Err(invalid("it has other values than times of machines".to_owned()));
    }
    Ok(measured)
}

/// Replaces the file as a whole, so that a process that ends meanwhile leaves the old one.
fn write(file: &Path, measured: &WakeSeconds) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    let mut new = tempfile::NamedTempFile::new_in(folder)?;
    new.write_all(&serde_json::to_vec(measured)?)?;
    new.persist(file).map(drop).map_err(|error| error.error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mac(last: u8) -> MacAddress {
        format!("a4:83:e7:12:34:{last:02x}").parse().unwrap()
    }

    #[test]
    fn the_median_of_the_last_measurements_outlives_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let times = WakeTimes::open(Some(folder.path()));
        assert_eq!(times.expected(mac(1)), UNMEASURED);
        for seconds in [100, 100, 100, 100, 100, 100, 100, 100, 20, 30, 10, 31, 32] {
            times.note(mac(1), Duration::from_secs(seconds));
        }
        let again = WakeTimes::open(Some(folder.path()));
        // Of 100, 100, 100, 100, 20, 30, 10, 31, 32.
        assert_eq!([again.expected(mac(1)), again.expected(mac(2))], [Duration::from_secs(32), UNMEASURED]);
    }

    #[test]
    fn a_file_with_other_values_counts_as_none_and_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        for text in ["", "[]", r#"{"me":[1.0]}"#, r#"{"a4:83:e7:12:34:01":[-1.0]}"#, r#"{"a4:83:e7:12:34:01":[1e9]}"#] {
            std::fs::write(&file, text).unwrap();
            let times = WakeTimes::open(Some(folder.path()));
            assert_eq!(times.expected(mac(1)), UNMEASURED, "{text}");
        }
        WakeTimes::open(Some(folder.path())).note(mac(1), Duration::from_secs(7));
        assert_eq!(WakeTimes::open(Some(folder.path())).expected(mac(1)), Duration::from_secs(7));
        std::fs::write(&file, vec![b' '; MAX_BYTES as usize + 1]).unwrap();
        assert_eq!(WakeTimes::open(Some(folder.path())).expected(mac(1)), UNMEASURED);
    }
}
