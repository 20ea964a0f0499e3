//! Lossy files make the store smaller, and answer only requests that may get lossy KV.

use harness::{BatonServer, ReloadableServer, long_prompt, model};
use serde_json::json;
use tiny_gguf::Architecture;

use super::{Store, answer, ask, call};

#[tokio::test]
async fn a_lossy_codec_that_is_named_makes_the_files_smaller_and_they_come_back() {
    let prompt = long_prompt("smaller", 500);
    let mut n_bytes = Vec::new();
    for codec in ["none", "planes_zstd", "kvq"] {
        let store = Store::new();
        let option = format!(",codec={codec}");
        let first = {
            let server = store.serve(&option);
            let first = ask(&server, &prompt, None).await;
            store.await_tokens(first.n_prompt);
            first
        };
        n_bytes.push(store.n_bytes());
        let server = store.serve(&option);
        let again = ask(&server, &prompt, None).await;
        assert_eq!(again.n_cached, again.n_prompt - 1, "{codec}");
        assert!(codec == "kvq" || again.text == first.text, "{codec}: {} and {}", first.text, again.text);
        assert_eq!(store.cache(&["verify"])["removed"], json!([]), "{codec}");
    }
    let [none, lossless, lossy] = n_bytes[..] else { unreachable!() };
    // `kvq` is about 3.3 times smaller without a profile.
    assert!(lossless < none && lossy * 5 / 2 < none, "{n_bytes:?}");
}

#[tokio::test]
async fn a_request_with_a_seed_or_for_lossless_kv_computes_what_only_lossy_files_have() {
    /// Tokens that the template begins with.
    const TEMPLATE: u64 = 64;
    let store = Store::new();
    let prompts = ["asked plainly", "with a seed", "losslessly", "with both"].map(|tag| long_prompt(tag, 300));
    let mut first = Vec::new();
    {
        let server = store.serve(",codec=kvq");
        for prompt in &prompts {
            first.push(ask(&server, prompt, None).await);
        }
        store.await_tokens(first.iter().map(|reply| reply.n_prompt - TEMPLATE).sum());
    }
    let server = store.serve(",codec=kvq");
    let lossy = ask(&server, &prompts[0], None).await;
    assert_eq!(lossy.n_cached, lossy.n_prompt - 1, "the operator has named the codec");
    let seed = json!({ "seed": 7 });
    let asked = [
        call(&server, &prompts[1], seed.clone()),
        call(&server, &prompts[2], json!({})).header("x-baton-kv", "lossless"),
        call(&server, &prompts[3], seed).header("x-baton-kv", "lossy"),
        // Its slot has what came from the file.
        call(&server, &prompts[0], json!({})).header("x-baton-kv", "lossless"),
    ];
    let mut warnings = Vec::new();
    for request in asked {
        let reply = answer(request).await;
        assert!(reply.n_cached <= TEMPLATE, "{} of {} tokens were cached", reply.n_cached, reply.n_prompt);
        warnings.push(reply.warning);
    }
    assert_eq!(warnings, ["", "", "a request with a seed gets lossless KV", ""]);
    // Its slot has what was computed last.
    let again = answer(call(&server, &prompts[0], json!({ "seed": 8 }))).await;
    assert_eq!(again.n_cached, again.n_prompt - 1, "what was computed is exact");
    let unknown = call(&server, &prompts[1], json!({})).header("x-baton-kv", "kvq").send().await.unwrap();
    let (status, error) = (unknown.status(), unknown.text().await.unwrap());
    assert!(status == 400 && error.contains("x-baton-kv must be one of: lossless, lossy."), "{error}");
}

#[tokio::test]
async fn lossy_kv_on_request_is_for_requests_that_ask_for_it() {
    let store = Store::new();
    let config = format!(
        "lossy_kv = \"on_request\"\n[model]\nsource = {:?}\nname = \"smollm2\"\n[model.engine]\nthreads = 1\n\
         ctx_size = 2048\n[model.engine.kv_store]\ndisk = {:?}\ncodec = \"kvq\"\n",
        model(),
        store.folder()
    );
    let prompts = ["silent", "asks"].map(|tag| long_prompt(tag, 300));
    {
        let server = ReloadableServer::start(&config);
        let mut n_tokens = 0;
        for prompt in &prompts {
            n_tokens += ask(&server.server, prompt, None).await.n_prompt;
        }
        store.await_tokens(n_tokens - 64);
    }
    let server = ReloadableServer::start(&config);
    let silent = ask(&server.server, &prompts[0], None).await;
    assert!(silent.n_cached <= 64, "{} of {}", silent.n_cached, silent.n_prompt);
    let asks = answer(call(&server.server, &prompts[1], json!({})).header("x-baton-kv", "lossy")).await;
    assert_eq!(asks.n_cached, asks.n_prompt - 1);
}

#[tokio::test]
async fn a_windowed_model_and_a_hybrid_answer_losslessly_beside_lossy_files() {
    let folder = tempfile::tempdir().unwrap();
    for architecture in [Architecture::Gemma3, Architecture::Qwen35] {
        let path = folder.path().join(format!("{architecture:?}.gguf"));
        tiny_gguf::write_with_template(&path, architecture, 1);
        let store = Store::new();
        let serve = |option: &str| {
            let args = ["--model", path.to_str().unwrap(), "--name", "m", "--threads", "1", "--slots", "1"];
            BatonServer::with(&[&args[..], &["--ctx-size", "2048", "--kv-store", option]].concat())
        };
        let text = |tag: &str| format!("{tag} {}", "what was said before ".repeat(25));
        let (prompt, other) = (text("one"), text("another"));
        // Its end is another way to go on than that of the first turn.
        let second = format!("{prompt}and then?");
        let exact = async |server: &BatonServer, prompt: &str| {
            let body = json!({ "model": "m", "max_tokens": 24, "ignore_eos": true });
            answer(call(server, prompt, body).header("x-baton-kv", "lossless")).await
        };
        let mut computed = Vec::new();
        for prompt in [&prompt, &second] {
            computed.push(exact(&serve("memory=0"), prompt).await.text);
        }
        let lossy = format!("{},codec=q8_0", store.option(""));
        {
            let server = serve(&lossy);
            let first = answer(call(&server, &prompt, json!({ "model": "m" }))).await;
            store.await_tokens(first.n_prompt);
        }
        let server = serve(&lossy);
        let plain = answer(call(&server, &prompt, json!({ "model": "m" }))).await;
        assert!(plain.n_cached > plain.n_prompt / 2, "{architecture:?}: the operator has named the codec");
        // The slot has what came from the file; then what was computed; then another conversation, and it is computed again.
        for (round, asked, expected) in [(0, &prompt, 0), (1, &second, 1), (2, &prompt, 0), (3, &second, 1)] {
            let reply = exact(&server, asked).await;
            assert_eq!(reply.text, computed[expected], "{architecture:?}, round {round}");
            if round == 0 {
                assert_eq!(reply.n_cached, 0, "{architecture:?}: only lossy KV is there");
            }
            if round == 1 {
                exact(&server, &other).await;
            }
        }
    }
}
