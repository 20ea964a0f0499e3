//! A streamed chat reply that a test reads piece by piece.

use serde_json::{Value, json};

use crate::BatonServer;

/// A reply that is being streamed. Dropping it makes the client leave.
pub struct SseReply {
    response: reqwest::Response,
    bytes: Vec<u8>,
}

impl SseReply {
    /// Requests a stream with usage from `/v1/chat/completions`, and returns once its head has arrived.
    pub async fn open(server: &BatonServer, body: &Value) -> SseReply {
        let mut body = body.clone();
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        let call = reqwest::Client::new().post(format!("{}/v1/chat/completions", server.base)).json(&body);
        let response = call.send().await.unwrap();
        assert_eq!(response.status(), 200);
        SseReply { response, bytes: Vec::new() }
    }

    /// Reads until this many pieces of text have arrived. Panics if the reply ends before.
    pub async fn read_pieces(&mut self, n_pieces: usize) {
        while self.n_pieces() < n_pieces {
            let Some(bytes) = self.response.chunk().await.unwrap() else {
                panic!("the reply ended before {n_pieces} pieces: {}", String::from_utf8_lossy(&self.bytes));
            };
            self.bytes.extend(bytes);
        }
    }

    /// What has arrived so far.
    pub fn received(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    fn n_pieces(&self) -> usize {
        self.received().matches("\"content\":\"").count()
    }

    /// Reads the rest, and returns the whole stream unchanged.
    pub async fn rest(mut self) -> String {
        while let Some(bytes) = self.response.chunk().await.unwrap() {
            self.bytes.extend(bytes);
        }
        String::from_utf8(self.bytes).unwrap()
    }

    /// Reads the rest. Panics unless the reply ended correctly.
    pub async fn whole(self) -> ChatText {
        let sse = self.rest().await;
        assert!(sse.ends_with("data: [DONE]\n\n") && !sse.contains("\"error\""), "{sse}");
        let chunks = chunks(&sse);
        let content = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        let usage = chunks.last().unwrap()["usage"].clone();
        ChatText { content, n_completion: usage["completion_tokens"].as_u64().unwrap() }
    }
}

/// The content of a whole streamed reply.
#[derive(Debug, PartialEq)]
pub struct ChatText {
    pub content: String,
    /// `completion_tokens`.
    pub n_completion: u64,
}

/// The JSON of all events of a stream but `[DONE]`.
pub fn chunks(sse: &str) -> Vec<Value> {
    let data = sse.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    data.map(|json| serde_json::from_str(json).unwrap()).collect()
}
