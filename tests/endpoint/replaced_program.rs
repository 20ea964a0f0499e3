//! An upgrade replaces the program's file while an endpoint runs.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use harness::{BATON, BatonServer, TempConfigFile, eventually_async};
use serde_json::json;

fn model(name: &str) -> String {
    format!("[[models]]\nname = {name:?}\nsource = \"sim\"\n[models.engine]\nengine = \"sim\"\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_endpoint_loads_a_new_model_after_its_file_was_replaced() {
    let folder = tempfile::tempdir_in(BATON.parent().unwrap()).unwrap();
    let program = folder.path().join("baton");
    fs::hard_link(&*BATON, &program).unwrap();
    let file = TempConfigFile::new(&model("early"));
    // Runs the link in place of the program that the harness names.
    let instead = ["sh", "-c", "shift; exec \"$0\" \"$@\"", program.to_str().unwrap()];
    let server = BatonServer::under(&instead, &["--config", file.path().to_str().unwrap()]);

    // By a rename, as install.sh and dpkg do.
    let newer = folder.path().join("newer");
    fs::write(
        &newer,
        format!("#!/bin/sh\ntouch '{}/ran'\nexec '{}' \"$@\"\n", folder.path().display(), BATON.display()),
    )
    .unwrap();
    fs::set_permissions(&newer, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(&newer, &program).unwrap();

    file.reload(&server, &(model("early") + &model("late")));
    let knows_it = async || server.get_text("/v1/models").await.contains("late");
    eventually_async("the new model", knows_it).await;
    let body = json!({ "model": "late", "max_tokens": 1, "messages": [{ "role": "user", "content": "hi" }] });
    let (status, reply) = server.post("/v1/chat/completions", &body).await;
    assert_eq!(status, 200, "{reply}");
    assert!(folder.path().join("ran").exists(), "the engine is the new program's");
}
