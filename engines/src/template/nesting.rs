//! Refuses templates that would overflow the stack of minijinja's compiler.
//!
//! minijinja limits the nesting of brackets and blocks, but a chain such as `1 + 1 + 1 …` or of `elif` nests one level for
//! each of its parts, and compiles and drops them by recursion. A template of 24 KB overflowed a stack of 2 MiB, which
//! aborts the process. So the parts are counted before minijinja sees the source.

use super::TemplateError;

/// Words and signs in one tag. The longest tags of known templates have about 200.
const MAX_TAG_PARTS: usize = 1_000;

/// Branches of all `if`s together. Large templates have about 50.
const MAX_ELIFS: usize = 500;

/// Errors: a tag has too many parts, or there are too many branches.
pub(super) fn check(source: &str) -> Result<(), TemplateError> {
    let too_deep = |what: &str| Err(TemplateError::Failed(format!("the template has {what}")));
    let mut n_elifs = 0;
    let mut rest = source;
    while let Some(start) = rest.find('{') {
        rest = &rest[start + 1..];
        // A quote in a comment or in raw text begins no string.
        if let Some(comment) = rest.strip_prefix('#') {
            rest = after(comment, "#}");
            continue;
        }
        let Some(tag) = rest.strip_prefix(['{', '%']) else { continue };
        let name = if rest.starts_with('%') { name(tag) } else { "" };
        if name == "raw" {
            rest = after(tag, "endraw");
            continue;
        }
        let (n_parts, n_bytes) = parts(tag);
        if n_parts > MAX_TAG_PARTS {
            return too_deep("too long an expression");
        }
        n_elifs += usize::from(name == "elif");
        if n_elifs > MAX_ELIFS {
            return too_deep("too many branches");
        }
        rest = &tag[n_bytes..];
    }
    Ok(())
}

/// The first word of a block's tag.
fn name(tag: &str) -> &str {
    let tag = tag.trim_start_matches(['-', '+']).trim_start();
    tag.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()
}

/// The text after the first `end`.
fn after<'a>(text: &'a str, end: &str) -> &'a str {
    text.split_once(end).map_or("", |(_, after)| after)
}

/// The words and signs of a tag outside its strings, and the bytes up to its end. A tag without an end takes the rest.
fn parts(tag: &str) -> (usize, usize) {
    let mut n_parts = 0;
    let mut in_word = false;
    let mut quote = None;
    let mut chars = tag.char_indices();
    while let Some((at, c)) = chars.next() {
        match quote {
            Some(_) if c == '\\' => drop(chars.next()),
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if tag[at..].starts_with("}}") || tag[at..].starts_with("%}") => return (n_parts, at),
            None => {
                let is_word = c.is_alphanumeric() || c == '_';
                n_parts += usize::from(!(c.is_whitespace() || is_word && in_word));
                in_word = is_word;
                quote = (c == '"' || c == '\'').then_some(c);
            }
        }
    }
    (n_parts, tag.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_chains_are_refused_before_they_are_compiled() {
        let n = 20_000;
        for chain in [
            format!("{{{{ {}1 }}}}", "1+".repeat(n)),
            format!("{{{{ {}a }}}}", "a~".repeat(n)),
            format!("{{{{ a{} }}}}", ".b".repeat(n)),
            format!("{{{{ a{} }}}}", "|b".repeat(n)),
            format!("{{{{ {}a", "not ".repeat(n)),
            format!("{{% if a %}}{}{{% endif %}}", "{%- elif a %}".repeat(n)),
            format!("{{# {{{{ ' #}}{{{{ {}1 }}}}", "1+".repeat(n)),
            format!("{{%- raw %}}{{{{ ' {{% endraw %}}{{{{ {}1 }}}}", "1+".repeat(n)),
            format!("{{{{ raw }}}}{{{{ {}1 }}}}", "1+".repeat(n)),
        ] {
            assert!(matches!(check(&chain), Err(TemplateError::Failed(_))), "{}", &chain[..30]);
        }
    }

    #[test]
    fn long_texts_strings_and_templates_are_none() {
        let n = 20_000;
        for fine in [
            "a + ".repeat(n),
            format!("{{{{ '{}' }}}}", "a + \\' }} ".repeat(n)),
            "{{ a }}{% if b %}c{% elif d %}{% endif %}{".repeat(MAX_ELIFS),
            format!("{{# {} #}}", "a + ".repeat(n)),
            format!("{{% raw %}}{{{{ {} }}}}{{% endraw %}}", "a + ".repeat(n)),
        ] {
            assert_eq!(check(&fine), Ok(()), "{}", &fine[..8]);
        }
    }
}
