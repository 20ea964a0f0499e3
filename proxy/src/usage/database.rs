//! The SQLite file with everyone's usage.
//!
//! Only one process uses it: the lock is held as long as the file is open. In WAL mode with `synchronous = NORMAL` a commit is one
//! write to the system's cache, which survives the process. Only moving the WAL into the file waits for the disk.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, Params, Row, Statement, params};
use rustix::fs::OFlags;

use super::batch::{KeptSeries, SecretId, UsageBatch, UsageSums};
use super::report::{MAX_DAYS, MAX_ROWS, UsageFilter, UsageReport, UsageRow};
use crate::account::budget::TokensSpent;
use crate::utc_day::UtcDay;

/// The version of the tables, in SQLite's `user_version`.
const VERSION: i64 = 1;

/// A start waits at most this long for another process that is about to end.
const BUSY_WAIT: Duration = Duration::from_secs(2);

/// Small pages: a commit writes a few of them, each whole.
const SET_UP: &str = "
PRAGMA page_size = 1024;
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA wal_autocheckpoint = 0;
PRAGMA journal_size_limit = 16777216;
";

const TABLES: &str = "
BEGIN IMMEDIATE;
CREATE TABLE usage (
  day INTEGER NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL, requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
  cached_tokens INTEGER NOT NULL, generated_tokens INTEGER NOT NULL, engine_seconds REAL NOT NULL,
  PRIMARY KEY (day, key, model)
) WITHOUT ROWID;
CREATE TABLE last_use (secret INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL);
PRAGMA user_version = 1;
COMMIT;
";

/// A sum that is too large for an integer would become a number of another type, which cannot be read again.
const ADD: &str = "
INSERT INTO usage VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) ON CONFLICT (day, key, model) DO UPDATE SET
  requests = min(requests + excluded.requests, 9223372036854775807),
  prompt_tokens = min(prompt_tokens + excluded.prompt_tokens, 9223372036854775807),
  cached_tokens = min(cached_tokens + excluded.cached_tokens, 9223372036854775807),
  generated_tokens = min(generated_tokens + excluded.generated_tokens, 9223372036854775807),
  engine_seconds = engine_seconds + excluded.engine_seconds
";

const NOTE_USE: &str = "
INSERT INTO last_use VALUES (?1, ?2) ON CONFLICT (secret) DO UPDATE SET at_ms = max(at_ms, excluded.at_ms)
";

const REPORT: &str = "
SELECT day, key, model, requests, prompt_tokens, cached_tokens, generated_tokens, engine_seconds FROM usage
WHERE day >= ?1 AND (?2 IS NULL OR key = ?2) AND (?3 IS NULL OR model = ?3) ORDER BY day DESC, key, model LIMIT ?4
";

/// Days that a wrong clock has put into the future count in no month. `total` does not overflow; it is exact up to 2^53.
const SPENT: &str = "
SELECT key, CAST(min(total(prompt_tokens * (day = ?2)) + total(generated_tokens * (day = ?2)), 9e18) AS INTEGER),
  CAST(min(total(prompt_tokens) + total(generated_tokens), 9e18) AS INTEGER)
FROM usage WHERE day BETWEEN ?1 AND ?2 + 1 GROUP BY key
";

/// The reason why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum UsageFileError {
    #[error("another Baton keeps its usage in {0}. Give this one a state_folder of its own")]
    InUse(PathBuf),
    #[error("{0} was written by a newer Baton. Update this one, or move the file away")]
    Newer(PathBuf),
    #[error("the usage cannot be kept in {path}: {error}. Free or repair it, or move it away and lose what it has")]
    Unusable { path: PathBuf, error: String },
    #[error("the usage needs a thread: {0}")]
    Thread(io::Error),
}

/// The open file, or one in memory.
pub(super) struct UsageFile {
    connection: Connection,
    is_in_memory: bool,
}

impl UsageFile {
    /// Opens or creates the file. `None`: one in memory.
    pub(super) fn open(path: Option<&Path>) -> Result<UsageFile, UsageFileError> {
        let shown = path.map(Path::to_owned).unwrap_or_default();
        let unusable = |error: String| UsageFileError::Unusable { path: shown.clone(), error };
        let connection = match path {
            None => Connection::open_in_memory(),
            Some(path) => {
                // Before SQLite creates it for everyone. Its other files have the mode of this one. Nothing here is led elsewhere by a
                // link, or waits for the reader of a pipe.
                let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
                let file = OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(flags).open(path);
                let is_file =
                    file.and_then(|file| file.metadata()).map_err(|error| unusable(error.to_string()))?.is_file();
                if !is_file {
                    return Err(unusable("it is no regular file".to_owned()));
                }
                Connection::open(path)
            }
        };
        let file = connection.and_then(|connection| UsageFile { connection, is_in_memory: path.is_none() }.set_up());
        match file {
            Ok(Some(file)) => Ok(file),
            Ok(None) => Err(UsageFileError::Newer(shown)),
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => {
                Err(UsageFileError::InUse(shown))
            }
            Err(error) => Err(unusable(error.to_string())),
        }
    }

    /// Takes the lock, makes the tables, and removes old days. `None`: the tables are of a newer version.
    fn set_up(self) -> rusqlite::Result<Option<UsageFile>> {
        self.connection.busy_timeout(BUSY_WAIT)?;
        self.connection.execute_batch(SET_UP)?;
        match self.connection.query_row("PRAGMA user_version", [], |row| row.get::<_, i64>(0))? {
            0 => self.connection.execute_batch(TABLES)?,
            VERSION => self.remove_old(UtcDay::today())?,
            _ => return Ok(None),
        }
        Ok(Some(self))
    }

    /// Removes the days that are kept no longer.
    pub(super) fn remove_old(&self, today: UtcDay) -> rusqlite::Result<()> {
        let oldest = today.days_before(MAX_DAYS).number();
        self.connection.execute("DELETE FROM usage WHERE day < ?1", [oldest]).map(drop)
    }

    /// Nothing of it outlives the process.
    pub(super) fn is_in_memory(&self) -> bool {
        self.is_in_memory
    }

    /// Lets the file not grow, as a full disk does; `None`: it may again.
    #[cfg(test)]
    pub(super) fn limit_pages(&self, most: Option<u32>) {
        let most = most.unwrap_or(u32::MAX >> 1);
        self.connection.query_row(&format!("PRAGMA max_page_count = {most}"), [], |_| Ok(())).unwrap();
    }

    #[cfg(test)]
    pub(super) fn set_version(&self, version: i64) {
        self.connection.execute_batch(&format!("PRAGMA user_version = {version}")).unwrap();
    }

    /// Prepares what is done for each batch.
    pub(super) fn writer(&self) -> rusqlite::Result<BatchWriter<'_>> {
        let prepare = |sql| self.connection.prepare(sql);
        let (begin, commit, rollback) = (prepare("BEGIN IMMEDIATE")?, prepare("COMMIT")?, prepare("ROLLBACK")?);
        let (add, note_use) = (prepare(ADD)?, prepare(NOTE_USE)?);
        Ok(BatchWriter { noted: HashMap::new(), connection: &self.connection, begin, commit, rollback, add, note_use })
    }

    /// Moves what was committed from the WAL into the file. Waits for the disk.
    pub(super) fn checkpoint(&self) -> rusqlite::Result<()> {
        match self.is_in_memory {
            true => Ok(()),
            false => self.connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())),
        }
    }

    pub(super) fn report(&self, filter: UsageFilter) -> rusqlite::Result<UsageReport> {
        let until = UtcDay::today();
        let since = until.days_before(filter.days.saturating_sub(1));
        let most = MAX_ROWS as i64 + 1;
        let mut rows = self.all(REPORT, params![since.number(), filter.key, filter.model, most], report_row)?;
        let is_truncated = rows.len() > MAX_ROWS;
        rows.truncate(MAX_ROWS);
        let is_kept = !self.is_in_memory;
        Ok(UsageReport { since: since.to_string(), until: until.to_string(), is_kept, is_truncated, rows })
    }

    /// The tokens that each key has spent on this day and in this month.
    pub(super) fn spent(&self) -> rusqlite::Result<HashMap<String, TokensSpent>> {
        let today = UtcDay::today();
        let spent = self.all(SPENT, params![today.first_of_month().number(), today.number()], |row| {
            let spent = TokensSpent { today: count(row, 1)?, this_month: count(row, 2)? };
            Ok((row.get(0)?, spent))
        });
        Ok(spent?.into_iter().collect())
    }

    /// When each secret was last used.
    pub(super) fn last_uses(&self) -> rusqlite::Result<HashMap<SecretId, u64>> {
        let used = self.all("SELECT secret, at_ms FROM last_use", [], |row| {
            Ok((SecretId::of_number(row.get(0)?), count(row, 1)?))
        });
        Ok(used?.into_iter().collect())
    }

    fn all<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Vec<T>> {
        self.connection.prepare(sql)?.query_map(params, read)?.collect()
    }
}

/// A secret's last use is as exact as this, milliseconds. It is half of what a commit writes.
const LAST_USE_STEP: u64 = 1_000;

/// The statements of a commit.
pub(super) struct BatchWriter<'c> {
    /// The last use of each secret that was committed.
    noted: HashMap<SecretId, u64>,
    connection: &'c Connection,
    begin: Statement<'c>,
    commit: Statement<'c>,
    rollback: Statement<'c>,
    add: Statement<'c>,
    note_use: Statement<'c>,
}

impl BatchWriter<'_> {
    /// Commits a batch, all of it or nothing.
    pub(super) fn write(&mut self, batch: &UsageBatch) -> rusqlite::Result<()> {
        let is_due = |(secret, at): &(&SecretId, &u64)| {
            let noted = self.noted.get(secret);
            noted.is_none_or(|noted| at.abs_diff(*noted) >= LAST_USE_STEP)
        };
        let uses: Vec<_> = batch.last_uses.iter().filter(is_due).map(|(secret, at)| (*secret, *at)).collect();
        self.begin.execute([])?;
        let written = self.add_all(batch, &uses).and_then(|()| self.commit.execute([]));
        if written.is_err() && !self.connection.is_autocommit() {
            self.rollback.execute([])?;
        }
        written?;
        self.noted.extend(uses);
        Ok(())
    }

    fn add_all(&mut self, batch: &UsageBatch, uses: &[(SecretId, u64)]) -> rusqlite::Result<()> {
        for ((day, KeptSeries { key, model }), sums) in &batch.sums {
            let UsageSums { requests, prompt_tokens, cached_tokens, generated_tokens, engine_seconds } = *sums;
            let [requests, prompt, cached, generated] = [requests, prompt_tokens, cached_tokens, generated_tokens]
                .map(|n| i64::try_from(n).unwrap_or(i64::MAX));
            self.add.execute(params![day.number(), key, model, requests, prompt, cached, generated, engine_seconds])?;
        }
        for (secret, at_ms) in uses {
            self.note_use.execute(params![secret.number(), i64::try_from(*at_ms).unwrap_or(i64::MAX)])?;
        }
        Ok(())
    }
}

fn report_row(row: &Row<'_>) -> rusqlite::Result<UsageRow> {
    Ok(UsageRow {
        day: UtcDay::of_number(row.get(0)?).to_string(),
        key: row.get(1)?,
        model: row.get(2)?,
        requests: count(row, 3)?,
        prompt_tokens: count(row, 4)?,
        cached_tokens: count(row, 5)?,
        generated_tokens: count(row, 6)?,
        engine_seconds: row.get(7)?,
    })
}

/// A count, which is never negative.
fn count(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(u64::try_from(row.get::<_, i64>(column)?).unwrap_or_default())
}
