//! The id that an upstream knows a request by.

use std::borrow::Cow;

use super::Kind;

/// What is sent as `X-Request-Id` for our own id of a request. Some servers of OpenAI's dialect refuse what is no UUID
/// (llama-cpp-python), so they are all sent one that follows from ours; the others take it as it is.
pub(super) fn of(kind: Kind, id: &str) -> Cow<'_, str> {
    if kind != Kind::OpenAi {
        return id.into();
    }
    let id_of_theirs = uuid(id);
    // How to find in their log what ours calls otherwise.
    tracing::debug!(request_id = id, upstream_request_id = id_of_theirs, "the upstream is sent another id");
    id_of_theirs.into()
}

/// A UUID of version 4 (RFC 9562, section 5.4) whose random bits are the id's hash.
fn uuid(id: &str) -> String {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&blake3::hash(id.as_bytes()).as_bytes()[..16]);
    uuid::Builder::from_random_bytes(bytes).into_uuid().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_that_may_want_a_uuid_get_one_of_each_id() {
        let sent = of(Kind::OpenAi, "req_1-0-abc");
        let lengths: Vec<usize> = sent.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12], "{sent}");
        assert!(sent.chars().all(|c| c == '-' || c.is_ascii_hexdigit()), "{sent}");
        assert_eq!(sent.as_bytes()[14], b'4', "{sent}");
        assert!(b"89ab".contains(&sent.as_bytes()[19]), "{sent}");
        assert_eq!(sent, of(Kind::OpenAi, "req_1-0-abc"));
        assert_ne!(sent, of(Kind::OpenAi, "req_1-1-abc"));
    }

    #[test]
    fn others_get_ours() {
        for kind in [Kind::Ollama, Kind::LlamaServer, Kind::Vllm] {
            assert_eq!(of(kind, "req_1"), "req_1");
        }
    }
}
