//! A server in front of a fake backend, and what a test asks of it.

use super::*;

/// A running server. Dropping it stops it.
pub(super) struct TestServer {
    pub(super) address: SocketAddr,
    pub(super) fake: Arc<Fake>,
    pub(super) access: SharedAccess,
    pub(super) shutdown: Shutdown,
    pub(super) task: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(super) async fn start(fake: Fake) -> TestServer {
    start_with(fake, HttpConfig::default()).await
}

pub(super) async fn start_with(fake: Fake, config: HttpConfig) -> TestServer {
    start_limited(fake, config, Limits::default()).await
}

/// Every limit but the one that a test is about is far longer than the test, on a busy machine, too.
pub(super) struct Limits {
    pub(super) connection: ConnectionDeadlines,
    pub(super) drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { connection: DEADLINES, drain: Duration::from_secs(60) }
    }
}

/// Streams whose heads are sent at once, and whose every silence is broken.
pub(super) fn impatient() -> HttpConfig {
    HttpConfig { head_hold: Duration::from_millis(1), heartbeat: Duration::from_millis(1), ..HttpConfig::default() }
}

/// A server that asks for this key, which is its owner's.
pub(super) fn closed_config(key: &str) -> HttpConfig {
    let access = AccessConfig { api_keys: vec![key.to_owned()], ..AccessConfig::default() };
    HttpConfig { access, ..HttpConfig::default() }
}

pub(super) async fn start_limited(fake: Fake, config: HttpConfig, limits: Limits) -> TestServer {
    let fake = Arc::new(fake);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let shutdown = Shutdown::default();
    let access = crate::http::access::shared(&config.access);
    let host = HostCheck { access: access.clone(), checks_names: config.check_host };
    let router = crate::http::listener(&api(fake.clone(), config, access.clone()), host);
    let task = tokio::spawn(serve_with(limits.connection, listener, router, shutdown.clone(), limits.drain));
    TestServer { address, fake, access, shutdown, task }
}

impl TestServer {
    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(super) fn post(&self) -> reqwest::RequestBuilder {
        reqwest::Client::new().post(self.url("/v1/chat/completions"))
    }

    /// Sends a chat request with these fields beside the necessary ones.
    pub(super) async fn chat(&self, fields: Value) -> Reply {
        Reply::of(self.post().json(&chat_body(fields)).send().await.unwrap()).await
    }

    /// Posts JSON to a path.
    pub(super) async fn post_to(&self, path: &str, body: Value) -> Reply {
        Reply::of(reqwest::Client::new().post(self.url(path)).json(&body).send().await.unwrap()).await
    }

    pub(super) async fn get(&self, path: &str) -> Reply {
        Reply::of(reqwest::get(self.url(path)).await.unwrap()).await
    }

    /// Sends bytes and reads until the server closes.
    pub(super) async fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect().await;
        stream.write_all(bytes).await.unwrap();
        let mut reply = Vec::new();
        tokio::time::timeout(DEADLINE, stream.read_to_end(&mut reply)).await.unwrap().unwrap();
        String::from_utf8(reply).unwrap()
    }

    pub(super) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    pub(super) fn n_live(&self) -> usize {
        self.fake.live.load(Ordering::SeqCst)
    }

    /// Waits until this many requests are held by the backend.
    pub(super) async fn until_live(&self, n: usize) {
        until(&self.fake.live, n).await;
    }

    /// Begins a stream.
    pub(super) async fn open(&self, path: &str, body: Value) -> OpenReply {
        let response = reqwest::Client::new().post(self.url(path)).json(&body).send().await.unwrap();
        OpenReply {
            status: response.status().as_u16(),
            headers: response.headers().clone(),
            response,
            text: String::new(),
        }
    }
}

pub(super) async fn until(count: &AtomicUsize, n: usize) {
    eventually("the number of requests", async || count.load(Ordering::SeqCst) == n).await;
}

/// Polls a condition until it holds.
pub(super) async fn eventually(what: &str, holds: impl AsyncFn() -> bool) {
    let poll = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(tokio::time::timeout(DEADLINE, poll).await.is_ok(), "waited {DEADLINE:?} for {what}");
}

pub(super) fn chat_body(fields: Value) -> Value {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// A raw HTTP/1.1 chat request.
pub(super) fn chat_bytes(fields: Value, connection: &str) -> String {
    let body = chat_body(fields).to_string();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: {connection}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}
