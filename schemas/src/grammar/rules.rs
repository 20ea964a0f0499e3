//! A grammar as a [`Rule`] for the engine.

use std::collections::{HashMap, HashSet};

use super::lark::{Grammar, GrammarExpr};
use super::pattern::{PatternWriter, is_terminal};
use super::{GrammarError, MAX_REFERENCES, WriteBudget, gbnf, lark};
use crate::constraint::Rule;

/// Returns the rule of a grammar in Lark's notation or in GBNF.
///
/// A grammar whose rules do not refer to themselves becomes one regular expression. In any other grammar the rules that
/// do not lead back to themselves become regular expressions. The engine reads these as far as they go: of two texts that
/// begin alike, the longer one is meant.
pub(crate) fn rule_of(source: &str, budget: &mut WriteBudget) -> Result<Rule, GrammarError> {
    let grammar = if gbnf::is_gbnf(source) { gbnf::read(source)? } else { lark::read(source)? };
    let recursive = recursive_names(&grammar);
    let patterns = PatternWriter::new(&grammar, budget)?;
    if recursive.contains(grammar.start.as_str()) {
        return Ok(Rule::Rules(rules(&grammar, &recursive, patterns)?));
    }
    patterns.whole().map(Rule::Pattern)
}

/// Returns the rules of a grammar that refers to itself. The first is the whole.
fn rules<'g>(
    grammar: &'g Grammar,
    recursive: &HashSet<&'g str>,
    patterns: PatternWriter<'g, '_>,
) -> Result<Vec<Rule>, GrammarError> {
    let mut names: Vec<&str> = recursive.iter().copied().collect();
    names.sort_unstable_by_key(|name| (*name != grammar.start, *name));
    if let Some(terminal) = names.iter().find(|name| grammar.has_terminals && is_terminal(name)) {
        return Err(GrammarError::Recursive((*terminal).to_owned()));
    }
    let mut references = Vec::new();
    names.iter().for_each(|name| grammar.rules[*name].references(&mut references));
    if references.iter().filter(|name| recursive.contains(*name)).count() > MAX_REFERENCES {
        return Err(GrammarError::TooManyReferences);
    }
    let places = names.iter().copied().zip(0..).collect();
    let mut writer = RuleWriter { patterns, recursive, places, regular: Vec::new() };
    let mut rules = names.iter().map(|name| writer.rule(&grammar.rules[*name])).collect::<Result<Vec<_>, _>>()?;
    rules.append(&mut writer.regular);
    Ok(rules)
}

/// Returns the names of the rules that lead to a rule that refers to itself.
fn recursive_names(grammar: &Grammar) -> HashSet<&str> {
    // How many references of each rule are not known to be regular, and who refers to each rule. A reference to a rule
    // that does not exist counts as regular: who writes it reports that.
    let mut n_open: HashMap<&str, usize> = HashMap::new();
    let mut users: HashMap<&str, Vec<&str>> = HashMap::new();
    for (name, expr) in &grammar.rules {
        let mut references = Vec::new();
        expr.references(&mut references);
        references.retain(|reference| grammar.rules.contains_key(*reference));
        n_open.insert(name, references.len());
        for reference in references {
            users.entry(reference).or_default().push(name);
        }
    }
    let mut next: Vec<&str> = n_open.iter().filter(|(_, n)| **n == 0).map(|(name, _)| *name).collect();
    while let Some(name) = next.pop() {
        n_open.remove(name);
        for user in users.remove(name).unwrap_or_default() {
            if let Some(n) = n_open.get_mut(user) {
                *n -= 1;
                if *n == 0 {
                    next.push(user);
                }
            }
        }
    }
    n_open.into_keys().collect()
}

struct RuleWriter<'g, 'b> {
    patterns: PatternWriter<'g, 'b>,
    recursive: &'b HashSet<&'g str>,
    /// The index of each rule that is written or will be.
    places: HashMap<&'g str, u32>,
    /// The rules that do not lead back to themselves and stand alone somewhere. Each is written once.
    regular: Vec<Rule>,
}

impl<'g> RuleWriter<'g, '_> {
    fn rule(&mut self, expr: &'g GrammarExpr) -> Result<Rule, GrammarError> {
        self.patterns.take_rule()?;
        Ok(match expr {
            GrammarExpr::Name(name) => Rule::Ref(self.place(name, expr)?),
            GrammarExpr::Sequence(items) if self.is_recursive(expr) => Rule::Sequence(self.rules(items)?),
            GrammarExpr::OneOf(items) if self.is_recursive(expr) => Rule::OneOf(self.rules(items)?),
            GrammarExpr::Repeat { expr: inner, min, max } if self.is_recursive(expr) => {
                Rule::Repeat { rule: Box::new(self.rule(inner)?), min: *min, max: *max }
            }
            regular => Rule::Pattern(self.patterns.pattern(regular)?),
        })
    }

    fn is_recursive(&self, expr: &GrammarExpr) -> bool {
        let mut references = Vec::new();
        expr.references(&mut references);
        references.iter().any(|name| self.recursive.contains(name))
    }

    fn rules(&mut self, items: &'g [GrammarExpr]) -> Result<Vec<Rule>, GrammarError> {
        items.iter().map(|item| self.rule(item)).collect()
    }

    /// Returns the index of a rule, which is written if it is the first mention of one that is regular.
    fn place(&mut self, name: &'g str, expr: &'g GrammarExpr) -> Result<u32, GrammarError> {
        if let Some(place) = self.places.get(name) {
            return Ok(*place);
        }
        self.patterns.take_rule()?;
        let pattern = self.patterns.pattern(expr)?;
        let place = (self.recursive.len() + self.regular.len()) as u32;
        self.regular.push(Rule::Pattern(pattern));
        self.places.insert(name, place);
        Ok(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(pattern: &str) -> Rule {
        Rule::Pattern(pattern.to_owned())
    }

    fn check(source: &str, expected: Rule) {
        assert_eq!(rule_of(source, &mut WriteBudget::default()), Ok(expected), "{source}");
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
        let item = Rule::OneOf(vec![Rule::Ref(2), Rule::Ref(0)]);
        let word = pattern("(?:(?:[a-z])){1,}");
        let items = Rule::Repeat { rule: Box::new(Rule::Ref(1)), min: 0, max: None };
        let root = Rule::Sequence(vec![pattern("(?:\\()"), items, pattern("(?:\\))")]);
        check(list, Rule::Rules(vec![root, item, word]));
        let nested = "start: \"(\" start? \")\"\n%ignore \" \"";
        let inner = Rule::Repeat { rule: Box::new(Rule::Ref(0)), min: 0, max: Some(1) };
        let bracket = |c: &str| pattern(&format!("(?:\\{c})(?:(?: ))*"));
        check(nested, Rule::Rules(vec![Rule::Sequence(vec![bracket("("), inner, bracket(")")])]));
    }

    #[test]
    fn a_long_rule_that_is_named_often_is_written_once() {
        let long = "x".repeat(30_000);
        let named = format!("root ::= \"(\" root \")\" {}\na ::= \"{long}\"", "|a".repeat(12_000));
        let mut budget = WriteBudget::default();
        let Ok(Rule::Rules(rules)) = rule_of(&named, &mut budget) else { panic!("it is refused") };
        let [Rule::OneOf(options), a] = &rules[..] else { panic!("{} rules", rules.len()) };
        assert_eq!((options.len(), a), (12_001, &pattern(&format!("(?:{long})"))));
        assert!(options[1..].iter().all(|option| *option == Rule::Ref(1)));
        assert!(budget.taken() < 1 << 20, "{}", budget.taken());
    }

    #[test]
    fn what_must_be_written_again_is_taken_from_one_budget_first() {
        let long = "x".repeat(10_000);
        // Each text is a pattern of its own, which ends with the ignored texts.
        let after = |n: usize| {
            let texts: String = (0..n).map(|i| format!("| \"{i}\" ")).collect();
            format!("%ignore A\nA: \"{long}\"\nstart: \"(\" start \")\" {texts}\n")
        };
        let mut budget = WriteBudget::default();
        assert!(rule_of(&after(60), &mut budget).is_ok());
        assert!((620_000..640_000).contains(&budget.taken()), "{}", budget.taken());
        assert_eq!(rule_of(&after(60), &mut budget), Err(GrammarError::TooLarge));
        assert_eq!(rule_of(&after(5_000), &mut WriteBudget::default()), Err(GrammarError::TooLarge));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let refused = |source: &str| rule_of(source, &mut WriteBudget::default()).unwrap_err().to_string();
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
        assert!(rule_of(&entangled(45), &mut WriteBudget::default()).is_ok());
        assert!(refused(&entangled(46)).contains("more than 4096 references"));
        assert!(refused("start: A\nA: \"(\" A \")\" | \"x\"").contains("refers to itself"));
    }
}
