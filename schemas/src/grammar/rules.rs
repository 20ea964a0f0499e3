//! A grammar as a [`Rule`] for the engine.

use std::collections::{HashMap, HashSet};

use super::lark::{Grammar, GrammarExpr};
use super::pattern::{PatternWriter, is_terminal};
use super::{GrammarError, MAX_REFERENCES, gbnf, lark};
use crate::constraint::Rule;

/// Returns the rule of a grammar in Lark's notation or in GBNF.
///
/// A grammar whose rules do not refer to themselves becomes one regular expression. In any other grammar the rules that
/// do not lead back to themselves become regular expressions, which the engine reads as far as they go: of two texts that
/// begin alike, the longer one is meant.
pub(crate) fn rule_of(source: &str) -> Result<Rule, GrammarError> {
    let grammar = if gbnf::is_gbnf(source) { gbnf::read(source)? } else { lark::read(source)? };
    match PatternWriter::new(&grammar)?.whole() {
        Ok(pattern) => Ok(Rule::Pattern(pattern)),
        Err(GrammarError::Recursive(_)) => recursive(&grammar),
        Err(error) => Err(error),
    }
}

/// Returns the rules of a grammar that refers to itself.
fn recursive(grammar: &Grammar) -> Result<Rule, GrammarError> {
    let regular = regular_names(grammar)?;
    let mut names: Vec<&str> =
        grammar.rules.keys().map(String::as_str).filter(|name| !regular.contains(name)).collect();
    names.sort_unstable_by_key(|name| (*name != grammar.start, *name));
    if let Some(terminal) = names.iter().find(|name| grammar.has_terminals && is_terminal(name)) {
        return Err(GrammarError::Recursive((*terminal).to_owned()));
    }
    let mut references = Vec::new();
    names.iter().for_each(|name| grammar.rules[*name].references(&mut references));
    if references.iter().filter(|name| !regular.contains(*name)).count() > MAX_REFERENCES {
        return Err(GrammarError::TooManyReferences);
    }
    let places = names.iter().zip(0..).map(|(name, at)| (*name, at)).collect();
    let mut writer = RuleWriter { patterns: PatternWriter::new(grammar)?, regular, places };
    let rules = names.iter().map(|name| writer.rule(&grammar.rules[*name])).collect::<Result<_, _>>()?;
    Ok(Rule::Rules(rules))
}

/// Returns the names of the rules that do not lead to a rule that refers to itself. Errors: a rule is missing.
fn regular_names(grammar: &Grammar) -> Result<HashSet<&str>, GrammarError> {
    // How many references of each rule are not known to be regular, and who refers to each rule.
    let mut n_open: HashMap<&str, usize> = HashMap::new();
    let mut users: HashMap<&str, Vec<&str>> = HashMap::new();
    for (name, expr) in &grammar.rules {
        let mut references = Vec::new();
        expr.references(&mut references);
        n_open.insert(name, references.len());
        for reference in references {
            if !grammar.rules.contains_key(reference) {
                return Err(GrammarError::NoRule(reference.to_owned()));
            }
            users.entry(reference).or_default().push(name);
        }
    }
    let mut next: Vec<&str> = n_open.iter().filter(|(_, n)| **n == 0).map(|(name, _)| *name).collect();
    let mut regular = HashSet::new();
    while let Some(name) = next.pop() {
        regular.insert(name);
        for user in users.remove(name).unwrap_or_default() {
            if let Some(n) = n_open.get_mut(user) {
                *n -= 1;
                if *n == 0 {
                    next.push(user);
                }
            }
        }
    }
    Ok(regular)
}

struct RuleWriter<'g> {
    patterns: PatternWriter<'g>,
    regular: HashSet<&'g str>,
    /// The index of each of the other rules.
    places: HashMap<&'g str, u32>,
}

impl<'g> RuleWriter<'g> {
    fn rule(&mut self, expr: &'g GrammarExpr) -> Result<Rule, GrammarError> {
        let mut references = Vec::new();
        expr.references(&mut references);
        if references.iter().all(|name| self.regular.contains(name)) {
            return Ok(Rule::Pattern(self.patterns.expr(expr)?));
        }
        Ok(match expr {
            GrammarExpr::Name(name) => Rule::Ref(self.places.get(name.as_str()).copied().unwrap_or_default()),
            GrammarExpr::Sequence(items) => Rule::Sequence(self.rules(items)?),
            GrammarExpr::OneOf(items) => Rule::OneOf(self.rules(items)?),
            GrammarExpr::Repeat { expr, min, max } => {
                Rule::Repeat { rule: Box::new(self.rule(expr)?), min: *min, max: *max }
            }
            GrammarExpr::Text { .. } | GrammarExpr::Regex { .. } | GrammarExpr::Range(..) => Rule::Sequence(Vec::new()),
        })
    }

    fn rules(&mut self, items: &'g [GrammarExpr]) -> Result<Vec<Rule>, GrammarError> {
        items.iter().map(|item| self.rule(item)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(pattern: &str) -> Rule {
        Rule::Pattern(pattern.to_owned())
    }

    fn check(source: &str, expected: Rule) {
        assert_eq!(rule_of(source), Ok(expected), "{source}");
    }

    #[test]
    fn a_grammar_that_does_not_refer_to_itself_is_one_pattern() {
        check(
            "# a comment\nroot ::= a-b{2,3} # another\n  \na-b ::= \"x\\n\" | [^\\]a-c-]* (\n . |\n \"y\" )?",
            pattern("(?:(?:(?:x\\n)|(?:(?:(?:[^\\x{5d}a-c\\x{2d}])){0,}(?:(?:(?s:.)|(?:y))){0,1}))){2,3}"),
        );
        check("start: \"a\"", pattern("(?:a)"));
    }

    #[test]
    fn a_grammar_that_refers_to_itself_keeps_those_rules() {
        let list = "root ::= \"(\" item* \")\"\nitem ::= word | root\nword ::= [a-z]+";
        let item = Rule::OneOf(vec![pattern("(?:(?:[a-z])){1,}"), Rule::Ref(0)]);
        let items = Rule::Repeat { rule: Box::new(Rule::Ref(1)), min: 0, max: None };
        let root = Rule::Sequence(vec![pattern("(?:\\()"), items, pattern("(?:\\))")]);
        check(list, Rule::Rules(vec![root, item]));
        let nested = "start: \"(\" start? \")\"\n%ignore \" \"";
        let inner = Rule::Repeat { rule: Box::new(Rule::Ref(0)), min: 0, max: Some(1) };
        let bracket = |c: &str| pattern(&format!("(?:\\{c})(?:(?: ))*"));
        check(nested, Rule::Rules(vec![Rule::Sequence(vec![bracket("("), inner, bracket(")")])]));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let refused = |source: &str| rule_of(source).unwrap_err().to_string();
        assert_eq!(refused("a ::= \"b\""), "has no rule named root");
        assert_eq!(refused("root ::= root b"), "has no rule named b");
        assert_eq!(refused("root ::= \"a\nb ::= \"c\""), "line 1: a text or a class does not end");
        assert_eq!(refused("root ::= []"), "line 1: a class has no characters");
        assert_eq!(refused("\nroot ::= <think>"), "line 2: what follows the rule is not understood");
        assert_eq!(refused("root ::= \"a\"\nroot ::= \"b\""), "line 2: the rule \"root\" is defined twice");
        assert_eq!(refused("root ::= \"\\q\""), "line 1: unknown escape");
        assert_eq!(refused("root ::= [\\uD800]"), "line 1: \"D800\" is no character");
        assert!(refused(&format!("root ::= {}", "(".repeat(100))).contains("nested too deeply"));
        let chain: String = (0..4000).map(|i| format!("r{i} ::= r{}\n", i + 1)).collect();
        let chain = &chain[..chain.len().min(60_000)];
        assert!(
            refused(&format!("root ::= r0\n{}", &chain[..chain.rfind('\n').unwrap()])).contains("more than 64 times")
        );
        let entangled = |n: usize| {
            let rule = |i: usize| (0..n).map(|j| format!("r{} r{}", j, i * j % n)).collect::<Vec<_>>().join(" | ");
            let rules = (0..n).map(|i| format!("r{i} ::= {} | \"a\" | \"\"\n", rule(i)));
            format!("root ::= r0\n{}", rules.collect::<String>())
        };
        assert!(rule_of(&entangled(45)).is_ok());
        assert!(refused(&entangled(46)).contains("more than 4096 references"));
        assert!(refused("start: A\nA: \"(\" A \")\" | \"x\"").contains("refers to itself"));
    }
}
