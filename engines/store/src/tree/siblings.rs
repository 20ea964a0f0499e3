//! The blocks that continue the same one, or begin the prompts of a scope.

use std::collections::BTreeMap;

use baton_schemas::Token;

/// Names a block of a tree. Never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockId(pub(super) u64);

/// By their first position and token: a prompt finds those with which it can go on among thousands that it cannot.
#[derive(Debug, Default)]
pub(super) struct Siblings(BTreeMap<(u32, Token), Vec<BlockId>>);

impl Siblings {
    pub(super) fn add(&mut self, p0: u32, tokens: &[Token], id: BlockId) {
        self.0.entry((p0, first(tokens))).or_default().push(id);
    }

    pub(super) fn remove(&mut self, p0: u32, tokens: &[Token], id: BlockId) {
        let key = (p0, first(tokens));
        let Some(ids) = self.0.get_mut(&key) else { return };
        ids.retain(|sibling| *sibling != id);
        if ids.is_empty() {
            self.0.remove(&key);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = BlockId> {
        self.0.values().flatten().copied()
    }

    /// Siblings that begin as a block of `tokens` at `p0` does.
    pub(super) fn alike(&self, p0: u32, tokens: &[Token]) -> impl Iterator<Item = BlockId> {
        self.0.get(&(p0, first(tokens))).into_iter().flatten().copied()
    }

    /// Siblings that begin with a token of `prompt`, at `n_tokens` or before.
    pub(super) fn of_prompt<'s>(&'s self, prompt: &'s [Token], n_tokens: usize) -> impl Iterator<Item = BlockId> + 's {
        let mut from = Some(0);
        let starts = std::iter::from_fn(move || {
            let (&(p0, _), _) = self.0.range((from?, 0)..).next()?;
            from = p0.checked_add(1);
            Some(p0)
        });
        let starts = starts.take_while(move |p0| *p0 as usize <= n_tokens);
        starts.filter_map(move |p0| self.0.get(&(p0, *prompt.get(p0 as usize)?))).flatten().copied()
    }
}

/// A block has tokens.
fn first(tokens: &[Token]) -> Token {
    tokens.first().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_finds_what_begins_with_its_tokens_alone() {
        let mut siblings = Siblings::default();
        let prompt = [7, 8, 9, 10];
        for i in 0..10_000 {
            siblings.add(i % 4, &[100 + Token::from(i)], BlockId(u64::from(i)));
        }
        assert_eq!(siblings.of_prompt(&prompt, 4).count(), 0);
        for (p0, token, id) in [(0, 7, 20_000), (2, 9, 20_001), (2, 9, 20_002), (2, 10, 20_003), (3, 10, 20_004)] {
            siblings.add(p0, &[token, 1], BlockId(id));
        }
        let of = |n_tokens| siblings.of_prompt(&prompt, n_tokens).map(|id| id.0).collect::<Vec<_>>();
        assert_eq!(of(2), [20_000, 20_001, 20_002]);
        assert_eq!((of(1), of(9)), (vec![20_000], vec![20_000, 20_001, 20_002, 20_004]));
        assert_eq!(siblings.of_prompt(&prompt[..2], 2).count(), 1, "a prompt ends");
        assert_eq!(siblings.alike(2, &[9]).count(), 2);
        siblings.remove(2, &[9, 1], BlockId(20_001));
        assert_eq!((siblings.alike(2, &[9, 5]).count(), siblings.all().count()), (1, 10_004));
    }
}
