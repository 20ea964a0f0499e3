//! Reads replies that are short: a server's description, a list, an error.

use reqwest::Response;

/// Why a reply was not read.
#[derive(Debug, thiserror::Error)]
pub enum ShortBodyError {
    #[error("the reply is longer than {0} bytes")]
    TooLong(usize),
    #[error(transparent)]
    Lost(#[from] reqwest::Error),
}

/// Reads a reply of at most `max_bytes` bytes. Errors: it is longer, or does not arrive whole.
pub async fn short_body(mut reply: Response, max_bytes: usize) -> Result<Vec<u8>, ShortBodyError> {
    let mut body = Vec::new();
    while let Some(chunk) = reply.chunk().await? {
        if chunk.len() > max_bytes.saturating_sub(body.len()) {
            return Err(ShortBodyError::TooLong(max_bytes));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(n_bytes: usize) -> Response {
        http::Response::new(vec![b'x'; n_bytes]).into()
    }

    #[tokio::test]
    async fn a_reply_is_read_up_to_its_limit() {
        assert_eq!(short_body(reply(0), 0).await.unwrap(), b"");
        assert_eq!(short_body(reply(10), 10).await.unwrap().len(), 10);
        assert!(matches!(short_body(reply(11), 10).await, Err(ShortBodyError::TooLong(10))));
    }
}
