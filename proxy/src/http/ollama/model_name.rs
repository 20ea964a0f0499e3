//! The names of models that Ollama's clients fetch.

/// How Ollama spells a model of the Hugging Face hub: after the hub's name.
const HUBS: [&str; 2] = ["hf.co/", "huggingface.co/"];

/// The tag that Ollama's clients add to a name without one.
const LATEST: &str = ":latest";

/// The name as `baton pull` takes it.
pub(super) fn to_fetch(name: &str) -> &str {
    let name = HUBS.iter().find_map(|hub| name.strip_prefix(hub)).unwrap_or(name);
    without_tag(name)
}

/// The name without the tag that clients add.
pub(super) fn without_tag(name: &str) -> &str {
    name.strip_suffix(LATEST).filter(|bare| !bare.is_empty()).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hubs_name_and_the_tag_that_clients_add_are_left_out() {
        for (name, expected) in [
            ("smollm2", "smollm2"),
            ("smollm2:latest", "smollm2"),
            ("hf.co/me/one:Q8_0", "me/one:Q8_0"),
            ("huggingface.co/me/one:latest", "me/one"),
        ] {
            assert_eq!(to_fetch(name), expected);
        }
    }
}
