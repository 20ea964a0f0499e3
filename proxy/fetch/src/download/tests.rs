//! Downloads from a server that misbehaves.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;

use super::*;
use crate::cache::with_suffix;
use crate::client;
use crate::fake_server::{FakeServer, Seen, ServerFault, noise, sha256, short_limits};
use crate::progress::Silent;

const SIZE: usize = 200_000;

/// A folder to download to, and what is promised about the file.
struct Scene {
    folder: TempDir,
    server: FakeServer,
    source: DownloadSource,
}

async fn scene(faults: &[ServerFault]) -> Scene {
    let file = noise(SIZE);
    let server = FakeServer::serving(&file).await.with_faults(faults);
    let source = DownloadSource {
        url: server.url("/a.gguf"),
        name: "a.gguf".to_owned(),
        bearer: None,
        size_bytes: Some(SIZE as u64),
        sha256: Some(sha256(&file)),
        denied_hint: "ask nicely",
    };
    Scene { folder: tempfile::tempdir().unwrap(), server, source }
}

impl Scene {
    fn path(&self) -> PathBuf {
        self.folder.path().join("a.gguf")
    }

    fn part(&self) -> PathBuf {
        with_suffix(&self.path(), ".part")
    }

    async fn fetch(&self) -> Result<(), ModelError> {
        let limits = short_limits();
        let client = client::build(&limits, None).unwrap();
        let lock = PullLock::acquire(&self.path(), &Silent).await.unwrap();
        let fetcher = Fetcher { client: &client, limits: &limits, progress: &Silent, pause_after: |_| Duration::ZERO };
        fetcher.fetch(&self.source, &self.path(), &lock).await
    }

    /// A part of `n_bytes` right bytes, as a pull of a file with this ETag would leave it.
    fn leave_part(&self, bytes: &[u8], etag: Option<&str>) {
        fs::write(self.part(), bytes).unwrap();
        let identity = PartIdentity { etag: etag.map(str::to_owned), sha256: self.source.sha256.clone() };
        fs::write(with_suffix(&self.path(), ".part.json"), serde_json::to_vec(&identity).unwrap()).unwrap();
    }

    #[track_caller]
    fn assert_complete(&self) {
        assert!(fs::read(self.path()).unwrap() == noise(SIZE), "the file differs");
        assert!(!self.part().exists() && !with_suffix(&self.path(), ".part.json").exists());
    }

    #[track_caller]
    fn assert_absent(&self) {
        assert!(!self.path().exists(), "a file that is not verified has its final name");
    }

    fn ranges(&self) -> Vec<Option<String>> {
        self.server.seen().into_iter().map(|seen| seen.range).collect()
    }
}

fn range(start: usize) -> Option<String> {
    Some(format!("bytes={start}-"))
}

#[tokio::test]
async fn a_good_server_is_asked_once() {
    let scene = scene(&[]).await;
    scene.fetch().await.unwrap();
    scene.assert_complete();
    assert_eq!(scene.server.seen(), [Seen::default()]);
}

#[tokio::test]
async fn a_transfer_that_breaks_is_continued_where_it_broke() {
    for cut in [1, 4095, 100_001, SIZE - 1] {
        let scene = scene(&[ServerFault::CutAfter(cut)]).await;
        scene.fetch().await.unwrap();
        scene.assert_complete();
        let second = &scene.server.seen()[1];
        assert_eq!((&second.range, second.if_range.as_deref()), (&range(cut), Some("\"one\"")));
    }
}

#[tokio::test]
async fn a_transfer_that_breaks_again_and_again_ends_and_keeps_what_it_has() {
    let scene = scene(&[ServerFault::CutAfter(1000); 3]).await;
    let error = scene.fetch().await.unwrap_err();
    assert!(matches!(error, ModelError::Network { n_attempts: 3, .. }), "{error}");
    scene.assert_absent();
    assert_eq!(fs::metadata(scene.part()).unwrap().len(), 3000);
    scene.fetch().await.unwrap();
    scene.assert_complete();
    assert_eq!(scene.ranges()[1..], [range(1000), range(2000), range(3000)]);
}

#[tokio::test]
async fn a_server_that_falls_silent_is_left() {
    let scene = scene(&[ServerFault::HangAfter(50_000)]).await;
    scene.fetch().await.unwrap();
    scene.assert_complete();
    assert_eq!(scene.ranges()[1], range(50_000));
}

#[tokio::test]
async fn a_dropped_pull_leaves_no_file_and_is_continued() {
    let scene = scene(&[ServerFault::HangAfter(70_000)]).await;
    let dropped = tokio::time::timeout(Duration::from_millis(200), scene.fetch()).await;
    assert!(dropped.is_err());
    scene.assert_absent();
    scene.fetch().await.unwrap();
    scene.assert_complete();
    assert_eq!(scene.ranges()[1], range(70_000));
}

#[tokio::test]
async fn a_server_that_ignores_ranges_sends_it_all_again() {
    let scene = scene(&[ServerFault::CutAfter(100_000), ServerFault::IgnoreRange]).await;
    scene.fetch().await.unwrap();
    scene.assert_complete();
}

#[tokio::test]
async fn a_server_that_continues_elsewhere_is_asked_for_everything() {
    let scene = scene(&[ServerFault::CutAfter(100_000), ServerFault::WrongRange]).await;
    scene.fetch().await.unwrap();
    scene.assert_complete();
    assert_eq!(scene.ranges(), [None, range(100_000), None]);
}

#[tokio::test]
async fn a_refused_range_is_given_up() {
    let scene = scene(&[ServerFault::CutAfter(100_000), ServerFault::Status(416)]).await;
    scene.fetch().await.unwrap();
    scene.assert_complete();
    assert_eq!(scene.ranges(), [None, range(100_000), None]);
}

#[tokio::test]
async fn a_file_that_changed_in_between_is_fetched_anew() {
    let mut scene = scene(&[ServerFault::CutAfter(100_000), ServerFault::Status(404)]).await;
    // Nobody promises anything: only the ETag tells.
    (scene.source.size_bytes, scene.source.sha256) = (None, None);
    assert!(matches!(scene.fetch().await, Err(ModelError::NotFound { .. })));
    scene.server.replace(b"another file", Some("\"two\""));
    scene.fetch().await.unwrap();
    assert_eq!(fs::read(scene.path()).unwrap(), b"another file");
    assert_eq!(scene.server.seen()[2].if_range.as_deref(), Some("\"one\""));
}

#[tokio::test]
async fn a_part_that_nothing_identifies_is_not_continued() {
    let mut scene = scene(&[ServerFault::CutAfter(100_000)]).await;
    (scene.source.size_bytes, scene.source.sha256) = (None, None);
    // A weak ETag is no use for a range.
    scene.server.replace(&noise(SIZE), Some("W/\"one\""));
    scene.fetch().await.unwrap();
    scene.assert_complete();
    assert_eq!(scene.ranges(), [None, None]);
}

#[tokio::test]
async fn a_part_that_no_pull_can_continue_does_not_stay() {
    let mut scene = scene(&[ServerFault::CutAfter(100_000); 3]).await;
    (scene.source.size_bytes, scene.source.sha256) = (None, None);
    scene.server.replace(&noise(SIZE), None);
    assert!(matches!(scene.fetch().await, Err(ModelError::Network { .. })));
    assert!(!scene.part().exists() && !scene.path().exists());
}

#[tokio::test]
async fn a_part_of_another_file_is_not_continued() {
    let mut scene = scene(&[]).await;
    scene.leave_part(&noise(1000), Some("\"one\""));
    let file = noise(SIZE + 1);
    scene.server.replace(&file, Some("\"one\""));
    (scene.source.size_bytes, scene.source.sha256) = (Some(file.len() as u64), Some(sha256(&file)));
    scene.fetch().await.unwrap();
    assert_eq!(scene.ranges(), [None]);
}

#[tokio::test]
async fn a_damaged_part_costs_one_more_download() {
    let scene = scene(&[]).await;
    scene.leave_part(&[0; 1000], Some("\"one\""));
    scene.fetch().await.unwrap();
    scene.assert_complete();
    assert_eq!(scene.ranges(), [range(1000), None]);
}

#[tokio::test]
async fn a_part_that_is_already_whole_needs_no_request() {
    let scene = scene(&[]).await;
    scene.leave_part(&noise(SIZE), None);
    scene.fetch().await.unwrap();
    scene.assert_complete();
    assert!(scene.server.seen().is_empty());
}

#[tokio::test]
async fn a_part_that_is_too_long_is_dropped() {
    let scene = scene(&[]).await;
    scene.leave_part(&noise(SIZE + 1), Some("\"one\""));
    scene.fetch().await.unwrap();
    scene.assert_complete();
}

#[tokio::test]
async fn wrong_bytes_never_get_the_final_name() {
    let scene = scene(&[ServerFault::FlipBit]).await;
    let error = scene.fetch().await.unwrap_err();
    assert!(matches!(error, ModelError::ChecksumMismatch { .. }), "{error}");
    scene.assert_absent();
    assert!(!scene.part().exists(), "wrong bytes must not be continued");
}

#[tokio::test]
async fn a_wrong_size_is_noticed_before_the_first_byte() {
    let mut scene = scene(&[]).await;
    scene.source.size_bytes = Some(SIZE as u64 + 1);
    let error = scene.fetch().await.unwrap_err();
    assert!(matches!(error, ModelError::SizeMismatch { found_bytes: 200_000, .. }), "{error}");
    scene.assert_absent();
}

#[tokio::test]
async fn a_body_without_a_length_is_bounded_by_the_promise() {
    let mut scene = scene(&[ServerFault::NoLength, ServerFault::NoLength]).await;
    scene.fetch().await.unwrap();
    scene.assert_complete();
    scene.source.size_bytes = Some(1000);
    assert!(matches!(scene.fetch().await, Err(ModelError::SizeMismatch { .. })));
}

#[tokio::test]
async fn refusals_are_final_and_say_what_to_do() {
    for (status, words) in [(401, "ask nicely"), (403, "ask nicely"), (404, "does not exist"), (400, "HTTP 400")] {
        let scene = scene(&[ServerFault::Status(status)]).await;
        let error = scene.fetch().await.unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("a.gguf") && !error.contains('\n'), "{error}");
        assert_eq!(scene.server.seen().len(), 1);
        scene.assert_absent();
    }
}

#[tokio::test]
async fn a_busy_server_is_asked_again() {
    let scene = scene(&[ServerFault::Status(503), ServerFault::Status(429)]).await;
    scene.fetch().await.unwrap();
    scene.assert_complete();
}

#[tokio::test]
async fn an_unreachable_server_is_named_without_the_secrets_of_its_url() {
    let mut scene = scene(&[]).await;
    scene.source.url = "http://user:secret@127.0.0.1:9/a?signature=secret".parse().unwrap();
    let error = scene.fetch().await.unwrap_err().to_string();
    assert!(error.contains("127.0.0.1:9") && !error.contains("secret") && !error.contains('\n'), "{error}");
}

#[tokio::test]
async fn a_token_is_not_handed_to_another_host() {
    let mut scene = scene(&[]).await;
    let front = FakeServer::serving(b"").await;
    front.redirect_to(scene.source.url.to_string());
    scene.source.url = front.url("/a.gguf");
    scene.source.bearer = Some("secret".to_owned());
    scene.fetch().await.unwrap();
    scene.assert_complete();
    assert_eq!(front.seen()[0].authorization.as_deref(), Some("Bearer secret"));
    assert_eq!(scene.server.seen()[0].authorization, None);
}

#[tokio::test]
async fn an_empty_file_is_a_file() {
    let mut scene = scene(&[]).await;
    scene.server.replace(b"", None);
    (scene.source.size_bytes, scene.source.sha256) = (Some(0), Some(sha256(b"")));
    scene.fetch().await.unwrap();
    assert_eq!(fs::read(scene.path()).unwrap(), b"");
}

#[tokio::test]
async fn two_pulls_at_once_take_turns() {
    let scene = scene(&[ServerFault::CutAfter(50_000), ServerFault::CutAfter(50_000)]).await;
    let (a, b) = tokio::join!(scene.fetch(), scene.fetch());
    a.and(b).unwrap();
    scene.assert_complete();
}

#[tokio::test]
async fn a_file_without_a_length_does_not_fill_the_disk() {
    let scene = |n_bytes: usize| async move {
        let server = FakeServer::serving(&noise(n_bytes)).await.with_faults(&[ServerFault::NoLength]);
        let (url, name) = (server.url("/a.gguf"), "a.gguf".to_owned());
        let source = DownloadSource { url, name, bearer: None, size_bytes: None, sha256: None, denied_hint: "" };
        Scene { folder: tempfile::tempdir().unwrap(), server, source }
    };
    let long = scene(2 << 20).await;
    assert!(matches!(long.fetch().await, Err(ModelError::Endless { .. })));
    assert!(!long.path().exists() && !long.part().exists(), "nothing of it stays");
    let short = scene(SIZE).await;
    short.fetch().await.unwrap();
    assert_eq!(fs::read(short.path()).unwrap().len(), SIZE);
}
