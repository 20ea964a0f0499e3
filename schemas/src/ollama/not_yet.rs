//! What a client may ask for and this server cannot honour yet: refused by name. Each check leaves here when its
//! feature arrives.

use crate::request::InvalidRequest;
use crate::request::fields::Fields;

/// Refuses what is asked for in earnest; values that ask for nothing (`images: []`) pass.
pub(super) fn refuse(root: Fields<'_>) -> Result<(), InvalidRequest> {
    images(root, "images")
}

/// Refuses pictures under this name of the body or of a message.
pub(super) fn images(fields: Fields<'_>, name: &str) -> Result<(), InvalidRequest> {
    match fields.array(name)? {
        Some([_, ..]) => Err(InvalidRequest::image(fields.name(name))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(body: Value, expected: Option<&str>) {
        let refused = refuse(Fields::root(body.as_object().unwrap())).err();
        assert_eq!(refused.and_then(|error| error.param).as_deref(), expected, "{body}");
    }

    #[test]
    fn only_what_is_asked_for_in_earnest_is_refused() {
        check(json!({}), None);
        check(json!({"images": []}), None);
        check(json!({"images": null}), None);
        check(json!({"images": ["aGk="]}), Some("images"));
    }
}
