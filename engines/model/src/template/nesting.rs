//! Refuses templates that would overflow the stack of minijinja's compiler.
//!
//! minijinja limits the nesting of brackets and blocks. But a chain such as `1 + 1 + 1 …` or of `elif` nests one level for
//! each of its parts, and minijinja compiles and drops them by recursion. A template of 24 KB overflowed a stack of 2 MiB, which
//! aborts the process. So the parts are counted before minijinja compiles the source. Its own tokenizer finds them: any
//! other could be deceived about where a tag, a string or a raw text ends.

use minijinja::machinery::{Token, WhitespaceConfig, tokenize};

use super::TemplateError;

/// Words and signs in one tag. The longest tags of known templates have about 200.
const MAX_TAG_PARTS: usize = 1_000;

/// Branches of all `if`s together. Large templates have about 50.
const MAX_ELIFS: usize = 500;

/// Errors: a tag has too many parts, or there are too many branches.
pub(super) fn check(source: &str) -> Result<(), TemplateError> {
    let too_deep = |what: &str| Err(TemplateError::Failed(format!("the template has {what}")));
    let mut n_parts = 0;
    let mut n_elifs = 0;
    let mut begins_block = false;
    // minijinja stops at the first error, too, and describes it better.
    let tokens = tokenize(source, false, Default::default(), WhitespaceConfig::default()).map_while(Result::ok);
    for (token, _) in tokens {
        n_elifs += usize::from(begins_block && matches!(token, Token::Ident("elif")));
        begins_block = matches!(token, Token::BlockStart);
        n_parts = match token {
            Token::TemplateData(_) | Token::BlockStart | Token::VariableStart => 0,
            _ => n_parts + 1,
        };
        if n_parts > MAX_TAG_PARTS {
            return too_deep("too long an expression");
        }
        if n_elifs > MAX_ELIFS {
            return too_deep("too many branches");
        }
    }
    Ok(())
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
            format!("{{% raw %}} endraw {{{{ ' {{% endraw %}}{{{{ {}1 }}}}", "1+".repeat(n)),
            format!("{{% raw x %}}{{% endraw %}}{{{{ {}1 }}}}", "1+".repeat(n)),
            format!("{{% set x = {{'a':{{}}}}.a + {}1 %}}", "1+".repeat(n)),
            format!("{{{{ [1 %}}{}1] }}}}", "1+".repeat(n)),
        ] {
            assert!(matches!(check(&chain), Err(TemplateError::Failed(_))), "{}", &chain[..30]);
        }
    }

    #[test]
    fn long_texts_strings_and_templates_are_accepted() {
        let n = 20_000;
        for fine in [
            "a + ".repeat(n),
            format!("{{{{ '{}' }}}}", "a + \\' }} ".repeat(n)),
            "{{ a }}{% if b %}c{% elif d %}{% endif %}{ ".repeat(MAX_ELIFS),
            format!("{{# {} #}}", "a + ".repeat(n)),
            format!("{{% raw %}}{{{{ {} }}}}{{% endraw %}}", "a + ".repeat(n)),
        ] {
            assert_eq!(check(&fine), Ok(()), "{}", &fine[..8]);
        }
    }
}
