//! Images for a model that only upstreams serve are refused, and nothing is sent.

use harness::mock::{Mock, whole};
use harness::{ReloadableServer, upstream};
use serde_json::{Value, json};

const PNG: &str = "iVBORw0KGgo=";

fn chat(content: &Value) -> Value {
    json!({ "model": "m", "max_tokens": 5, "messages": [{ "role": "user", "content": content }] })
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_refused_by_name_and_nothing_is_sent() {
    let text = json!({ "type": "text", "text": "What is this?" });
    let part = json!({ "type": "image_url", "image_url": { "url": format!("data:image/png;base64,{PNG}") } });
    let source = json!({ "type": "base64", "media_type": "image/png", "data": PNG });
    let block = json!({ "type": "image", "source": source });
    let of_openai = chat(&json!([text, part]));
    let of_anthropic = chat(&json!([text, block]));
    for kind in ["llama-server", "vllm"] {
        let answer = json!({ "prompt": "rendered", "tokens": [1, 2, 3] });
        let mock = Mock::start(move |_, _| whole(200, "", &answer)).await;
        let front = ReloadableServer::start(&upstream("up", kind, &mock.url, ""));
        let counted = front.post("/v1/messages/count_tokens", &chat(&json!([text]))).await;
        assert_eq!((counted.status, &counted.json()["input_tokens"]), (200, &json!(3)), "{kind}: {counted:?}");
        let n_asked = mock.n_asked();
        assert!(n_asked > 0);
        for (path, body, field) in [
            ("/v1/messages/count_tokens", &of_anthropic, "messages[0].content[1].source.data"),
            ("/apply-template", &of_openai, "messages[0].content[1].image_url.url"),
            ("/v1/chat/completions", &of_openai, "messages[0].content[1].image_url.url"),
            ("/v1/messages", &of_anthropic, "messages[0].content[1].source.data"),
        ] {
            let refused = front.post(path, body).await;
            assert_eq!(refused.status, 400, "{kind}{path}: {refused:?}");
            assert!(refused.text.contains("images are not supported here"), "{kind}{path}: {refused:?}");
            assert!(refused.text.contains(field), "{kind}{path}: {refused:?}");
        }
        assert_eq!(mock.n_asked(), n_asked, "{kind}: the marks of images were sent as text");
    }
}
