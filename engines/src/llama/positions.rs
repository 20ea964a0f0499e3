//! The positions of a slot's tokens. A token of text has the position after the one before it. The tokens of an image may share a
//! position (M-RoPE). The text after an image goes on behind the image's longer side.
//!
//! The scheduler and the wire know tokens by their index alone. Only what speaks to llama.cpp turns indexes into positions.

use std::ops::Range;

use baton_schemas::Token;
use baton_schemas::image::{ImageShape, runs};

/// The positions of a slot's tokens. The default: each token's is its index.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenPositions {
    /// In order.
    images: Vec<SharedPosition>,
}

/// The tokens of an image that share a position.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SharedPosition {
    tokens: Range<u32>,
    /// The position that they share.
    position: u32,
    /// The positions from there that no text has.
    n_positions: u32,
}

impl TokenPositions {
    /// Those of text.
    pub const TEXT: TokenPositions = TokenPositions { images: Vec::new() };

    /// The positions of a sequence, as its placeholders say.
    pub fn of_tokens(tokens: &[Token]) -> TokenPositions {
        let mut positions = TokenPositions::default();
        for run in runs(tokens) {
            let Some(shared) = ImageShape::of(&tokens[run.clone()]).shared else { continue };
            let start = (run.start + shared.tokens.start) as u32;
            positions.images.push(SharedPosition {
                position: positions.of(start),
                tokens: start..start + shared.tokens.len() as u32,
                n_positions: shared.n_positions as u32,
            });
        }
        positions
    }

    /// The position of the token of this index.
    pub fn of(&self, token: u32) -> u32 {
        match self.images.iter().rev().find(|image| image.tokens.start <= token) {
            None => token,
            Some(image) if token < image.tokens.end => image.position,
            Some(image) => image.position + image.n_positions + (token - image.tokens.end),
        }
    }

    /// One past the last position of the first `n` tokens. It is the position of the next one, except within an image.
    pub fn after(&self, n: u32) -> u32 {
        n.checked_sub(1).map_or(0, |last| self.of(last) + 1)
    }

    /// The positions of some tokens, at least one.
    pub fn range(&self, tokens: &Range<u32>) -> Range<u32> {
        self.of(tokens.start)..self.after(tokens.end)
    }

    /// The tokens that have these tokens' positions: images that they cut are whole.
    pub fn whole(&self, tokens: &Range<u32>) -> Range<u32> {
        let cut = |n: &u32| self.images.iter().find(|image| image.tokens.start < *n && *n < image.tokens.end);
        let start = cut(&tokens.start).map_or(tokens.start, |image| image.tokens.start);
        start..cut(&tokens.end).map_or(tokens.end, |image| image.tokens.end)
    }

    /// Returns true if each of these tokens has a position of its own.
    pub fn are_apart(&self, tokens: &Range<u32>) -> bool {
        !self.images.iter().any(|image| image.tokens.start < tokens.end && tokens.start < image.tokens.end)
    }

    /// The coordinates of a token's cell on three axes: time, height, width. llama.cpp compares the last two only within an
    /// image that is being computed, so they only keep the order of an image's tokens here.
    pub fn axes(&self, token: u32) -> [u32; 3] {
        let position = self.of(token);
        let within = self.images.iter().find(|image| image.tokens.contains(&token));
        [position, position, position + within.map_or(0, |image| token - image.tokens.start)]
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::image::{Image, SharedTokens};

    use super::*;

    /// Two tokens of text, an image of 3×4 tokens between two of text, and text.
    fn positions() -> TokenPositions {
        let shared = SharedTokens { tokens: 1..13, n_positions: 4 };
        let image = Image::new(&b"a"[..], "f").placeholders(&ImageShape { n_tokens: 14, shared: Some(shared) });
        TokenPositions::of_tokens(&[&[7, 7][..], &image, &[7, 7]].concat())
    }

    #[test]
    fn an_image_takes_the_positions_of_its_longer_side() {
        let positions = positions();
        let of = |tokens: Range<u32>| tokens.map(|token| positions.of(token)).collect::<Vec<_>>();
        assert_eq!(of(0..4), [0, 1, 2, 3]);
        assert_eq!(of(4..15), [3; 11]);
        assert_eq!(of(15..19), [7, 8, 9, 10]);
        assert_eq!([0, 1, 3, 4, 15, 16, 100].map(|n| positions.after(n)), [0, 1, 3, 4, 4, 8, 92]);
        assert_eq!((positions.range(&(0..5)), positions.range(&(15..17))), (0..4, 7..9));
        assert_eq!(TokenPositions::default().range(&(4..9)), 4..9);
    }

    #[test]
    fn a_range_that_cuts_an_image_is_widened() {
        let positions = positions();
        for (tokens, whole) in
            [(0..3, 0..3), (0..4, 0..15), (5..6, 3..15), (14..16, 3..16), (3..15, 3..15), (15..17, 15..17)]
        {
            assert_eq!(positions.whole(&tokens), whole, "{tokens:?}");
        }
        assert!(positions.are_apart(&(0..3)) && positions.are_apart(&(15..20)) && !positions.are_apart(&(0..4)));
    }

    #[test]
    fn cells_of_an_image_keep_their_order() {
        let positions = positions();
        let axes: Vec<[u32; 3]> = (0..18).map(|token| positions.axes(token)).collect();
        assert!(axes.is_sorted() && axes.windows(2).all(|two| two[0] != two[1]), "{axes:?}");
        assert_eq!((axes[2], axes[4], axes[15]), ([2; 3], [3, 3, 4], [7; 3]));
    }
}
