use std::sync::atomic::AtomicU32;
use std::time::{Duration, SystemTime};

use baton_schemas::FinishReason;
use baton_schemas::sequence::{CachedTokens, Timings};
use tempfile::TempDir;

use super::batch::MAX_SERIES;
use super::*;
use crate::account::{Account, KeyLimits};
use crate::error::RequestError;
use crate::reply_event::{EventKind, ReplyEvent};
use crate::utc_day::UtcDay;

fn sums(requests: u64) -> UsageSums {
    UsageSums {
        requests,
        prompt_tokens: 100 * requests,
        cached_tokens: 10 * requests,
        generated_tokens: 7 * requests,
        engine_seconds: 0.5 * requests as f64,
    }
}

fn record<'a>(key: &'a str, model: &'a str, secret: Option<SecretId>) -> UsageRecord<'a> {
    UsageRecord { key, model, secret, at: SystemTime::now(), sums: sums(1) }
}

fn everything(days: u32) -> UsageFilter {
    UsageFilter { days, key: None, model: None }
}

async fn rows(ledger: &UsageLedger, filter: UsageFilter) -> Vec<(String, String, u64, u64)> {
    let report = ledger.report(filter).await.unwrap();
    report.rows.into_iter().map(|row| (row.key, row.model, row.requests, row.prompt_tokens)).collect()
}

fn row(key: &str, model: &str, requests: u64) -> (String, String, u64, u64) {
    (key.into(), model.into(), requests, 100 * requests)
}

#[tokio::test]
async fn usage_is_summed_up_by_key_and_model_and_survives_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let secret = SecretId::of_hash(&[0xab; 32]);
    for run in 1..=2 {
        let ledger = UsageLedger::open(Some(folder.path())).unwrap();
        for (key, model, n) in [("anna", "m", 3), ("anna", "o", 1), ("ben", "m", 2)] {
            for _ in 0..n {
                let batch = ledger.record(record(key, model, Some(secret)));
                ledger.written(batch).await;
            }
        }
        let all = [row("anna", "m", 3 * run), row("anna", "o", run), row("ben", "m", 2 * run)];
        assert_eq!(rows(&ledger, everything(1)).await, all);
        let only = |key: Option<&str>, model: Option<&str>| UsageFilter {
            days: 400,
            key: key.map(str::to_owned),
            model: model.map(str::to_owned),
        };
        assert_eq!(rows(&ledger, only(Some("ben"), None)).await, all[2..]);
        assert_eq!(rows(&ledger, only(Some("anna"), Some("o"))).await, all[1..2]);
        assert_eq!(rows(&ledger, only(Some("nobody"), None)).await, []);
        let spent = ledger.spent().await.unwrap();
        assert_eq!(spent["anna"], TokensSpent { today: 428 * run, this_month: 428 * run });
        let used = ledger.last_uses().await.unwrap()[&secret];
        assert!(SystemTime::UNIX_EPOCH + Duration::from_millis(used) <= SystemTime::now());
        assert!(ledger.report(everything(1)).await.unwrap().is_kept);
        let state = ledger.state();
        assert_eq!((state.n_unsaved, state.n_failed_writes, state.n_late), (0, 0, 0));
        let since_start: u64 = state.series.iter().map(|(_, sums)| sums.requests).sum();
        assert_eq!(since_start, 6, "metrics begin anew with each process");
        ledger.close().await;
        assert!(ledger.report(everything(1)).await.is_err(), "a closed ledger answers nothing");
    }
}

#[tokio::test]
async fn names_are_parameters_and_never_sql() {
    let ledger = UsageLedger::open(None).unwrap();
    let (key, model) = ("a'; DROP TABLE usage; --", "m' OR '1'='1");
    for (key, model) in [(key, model), ("ben", "m")] {
        ledger.written(ledger.record(record(key, model, None))).await;
    }
    let only = |key: Option<&str>, model: Option<&str>| UsageFilter {
        days: 1,
        key: key.map(str::to_owned),
        model: model.map(str::to_owned),
    };
    assert_eq!(rows(&ledger, only(Some(key), None)).await, [row(key, model, 1)]);
    assert_eq!(rows(&ledger, only(None, Some(model))).await, [row(key, model, 1)]);
    assert_eq!(rows(&ledger, only(Some("' OR 1 --"), None)).await, []);
    assert_eq!(ledger.spent().await.unwrap().len(), 2);
}

#[tokio::test]
async fn without_a_folder_usage_ends_with_the_process_and_no_reply_waits() {
    let ledger = UsageLedger::open(None).unwrap();
    let batch = ledger.record(record("anna", "m", None));
    ledger.written(batch).await;
    assert_eq!(rows(&ledger, everything(1)).await, [row("anna", "m", 1)]);
    assert!(!ledger.report(everything(1)).await.unwrap().is_kept);
    assert!(ledger.last_uses().await.unwrap().is_empty());
}

#[test]
fn a_batch_that_cannot_be_written_is_written_later_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let file = UsageFile::open(Some(&file_in(folder.path()))).unwrap();
    let mut writer = file.writer().unwrap();
    let mut batch = UsageBatch::default();
    batch.add(record("anna", "m", None));
    file.limit_pages(Some(1));
    let many = |batch: &mut UsageBatch| (0..500).for_each(|i| batch.add(record(&format!("key {i}"), "m", None)));
    many(&mut batch);
    let error = writer.write(&batch).unwrap_err();
    assert!(error.to_string().contains("full"), "{error}");
    assert!(file.report(everything(1)).unwrap().rows.is_empty(), "half a batch would be counted twice");
    file.limit_pages(None);
    batch.add(record("anna", "m", None));
    writer.write(&batch).unwrap();
    let report = file.report(everything(1)).unwrap();
    assert_eq!((report.rows.len(), report.rows[0].requests), (501, 2));
}

#[test]
fn a_file_that_is_used_newer_or_damaged_is_refused_and_stays_as_it_is() {
    let folder: TempDir = tempfile::tempdir().unwrap();
    let path = file_in(folder.path());
    let open = || UsageFile::open(Some(&path)).map(drop);
    let first = UsageFile::open(Some(&path)).unwrap();
    assert!(matches!(open(), Err(UsageFileError::InUse(_))));
    first.set_version(2);
    drop(first);
    assert!(matches!(open(), Err(UsageFileError::Newer(_))));
    let damaged = vec![7; 4_096];
    std::fs::write(&path, &damaged).unwrap();
    let error = open().unwrap_err();
    assert!(
        matches!(&error, UsageFileError::Unusable { .. }) && error.to_string().contains("usage.sqlite3"),
        "{error}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), damaged);
}

#[test]
fn a_link_or_a_pipe_in_the_place_of_the_file_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = file_in(folder.path());
    let open = || UsageFile::open(Some(&path)).map(drop);
    let elsewhere = folder.path().join("elsewhere");
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    assert!(matches!(open(), Err(UsageFileError::Unusable { .. })) && !elsewhere.exists());
    std::fs::remove_file(&path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    assert!(matches!(open(), Err(UsageFileError::Unusable { .. })));
}

#[test]
fn days_that_are_too_old_are_removed_and_files_are_their_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = file_in(folder.path());
    let now = SystemTime::now();
    let ago = |days: u32| now - Duration::from_secs(86_400 * u64::from(days));
    let file = UsageFile::open(Some(&path)).unwrap();
    let mut batch = UsageBatch::default();
    for days in [0, 1, report::MAX_DAYS, report::MAX_DAYS + 1] {
        batch.add(UsageRecord { at: ago(days), ..record("anna", "m", None) });
    }
    file.writer().unwrap().write(&batch).unwrap();
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let mode = entry.unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{mode:o}");
    }
    drop(file);
    let file = UsageFile::open(Some(&path)).unwrap();
    let days = |n| file.report(everything(n)).unwrap().rows.into_iter().map(|row| row.day).collect::<Vec<_>>();
    let today = UtcDay::of(now);
    assert_eq!(days(2), [today.to_string(), today.days_before(1).to_string()]);
    assert_eq!(days(10_000).len(), 3, "{:?}", days(10_000));
}

#[test]
fn sums_that_are_too_large_and_days_of_a_wrong_clock_leave_the_file_readable() {
    let file = UsageFile::open(None).unwrap();
    let mut writer = file.writer().unwrap();
    let most = UsageSums { requests: u64::MAX, prompt_tokens: u64::MAX, generated_tokens: u64::MAX, ..sums(1) };
    let ahead = SystemTime::now() + Duration::from_secs(10 * 86_400);
    for (key, at) in [("anna", SystemTime::now()), ("anna", SystemTime::now()), ("ben", ahead)] {
        let mut batch = UsageBatch::default();
        batch.add(UsageRecord { at, sums: most, ..record(key, "m", None) });
        writer.write(&batch).unwrap();
    }
    let rows = file.report(everything(1)).unwrap().rows;
    assert_eq!((rows.len(), rows[1].requests), (2, i64::MAX as u64));
    assert_eq!(rows[0].day, UtcDay::of(ahead).to_string(), "it is not today's");
    let spent = file.spent().unwrap();
    assert!(spent["anna"].today >= 1 << 62 && spent["anna"].this_month >= 1 << 62, "{spent:?}");
    assert!(!spent.contains_key("ben"), "a day that has not come uses up no budget: {spent:?}");
}

#[test]
fn a_batch_has_a_bound_whatever_models_there_are() {
    let mut batch = UsageBatch::default();
    for i in 0..MAX_SERIES + 10 {
        batch.add(record("anna", &format!("model {i}"), None));
    }
    assert_eq!((batch.sums.len(), batch.n_requests()), (MAX_SERIES + 1, MAX_SERIES as u64 + 10));
}

fn finished(choice: u32, n_completion: u32) -> ReplyEvent {
    let timings = Timings { prompt_ms: 100.0, predicted_ms: 400.0, ..Timings::default() };
    EventKind::Finished { reason: FinishReason::Stop, stop: None, n_completion, n_reasoning: 0, timings }.of(choice)
}

#[tokio::test]
async fn a_reply_counts_what_its_client_is_told_and_one_that_breaks_off_what_was_generated() {
    let ledger = Arc::new(UsageLedger::open(None).unwrap());
    let account = Arc::new(Account::new("anna", KeyLimits::default()));
    let request = |n_prompt, n_choices, n_generated| {
        let mut usage = RequestUsage::new(&ledger, &account, None);
        usage.is_for("m");
        usage.begin(n_prompt, n_choices, Arc::new(AtomicU32::new(n_generated)));
        usage
    };
    let row = async || ledger.report(everything(1)).await.unwrap().rows.swap_remove(0);
    let mut whole = request(100, 2, 12);
    let started = |n_cached, choice| EventKind::Started(CachedTokens::in_slot(n_cached)).of(choice);
    // The second choice finds the prompt that the first one has.
    for event in [started(40, 0), started(100, 1), finished(1, 5)] {
        assert!(whole.event(&event).is_none());
    }
    assert!(whole.event(&finished(0, 7)).is_some(), "the last event waits for the record");
    drop(whole);
    let counted = row().await;
    assert_eq!((counted.requests, counted.prompt_tokens, counted.cached_tokens), (1, 100, 40));
    assert_eq!((counted.generated_tokens, counted.engine_seconds), (12, 1.0));
    assert_eq!(account.spent(), TokensSpent { today: 112, this_month: 112 });
    // Times that a node made up.
    let mut boasting = request(0, 2, 0);
    for (choice, prompt_ms) in [(0, f64::MAX), (1, -f64::INFINITY)] {
        let timings = Timings { prompt_ms, predicted_ms: f64::NAN, ..Timings::default() };
        let end =
            EventKind::Finished { reason: FinishReason::Stop, stop: None, n_completion: 0, n_reasoning: 0, timings };
        let _ = boasting.event(&end.of(choice));
    }
    drop(boasting);
    assert_eq!(row().await.engine_seconds, 86_401.0);
    // An attempt that began nothing.
    let mut nothing = request(80, 1, 0);
    nothing.never_began();
    drop(nothing);
    assert_eq!(row().await.prompt_tokens, 100);
    // Its client leaves after the first of two choices.
    let mut left = request(50, 2, 9);
    assert!(left.event(&finished(0, 5)).is_none());
    drop(left);
    let counted = row().await;
    assert_eq!((counted.requests, counted.prompt_tokens, counted.generated_tokens), (3, 150, 21));
    // The engine takes nothing of a request that is wrong.
    let mut wrong = request(70, 1, 0);
    wrong.failed(&RequestError::ModelNotFound { model: "m".into() });
    drop(wrong);
    let mut lost = request(30, 1, 0);
    lost.failed(&RequestError::unavailable("lost", Duration::from_secs(1)));
    drop(lost);
    let counted = row().await;
    assert_eq!((counted.requests, counted.prompt_tokens, counted.generated_tokens), (4, 180, 21));
}
