//! A stand-in for the Hugging Face hub: one repository of any name, with these files.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;

use serde_json::json;

/// Serves the files until the process ends, and returns the URL for `HF_ENDPOINT`.
pub fn hub(files: Vec<(String, Vec<u8>)>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let listed: Vec<_> =
            files.iter().map(|(name, bytes)| json!({ "rfilename": name, "size": bytes.len() })).collect();
        let listing = json!({ "sha": "c0ffee", "siblings": listed }).to_string().into_bytes();
        for mut stream in listener.incoming().map(Result::unwrap) {
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            let Some(asked) = lines.next() else { continue };
            lines.take_while(|line| !line.is_empty()).for_each(drop);
            let path = asked.split(' ').nth(1).unwrap_or_default();
            let file = files.iter().find(|(name, _)| path.ends_with(&format!("/{name}")));
            let body = if path.contains("/api/models/") { Some(&listing) } else { file.map(|(_, bytes)| bytes) };
            let status = if body.is_some() { "200 OK" } else { "404 Not Found" };
            let body = body.map_or(&[][..], Vec::as_slice);
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            // A client that looks at the head alone hangs up.
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        }
    });
    url
}
