//! The files of the live page, as a browser gets them.

use super::*;

async fn ask(server: &TestServer, path: &str, headers: &[(&str, &str)]) -> Reply {
    let mut request = reqwest::Client::new().get(server.url(path));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    Reply::of(request.send().await.unwrap()).await
}

const BROWSER: (&str, &str) = ("accept", "text/html,application/xhtml+xml,*/*;q=0.8");

#[tokio::test]
async fn only_browsers_get_the_page_and_it_needs_no_key() {
    let server = start_with(hello(), closed_config("k")).await;
    for headers in [&[][..], &[("accept", "*/*")], &[("accept", "application/json")]] {
        let reply = ask(&server, "/", headers).await;
        assert_eq!((reply.status, reply.text.as_str(), reply.header("vary")), (200, "Ollama is running", "accept"));
    }
    for (path, media_type) in [
        ("/", "text/html; charset=utf-8"),
        ("/baton/page/app.js", "text/javascript; charset=utf-8"),
        ("/baton/page/app.css", "text/css; charset=utf-8"),
    ] {
        let reply = ask(&server, path, &[BROWSER]).await;
        assert_eq!((reply.status, reply.header("content-type")), (200, media_type), "{path}");
        assert_eq!(reply.header("x-content-type-options"), "nosniff");
        assert_eq!(reply.header("referrer-policy"), "no-referrer");
        let policy = reply.header("content-security-policy");
        assert!(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'"), "{policy}");
        assert!(policy.contains("frame-ancestors 'none'; base-uri 'none'; form-action 'none'"), "{policy}");
    }
}

#[tokio::test]
async fn files_are_compressed_and_sent_once() {
    let server = start(hello()).await;
    let plain = ask(&server, "/baton/page/app.js", &[]).await;
    assert!(plain.headers.get("content-encoding").is_none());
    let gzip = reqwest::Client::new().get(server.url("/baton/page/app.js")).header("accept-encoding", "gzip, br");
    let gzip = gzip.send().await.unwrap();
    assert_eq!(gzip.headers()["content-encoding"], "gzip");
    assert!(gzip.bytes().await.unwrap().len() < plain.text.len() / 2);
    let again = ask(&server, "/baton/page/app.js", &[("if-none-match", plain.header("etag"))]).await;
    assert_eq!((again.status, again.text.as_str()), (304, ""));
    let changed = ask(&server, "/baton/page/app.js", &[("if-none-match", "W/\"other\"")]).await;
    assert_eq!(changed.status, 200);
}
