//! Rerankers behind the endpoint, with tiny models of both forms.

use harness::{BatonServer, ReloadableServer, upstream};
use serde_json::{Value, json};
use tiny_gguf::Architecture;

async fn ask(server: &BatonServer, path: &str, body: Value) -> (u16, Value) {
    let call = reqwest::Client::new().post(format!("{}{path}", server.base)).json(&body);
    let reply = call.send().await.unwrap();
    (reply.status().as_u16(), reply.json().await.unwrap())
}

/// Starts a tiny model of this architecture, as a reranker or not.
fn serve(folder: &tempfile::TempDir, architecture: Architecture, is_reranker: bool) -> BatonServer {
    let path = folder.path().join(format!("{architecture:?}-{is_reranker}.gguf"));
    match is_reranker {
        true => tiny_gguf::write_reranker(&path, architecture, 3),
        false => tiny_gguf::write(&path, architecture, 3),
    }
    BatonServer::with(&["--model", path.to_str().unwrap(), "--name", "tiny", "--threads", "1", "--ctx-size", "1024"])
}

/// By how much rounding moves a score.
const NOISE: f64 = 2e-3;

const DOCUMENTS: [&str; 4] = ["lazy dog", "river stone light", "quick fox quick fox", "stone"];

#[tokio::test(flavor = "multi_thread")]
async fn documents_are_ordered_by_the_scores_that_they_have_alone() {
    let folder = tempfile::tempdir().unwrap();
    for architecture in [Architecture::Bert, Architecture::Qwen3] {
        let server = serve(&folder, architecture, true);
        let mut alone = Vec::new();
        for document in DOCUMENTS {
            let (status, reply) = ask(&server, "/rerank", json!({"query": "brown fox", "documents": [document]})).await;
            assert_eq!(status, 200, "{reply}");
            alone.push(reply["results"][0]["relevance_score"].as_f64().unwrap());
        }
        let body = json!({"model": "tiny", "query": "brown fox", "documents": DOCUMENTS, "return_documents": true});
        let (status, reply) = ask(&server, "/v1/rerank", body).await;
        assert_eq!((status, &reply["model"]), (200, &json!("tiny")), "{reply}");
        let results = reply["results"].as_array().unwrap();
        let scores: Vec<f64> = results.iter().map(|result| result["relevance_score"].as_f64().unwrap()).collect();
        assert!(scores.len() == DOCUMENTS.len() && scores.is_sorted_by(|one, next| one >= next), "{reply}");
        for (result, score) in results.iter().zip(&scores) {
            let index = result["index"].as_u64().unwrap() as usize;
            assert_eq!(result["document"]["text"], DOCUMENTS[index]);
            // Pairs that share a step are rounded in another way.
            assert!((score - alone[index]).abs() < NOISE, "{result} {alone:?}");
        }
        assert!(scores[0] - scores[3] > NOISE, "{architecture:?} gives other documents other scores: {scores:?}");
        let long = "fox ".repeat(3_000);
        let body = json!({"query": "fox", "documents": ["stone", long]});
        let (status, refused) = ask(&server, "/v1/rerank", body).await;
        let error = &refused["error"];
        assert_eq!((status, &error["param"]), (400, &json!("documents[1]")), "{refused}");
        assert_eq!(error["code"], "context_length_exceeded");
        let (status, refused) = ask(&server, "/v1/embeddings", json!({"model": "tiny", "input": "fox"})).await;
        assert_eq!(status, 501, "{refused}");
        // Another Baton in front of it reports the same.
        let more = "models = { theirs = \"tiny\" }";
        let front = ReloadableServer::start(&upstream("second", "llama-server", &server.base, more));
        let body = json!({"model": "theirs", "query": "brown fox", "documents": DOCUMENTS, "top_n": 2});
        let (status, through) = ask(&front.server, "/v1/rerank", body).await;
        assert_eq!(status, 200, "{through}");
        let order = |results: &[Value]| results.iter().map(|result| result["index"].clone()).collect::<Vec<_>>();
        let best = through["results"].as_array().unwrap();
        assert_eq!((order(best), best.len()), (order(&results[..2]), 2), "{through}");
        assert_eq!((&through["usage"], &through["model"]), (&reply["usage"], &json!("theirs")));
        let best = best[0]["relevance_score"].as_f64().unwrap();
        assert!((best - scores[0]).abs() < NOISE, "{through}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_is_no_reranker_says_what_it_is() {
    let folder = tempfile::tempdir().unwrap();
    for (architecture, does) in [(Architecture::Llama, "generates text"), (Architecture::Bert, "computes vectors")] {
        let server = serve(&folder, architecture, false);
        let (status, refused) = ask(&server, "/v1/rerank", json!({"query": "q", "documents": DOCUMENTS})).await;
        assert_eq!((status, &refused["error"]["param"]), (400, &json!("model")), "{refused}");
        let message = refused["error"]["message"].as_str().unwrap();
        assert!(
            message.contains("no reranker") && message.contains(does) && message.contains("bge-reranker"),
            "{message}"
        );
    }
}
