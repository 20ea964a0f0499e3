//! Counts how often scopes of a model were cleared, so that the processes which use its blocks forget these scopes, too.
//!
//! `<model>/cleared` has a line for all scopes, and one for each that was cleared alone: `all <times>` or `<scope> <times>`.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use baton_schemas::CacheScope;

use super::private::write_whole;
use super::scope_counts::{ScopeCounts, lines, parse, text_of};

const CLEARED: &str = "cleared";
const ALL: &str = "all";

/// Clearing one more scope alone clears all.
const MAX_SCOPES: usize = 1_024;

/// The steps of a file system's clock, at most.
pub(crate) const CLOCK_STEPS: Duration = Duration::from_secs(2);

/// The longest file.
const MAX_BYTES: u64 = 64 << 10;

/// The scopes that were cleared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClearedKv {
    All,
    Of(Vec<CacheScope>),
}

/// How often the scopes of a model were cleared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ClearCounts {
    all: u64,
    scopes: ScopeCounts,
}

/// The counts that a process has seen.
#[derive(Debug, Default)]
pub(crate) struct SeenClears {
    counts: ClearCounts,
    /// Cleared, and not yet told to the owner of the store.
    untold: Option<ClearedKv>,
}

impl ClearedKv {
    fn and(self, newer: ClearedKv) -> ClearedKv {
        match (self, newer) {
            (ClearedKv::Of(earlier), ClearedKv::Of(newer)) => ClearedKv::Of([earlier, newer].concat()),
            _ => ClearedKv::All,
        }
    }
}

impl ClearCounts {
    fn read(model: &Path) -> ClearCounts {
        let text = File::open(model.join(CLEARED)).and_then(|file| text_of(&file, MAX_BYTES)).unwrap_or_default();
        let all = text.lines().filter_map(|line| line.strip_prefix(ALL)?.trim_start().parse().ok()).next();
        ClearCounts { all: all.unwrap_or(0), scopes: parse(&text) }
    }

    fn text(&self) -> String {
        format!("{ALL} {}\n{}", self.all, lines(&self.scopes))
    }

    fn count(&mut self, scopes: Option<&[CacheScope]>) {
        for CacheScope(scope) in scopes.unwrap_or_default() {
            let n = self.scopes.entry(*scope).or_default();
            *n = n.saturating_add(1);
        }
        if scopes.is_none() || self.scopes.len() > MAX_SCOPES {
            (self.all, self.scopes) = (self.all.saturating_add(1), ScopeCounts::new());
        }
    }

    /// The scopes that `newer` counts more often.
    fn until(&self, newer: &ClearCounts) -> Option<ClearedKv> {
        if newer.all > self.all {
            return Some(ClearedKv::All);
        }
        let is_new = |(scope, n): &(&u64, &u64)| *n > self.scopes.get(scope).unwrap_or(&0);
        let scopes: Vec<_> = newer.scopes.iter().filter(is_new).map(|(scope, _)| CacheScope(*scope)).collect();
        (!scopes.is_empty()).then_some(ClearedKv::Of(scopes))
    }
}

/// Tells all processes that use a model's folder that scopes, or all, were cleared. Call it when the files are gone, under the folder's
/// lock, so that nobody else does so at the same time.
pub(crate) fn note(model: &Path, scopes: Option<&[CacheScope]>) -> io::Result<()> {
    let mut counts = ClearCounts::read(model);
    counts.count(scopes);
    write_whole(model, Path::new(CLEARED), counts.text().as_bytes())
}

impl SeenClears {
    /// Begins to count. Earlier clears need nothing: their KV is no longer there, unless an engine, which waits so long for the store that
    /// was opened then, runs without its slow disk. Returns true if something was cleared since: nobody knows what, so the owner is told that
    /// everything was.
    pub(crate) fn begin(&mut self, model: &Path, opened: SystemTime, engine_waits: Duration) -> bool {
        self.counts = ClearCounts::read(model);
        let changed = fs::metadata(model.join(CLEARED)).and_then(|facts| facts.modified());
        // After what may take long on such a disk. A clock that was set back says nothing.
        let runs = opened.elapsed().map_or(true, |age| age > engine_waits);
        let is_missed = runs && changed.is_ok_and(|at| at + CLOCK_STEPS > opened);
        if is_missed {
            self.untold = Some(ClearedKv::All);
        }
        is_missed
    }

    /// The scopes that were cleared since the last look; the owner is told them, too.
    pub(crate) fn look(&mut self, model: &Path) -> Option<ClearedKv> {
        let now = ClearCounts::read(model);
        let cleared = self.counts.until(&now);
        // Whoever emptied the folder has also taken the counts.
        self.counts = now;
        let cleared = cleared?;
        self.untold = Some(match self.untold.take() {
            Some(earlier) => earlier.and(cleared.clone()),
            None => cleared.clone(),
        });
        Some(cleared)
    }

    /// The scopes that were cleared since the last call.
    pub(crate) fn take(&mut self) -> Option<ClearedKv> {
        self.untold.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_cleared_is_told_once_and_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let mut seen = ClearCounts::read(folder.path());
        let mut told = |scopes: Option<&[CacheScope]>| {
            note(folder.path(), scopes).unwrap();
            let now = ClearCounts::read(folder.path());
            let cleared = seen.until(&now);
            assert_eq!(now.until(&now), None);
            seen = now;
            cleared
        };
        let two = [CacheScope(1), CacheScope(u64::MAX)];
        assert_eq!(told(Some(&two)), Some(ClearedKv::Of(two.to_vec())));
        assert_eq!(told(Some(&two[1..])), Some(ClearedKv::Of(two[1..].to_vec())));
        assert_eq!(told(None), Some(ClearedKv::All));
        let many: Vec<CacheScope> = (0..MAX_SCOPES as u64).map(CacheScope).collect();
        assert_eq!(told(Some(&many)), Some(ClearedKv::Of(many.clone())));
        assert_eq!(told(Some(&[CacheScope(1 << 40)])), Some(ClearedKv::All), "one more than are counted");
        let size = folder.path().join(CLEARED).metadata().unwrap().len();
        note(folder.path(), Some(&many)).unwrap();
        assert!(folder.path().join(CLEARED).metadata().unwrap().len() < MAX_BYTES && size < 64);
    }

    #[test]
    fn a_damaged_file_counts_as_none() {
        let folder = tempfile::tempdir().unwrap();
        for damaged in [&b"\xff\xfe"[..], b"all\nall x\n 3\nzz 4\n", b""] {
            std::fs::write(folder.path().join(CLEARED), damaged).unwrap();
            assert_eq!(ClearCounts::read(folder.path()), ClearCounts::default());
        }
    }
}
