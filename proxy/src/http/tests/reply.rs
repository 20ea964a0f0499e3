//! A reply as a test reads it, whole or while it is still being sent.

use super::*;

/// A reply that is still being sent.
pub(super) struct OpenReply {
    pub(super) status: u16,
    pub(super) headers: reqwest::header::HeaderMap,
    pub(super) response: reqwest::Response,
    pub(super) text: String,
}

impl OpenReply {
    /// Reads until this holds of all that has come.
    pub(super) async fn until(&mut self, is_enough: impl Fn(&str) -> bool) {
        let enough = async {
            while !is_enough(&self.text) {
                let chunk = self.response.chunk().await.unwrap();
                self.text += std::str::from_utf8(&chunk.expect("more of the stream")).unwrap();
            }
        };
        tokio::time::timeout(DEADLINE, enough).await.expect("enough of the stream");
    }

    /// Reads to the end.
    pub(super) async fn rest(self) -> Reply {
        let OpenReply { status, headers, response, text } = self;
        Reply { status, headers, text: text + &response.text().await.unwrap() }
    }
}

pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: reqwest::header::HeaderMap,
    pub(super) text: String,
}

impl Reply {
    pub(super) async fn of(response: reqwest::Response) -> Self {
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        Reply { status, headers, text: response.text().await.unwrap() }
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("not JSON: {:?}", self.text))
    }

    pub(super) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// Checks status and envelope of a failure; returns the error object.
    pub(super) fn failed(&self, status: u16, kind: &str, code: Option<&str>) -> Value {
        assert_eq!(self.status, status, "{}", self.text);
        assert_eq!(self.header("content-type"), "application/json");
        assert!(!self.header("x-request-id").is_empty());
        let error = self.json()["error"].clone();
        let keys: Vec<_> = error.as_object().unwrap().keys().take(4).map(String::as_str).collect();
        assert_eq!(keys, ["message", "type", "param", "code"], "{error}");
        assert_eq!((error["type"].as_str(), error["code"].as_str()), (Some(kind), code), "{error}");
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
        error
    }

    /// Checks status and envelope of a failure in Ollama's dialect; returns the message.
    pub(super) fn failed_as_ollama(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.text);
        assert_eq!(self.header("content-type"), "application/json");
        let body = self.json();
        assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
        body["error"].as_str().unwrap_or_else(|| panic!("no message: {body}")).to_owned()
    }

    /// The stream's lines.
    pub(super) fn lines(&self) -> Vec<Value> {
        assert!(self.text.ends_with('\n'), "{:?}", self.text);
        self.text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The stream's `data:` payloads, and `:` for each comment.
    pub(super) fn events(&self) -> Vec<&str> {
        assert!(self.text.ends_with("\n\n"), "{:?}", self.text);
        self.text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap_or(event)).collect()
    }

    /// The stream's events, each with the name that its line says.
    pub(super) fn named_events(&self) -> Vec<(&str, Value)> {
        let events = self.text.split_terminator("\n\n").filter(|event| *event != ":");
        let events = events.map(|event| {
            let (name, data) = event.split_once('\n').unwrap_or_else(|| panic!("no data: {event}"));
            let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            (name.strip_prefix("event: ").unwrap(), data)
        });
        events.collect()
    }

    /// The stream's chunks, without `[DONE]` and comments.
    pub(super) fn chunks(&self) -> Vec<Value> {
        self.events().into_iter().filter_map(|event| serde_json::from_str(event).ok()).collect()
    }
}
