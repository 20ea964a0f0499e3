//! The live page: a few static files, which `npm run build` in `proxy/page/` wrote and this binary carries.
//!
//! They hold no data, so they need no key: the page asks `/baton/state` with the operator's. The policy in their head
//! forbids everything that does not come from this server, and every script and style within the document.

use std::io::Write;
use std::sync::LazyLock;

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

use crate::http::openapi::{Operation, Routes};

/// Allows the page to load from this server, and to send data to it, and to no other.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

/// A file of the page.
struct PageFile {
    media_type: &'static str,
    /// The hash of its content. Weak: both encodings have the same one.
    etag: HeaderValue,
    bytes: &'static [u8],
    gzipped: Bytes,
}

static DOCUMENT: LazyLock<PageFile> =
    LazyLock::new(|| PageFile::new("text/html; charset=utf-8", include_bytes!("../../../page/dist/index.html")));
static SCRIPT: LazyLock<PageFile> = LazyLock::new(|| {
    PageFile::new("text/javascript; charset=utf-8", include_bytes!("../../../page/dist/baton/page/app.js"))
});
static STYLE: LazyLock<PageFile> =
    LazyLock::new(|| PageFile::new("text/css; charset=utf-8", include_bytes!("../../../page/dist/baton/page/app.css")));

/// The routes of the files that the document names.
pub(super) fn routes(routes: Routes) -> Routes {
    let operation = |summary, media_type| Operation::new(summary).public().unlisted().replies_text(media_type);
    routes.get("/baton/page/app.js", script, operation("The script of the live page", "text/javascript")).get(
        "/baton/page/app.css",
        style,
        operation("The style of the live page", "text/css"),
    )
}

/// The page's document.
pub(super) fn document(asked: &HeaderMap) -> Response {
    DOCUMENT.respond(asked)
}

async fn script(asked: HeaderMap) -> Response {
    SCRIPT.respond(&asked)
}

async fn style(asked: HeaderMap) -> Response {
    STYLE.respond(&asked)
}

impl PageFile {
    fn new(media_type: &'static str, bytes: &'static [u8]) -> PageFile {
        let etag = format!("W/\"{}\"", &blake3::hash(bytes).to_hex()[..16]);
        let etag = HeaderValue::try_from(etag).expect("hexadecimal digits are valid in a header");
        PageFile { media_type, etag, bytes, gzipped: gzip(bytes).into() }
    }

    /// Answers with the file, or that the browser has it already.
    fn respond(&self, asked: &HeaderMap) -> Response {
        let asks = |name: HeaderName| {
            let values = asked.get_all(name).iter().filter_map(|value| value.to_str().ok());
            values.flat_map(|value| value.split(',')).map(str::trim)
        };
        let has_it = asks(header::IF_NONE_MATCH).any(|etag| etag == "*" || self.has_etag(etag));
        let takes_gzip = asks(header::ACCEPT_ENCODING).any(|coding| matches!(coding, "gzip" | "gzip;q=1.0"));
        let mut response = match (has_it, takes_gzip) {
            (true, _) => StatusCode::NOT_MODIFIED.into_response(),
            (false, true) => {
                ([(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"))], self.gzipped.clone()).into_response()
            }
            (false, false) => self.bytes.into_response(),
        };
        let headers = response.headers_mut();
        for (name, value) in [
            (header::CONTENT_TYPE, self.media_type),
            (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            // The browser asks each time, so that the page fits the endpoint after an update.
            (header::CACHE_CONTROL, "no-cache"),
            (header::VARY, "accept, accept-encoding"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        headers.insert(header::ETAG, self.etag.clone());
        response
    }

    /// Compares weakly, as for reading (RFC 9110, section 8.8.3.2).
    fn has_etag(&self, etag: &str) -> bool {
        let bare = |etag: &[u8]| etag.strip_prefix(b"W/").unwrap_or(etag).to_vec();
        bare(etag.as_bytes()) == bare(self.etag.as_bytes())
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).and_then(|()| encoder.finish()).expect("writing into memory cannot fail")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page opens at once on a slow connection, too.
    const MOST_BYTES: usize = 150 << 10;

    #[test]
    fn the_whole_page_is_small() {
        let n_bytes: usize = [&DOCUMENT, &SCRIPT, &STYLE].iter().map(|file| file.gzipped.len()).sum();
        println!("the page is {n_bytes} bytes, compressed");
        assert!(n_bytes < MOST_BYTES, "{n_bytes}");
    }

    #[test]
    fn the_document_names_only_files_of_this_server() {
        let document = std::str::from_utf8(DOCUMENT.bytes).unwrap();
        for file in ["src=\"./baton/page/app.js\"", "href=\"./baton/page/app.css\""] {
            assert!(document.contains(file), "{document}");
        }
        let without_namespace = document.replace("http://www.w3.org/2000/svg", "").replace("http%3A//www.w3.org", "");
        assert!(!without_namespace.contains("http"), "{document}");
        assert!(!document.contains("<style") && !document.contains(" style="), "{document}");
    }
}
