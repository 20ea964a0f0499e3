//! A small hub, as `hf-hub` expects one, and choosing among its files.

use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::Path as UrlPath;
use axum::routing::get;
use http::StatusCode;
use serde_json::{Value, json};

use super::*;
use crate::fake_server::{short_limits, start};
use crate::progress::Silent;

fn model(selector: Option<&str>) -> HubModel {
    HubModel { owner: "me".into(), repo: "models".into(), selector: selector.map(str::to_owned) }
}

fn siblings(names: &[&str]) -> Vec<Sibling> {
    names.iter().map(|name| Sibling { rfilename: (*name).to_owned(), size: None, lfs: None }).collect()
}

fn chosen_files(selector: Option<&str>, names: &[&str]) -> Result<Vec<String>, ModelError> {
    let siblings = siblings(names);
    let files = choose(&model(selector), &siblings)?;
    Ok(files.into_iter().map(|s| s.rfilename.clone()).collect())
}

fn chosen(selector: Option<&str>, names: &[&str]) -> Result<String, ModelError> {
    chosen_files(selector, names).map(|mut files| files.remove(0))
}

#[test]
fn the_obvious_file_is_taken() {
    let check = |names: &[&str], expected: &str| assert_eq!(chosen(None, names).unwrap(), expected);
    check(&["README.md", "a.gguf"], "a.gguf");
    check(&["a.gguf", "mmproj-a-f16.gguf"], "a.gguf");
    check(&["a-Q8_0.gguf", "a-q4_k_m.gguf", "a-Q4_K_S.gguf"], "a-q4_k_m.gguf");
    check(&["a.gguf", "a-f32-00001-of-00002.gguf", "a-f32-00002-of-00002.gguf"], "a.gguf");
    check(&["x/a.Q4_K_M.GGUF", "x/a.Q2_K.gguf"], "x/a.Q4_K_M.GGUF");
}

#[test]
fn a_named_file_or_quantization_is_taken() {
    let names = ["a-Q8_0.gguf", "a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "b-Q4_K_S.gguf"];
    assert_eq!(chosen(Some("a-Q8_0.gguf"), &names).unwrap(), "a-Q8_0.gguf");
    assert_eq!(chosen(Some("q8_0"), &names).unwrap(), "a-Q8_0.gguf");
    assert!(matches!(chosen(Some("Q4_K_S"), &names), Err(ModelError::SeveralGgufs { .. })));
    // Neither a part of a word nor a missing file.
    for selector in ["Q4_K", "c.gguf"] {
        let error = chosen(Some(selector), &names).unwrap_err();
        assert!(matches!(error, ModelError::NoSuchRepoFile { .. }));
        assert!(error.to_string().contains("a-Q8_0.gguf, a-Q4_K_M.gguf"), "{error}");
    }
}

#[test]
fn what_cannot_be_chosen_is_listed() {
    let error = chosen(None, &["a-Q8_0.gguf", "a-F16.gguf"]).unwrap_err().to_string();
    assert!(error.contains("me/models:FILE: a-Q8_0.gguf, a-F16.gguf"), "{error}");
    assert!(matches!(chosen(None, &["README.md", "mmproj.gguf"]), Err(ModelError::NoGguf { .. })));
}

#[test]
fn all_parts_of_a_split_model_are_chosen_together() {
    let parts = ["q/a-Q8_0-00001-of-00002.gguf", "q/a-Q8_0-00002-of-00002.gguf"];
    let listed = ["a-F16-00001-of-00003.gguf", parts[1], "a-F16-00002-of-00003.gguf", parts[0]];
    for selector in [Some("Q8_0"), Some(parts[0]), Some(parts[1])] {
        assert_eq!(chosen_files(selector, &listed).unwrap(), parts);
    }
    assert_eq!(chosen_files(None, &[parts[1], parts[0], "mmproj-a.gguf"]).unwrap(), parts);
    let preferred = ["a-Q4_K_M-00001-of-00002.gguf", "a-Q4_K_M-00002-of-00002.gguf"];
    assert_eq!(
        chosen_files(None, &[parts[0], parts[1], preferred[0], preferred[1], "a-Q2_K.gguf"]).unwrap(),
        preferred
    );
    // Models are named by their first parts.
    let error = chosen_files(None, &[&listed[..], &["a-F16-00003-of-00003.gguf"]].concat()).unwrap_err().to_string();
    assert!(error.ends_with("me/models:FILE: a-F16-00001-of-00003.gguf, q/a-Q8_0-00001-of-00002.gguf"), "{error}");
}

#[test]
fn a_part_that_a_repository_lacks_is_named() {
    let listed = ["a-F16-00001-of-00003.gguf", "a-F16-00003-of-00003.gguf"];
    for selector in [None, Some("F16"), Some(listed[1])] {
        let error = chosen_files(selector, &listed).unwrap_err();
        assert!(
            matches!(&error, ModelError::MissingPart { file, .. } if file == "a-F16-00002-of-00003.gguf"),
            "{error}"
        );
    }
}

#[test]
fn a_repository_cannot_name_a_path_outside() {
    for name in ["../a.gguf", "/a.gguf", "a/../../b.gguf", ".hidden/a.gguf", "C:\\a.gguf", "a\nb.gguf", ".gguf"] {
        assert!(matches!(chosen(None, &[name]), Err(ModelError::NoGguf { .. })), "{name}");
    }
}

#[test]
fn a_folder_has_the_files_that_mlx_reads_and_ends_with_its_configuration() {
    let names = |names: &[&str]| {
        let siblings = siblings(names);
        folder(&siblings).map(|files| files.iter().map(|s| s.rfilename.clone()).collect::<Vec<_>>())
    };
    let of_repository = ["config.json", "README.md", "model.safetensors", "onnx/model.safetensors", "tokenizer.json"];
    assert_eq!(names(&of_repository).unwrap(), ["tokenizer.json", "model.safetensors", "config.json"]);
    for incomplete in
        [&["config.json", "x.safetensors"][..], &["model.safetensors"], &["config.json", "model/../x.safetensors"]]
    {
        assert_eq!(names(incomplete), None);
    }
}

#[test]
fn addresses_are_escaped() {
    let url = file_url("http://hub/me/models/resolve/main/", "sub/a b#1?.gguf").unwrap();
    assert_eq!(url.as_str(), "http://hub/me/models/resolve/main/sub/a%20b%231%3F.gguf");
}

#[test]
fn a_token_is_never_shown() {
    let access = HubAccess { endpoint: None, token: Some("secret".into()) };
    assert!(!format!("{access:?}").contains("secret"));
}

async fn hub_answering(listing: Value) -> HubAccess {
    let answer = move |UrlPath((owner, repo)): UrlPath<(String, String)>| async move {
        match (&*owner, &*repo) {
            ("me", "models") => Ok(Json(listing)),
            ("me", "private") => Err(StatusCode::UNAUTHORIZED),
            _ => Err(StatusCode::NOT_FOUND),
        }
    };
    let endpoint = start(Router::new().route("/api/models/{owner}/{repo}/revision/main", get(answer))).await;
    HubAccess { endpoint: Some(endpoint), token: None }
}

fn options(access: &HubAccess, limits: DownloadLimits) -> PullOptions {
    PullOptions { hub: access.clone(), limits, ..PullOptions::from_env("", Arc::new(Silent)) }
}

async fn find_in(repo: &str, access: &HubAccess) -> Result<HubFile, ModelError> {
    let model = HubModel { repo: repo.into(), ..model(None) };
    find(&model, &options(access, short_limits())).await.map(|files| match files {
        HubFiles::Gguf(mut files) => files.remove(0),
        HubFiles::Folder(files) => panic!("{files:?}"),
    })
}

#[tokio::test]
async fn size_checksum_and_commit_come_with_the_listing() {
    let sha = "AB".repeat(32);
    let listing = json!({"sha": "c0ffee", "siblings": [
        {"rfilename": "a.gguf", "size": 7, "lfs": {"sha256": sha, "size": 7, "pointerSize": 1}}]});
    let access = hub_answering(listing).await;
    let file = find_in("models", &access).await.unwrap();
    assert_eq!(file.path, "a.gguf");
    assert_eq!((file.source.size_bytes, file.source.sha256), (Some(7), Some(sha.to_lowercase())));
    let url = format!("{}/me/models/resolve/c0ffee/a.gguf", access.endpoint.unwrap());
    assert_eq!(file.source.url.as_str(), url);
}

#[tokio::test]
async fn refusals_say_what_to_do() {
    let access = hub_answering(json!({"siblings": []})).await;
    assert!(matches!(find_in("models", &access).await, Err(ModelError::NoGguf { .. })));
    assert!(matches!(find_in("nothing", &access).await, Err(ModelError::NotFound { status: 404, .. })));
    let error = find_in("private", &access).await.unwrap_err().to_string();
    assert!(error.contains("HF_TOKEN") && error.contains("401"), "{error}");
    let odd = hub_answering(json!(["not", "a", "listing"])).await;
    assert!(matches!(find_in("models", &odd).await, Err(ModelError::HubReply { .. })));
    let endless = hub_answering(json!({"siblings": [{"rfilename": "a.gguf"}], "more": "x".repeat(9 << 20)})).await;
    let error = find_in("models", &endless).await.unwrap_err();
    assert!(matches!(error, ModelError::HubReply { .. }) && error.to_string().contains("8 MiB"), "{error}");
}

#[tokio::test]
async fn an_unreachable_hub_is_one_line() {
    for (endpoint, host) in [("http://127.0.0.1:9", "127.0.0.1:9"), ("http://hub.invalid", "hub.invalid")] {
        let access = HubAccess { endpoint: Some(endpoint.into()), token: None };
        let error = find_in("models", &access).await.unwrap_err();
        assert!(matches!(error, ModelError::HubUnreachable { .. }), "{error}");
        let line = error.to_string();
        assert!(line.contains(host) && line.contains("online") && !line.contains('\n'), "{line}");
    }
}

#[tokio::test]
async fn an_address_that_is_no_url_is_refused_without_a_retry() {
    for endpoint in ["huggingface.co", "ftp://hub.example", "https://", "x y"] {
        let access = HubAccess { endpoint: Some(endpoint.into()), token: None };
        let found = find(&model(None), &options(&access, DownloadLimits::default())).await;
        assert!(matches!(found, Err(ModelError::WrongHubAddress)), "{endpoint}");
    }
}

#[tokio::test]
async fn the_choices_of_a_repository_are_its_whole_models_with_their_sizes() {
    let file = |name: &str, size: Option<u64>| json!({ "rfilename": name, "size": size });
    let listing = json!({ "siblings": [
        file("a-Q4_K_M.gguf", Some(4)), file("a-F16.gguf", None), file("mmproj-a-F16.gguf", Some(1)), file("README.md", Some(1)),
        file("b-Q8_0-00001-of-00002.gguf", Some(5)), file("b-Q8_0-00002-of-00002.gguf", Some(6)),
        file("c-Q8_0-00001-of-00002.gguf", Some(5)),
    ] });
    let access = hub_answering(listing).await;
    let found = async |selector: Option<&str>| {
        let found = choices(&model(selector), &options(&access, short_limits())).await?;
        Ok::<_, ModelError>(found.into_iter().map(|one| (one.name, one.n_bytes)).collect::<Vec<_>>())
    };
    let q4 = ("me/models:a-Q4_K_M.gguf".to_owned(), Some(4));
    let q8 = ("me/models:b-Q8_0-00001-of-00002.gguf".to_owned(), Some(11));
    assert_eq!(found(None).await.unwrap(), [q4.clone(), ("me/models:a-F16.gguf".to_owned(), None), q8.clone()]);
    assert_eq!(found(Some("q8_0")).await.unwrap(), [q8]);
    assert_eq!(found(Some("a-Q4_K_M.gguf")).await.unwrap(), [q4]);
    assert!(matches!(found(Some("Q2_K")).await, Err(ModelError::NoSuchRepoFile { .. })));
}
