//! Bounds of numbers, as engines hold them: each is a 64-bit float, of which they make a pattern of digits.
//!
//! A bound that they cannot hold exactly becomes the next one that allows less, so that what is written keeps it.

use serde_json::{Map, Number, Value};

use super::numbers::{EXACT, TWO_TO_63, integer, written};

/// The largest float below 2^63. As an upper bound of integers, 2^63 becomes the largest one of 64 bits.
const END: f64 = TWO_TO_63.next_down();

/// Engines count up from 19 digits only to an end.
const DEEP: f64 = 1e18;

/// The smallest bound but 0 that engines hold.
const LEAST: f64 = 1e-30;

/// The keywords of bounds.
pub(super) const BOUNDS: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];

#[derive(Clone, Copy)]
enum Side {
    Lower,
    Upper,
}

impl Side {
    /// The keywords of its bounds: the inclusive one, and the exclusive one.
    fn keys(self) -> [&'static str; 2] {
        match self {
            Side::Lower => ["minimum", "exclusiveMinimum"],
            Side::Upper => ["maximum", "exclusiveMaximum"],
        }
    }

    fn opposite(self) -> Side {
        match self {
            Side::Lower => Side::Upper,
            Side::Upper => Side::Lower,
        }
    }

    /// A lower bound is the upper one of the opposite numbers.
    fn sign(self) -> i8 {
        match self {
            Side::Lower => -1,
            Side::Upper => 1,
        }
    }
}

/// A bound as engines hold it.
enum Held {
    /// With this value.
    As(Number),
    /// With this value, and with a bound on the opposite side.
    Deep(Number),
    /// It allows all that they can count to, and more. This is their end.
    Beyond(Number),
    /// It allows nothing that they can count to.
    Not,
}

/// The bounds of the numbers that a schema describes.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub(super) of_integers: bool,
    /// Numbers that engines cannot count to need not be possible, so a bound beyond them is held.
    pub(super) may_end_early: bool,
}

impl Bounds {
    /// Changes the bounds of a schema to those that engines hold, and removes the others. Returns the keywords that are not
    /// held.
    pub(super) fn hold(self, fields: &mut Map<String, Value>) -> Vec<&'static str> {
        let written_keys: Vec<_> = BOUNDS.into_iter().filter(|key| fields.contains_key(*key)).collect();
        self.normalize(fields);
        let before = integers_within(fields);
        let (mut unheld, mut deep) = (Vec::new(), Vec::new());
        for side in [Side::Lower, Side::Upper] {
            for key in side.keys() {
                let Some(Value::Number(bound)) = fields.get_mut(key) else { continue };
                match self.held(bound, side) {
                    Held::As(held) => *bound = held,
                    Held::Deep(held) => {
                        *bound = held;
                        deep.push(side.opposite());
                    }
                    Held::Beyond(end) if self.may_end_early => *bound = end,
                    Held::Beyond(_) | Held::Not => {
                        fields.remove(key);
                        unheld.push(key);
                    }
                }
            }
        }
        for side in deep {
            if side.keys().iter().all(|key| !fields.contains_key(*key)) {
                fields.insert(side.keys()[0].to_owned(), self.end(side).into());
                unheld.retain(|key| !side.keys().contains(key));
            }
        }
        let after = integers_within(fields).filter(|(low, high)| low > high);
        if let (Some((low, high)), Some((held_low, held_high))) = (before, after)
            && low <= high
        {
            // The numbers between are no floats, so those around them are allowed.
            for key in BOUNDS {
                unheld.extend(fields.remove(key).map(|_| key));
            }
            fields.insert("minimum".to_owned(), written(held_high as f64).into());
            fields.insert("maximum".to_owned(), written(held_low as f64).into());
        }
        // An exclusive bound may have become an inclusive one.
        let as_written = |key: &'static str| match written_keys.contains(&key) {
            false if key == "minimum" => "exclusiveMinimum",
            false if key == "maximum" => "exclusiveMaximum",
            _ => key,
        };
        unheld.into_iter().map(as_written).collect()
    }

    /// The last number that engines count to.
    fn end(self, side: Side) -> Number {
        match side {
            Side::Lower => written(-END),
            Side::Upper => written(if self.of_integers { TWO_TO_63 } else { END }),
        }
    }

    fn held(self, bound: &Number, side: Side) -> Held {
        let Some(float) = bound.as_f64() else { return Held::Not };
        let sign = side.sign();
        if float.abs() < EXACT {
            let is_tiny = !self.of_integers && float != 0.0 && float.abs() < LEAST;
            return match is_tiny {
                false => Held::As(bound.clone()),
                true if float * f64::from(sign) < 0.0 => Held::As(written(LEAST.copysign(float))),
                true => Held::Not,
            };
        }
        let most = integer(bound).unwrap_or(float as i128).saturating_mul(i128::from(sign));
        let nearest = most as f64;
        let inside = if nearest as i128 > most { nearest.next_down() } else { nearest };
        let value = |inside: f64| written(inside * f64::from(sign));
        let largest = i128::from(i64::MAX);
        match side {
            Side::Upper if self.of_integers && most == largest => Held::As(self.end(side)),
            Side::Lower if self.of_integers && inside < -END && most >= -largest => Held::Deep(value(inside)),
            _ if inside < -END => Held::Not,
            _ if inside <= -DEEP => Held::Deep(value(inside)),
            _ if inside <= END => Held::As(value(inside)),
            _ if most <= largest + 1 => Held::As(self.end(side)),
            _ => Held::Beyond(self.end(side)),
        }
    }

    /// Writes exclusive bounds of draft 4, which are `true` beside the inclusive ones, as numbers, and those of integers to which
    /// a float cannot add 1 as inclusive ones.
    fn normalize(self, fields: &mut Map<String, Value>) {
        for side in [Side::Lower, Side::Upper] {
            let [inclusive, exclusive] = side.keys();
            if let Some(Value::Bool(excludes)) = fields.get(exclusive) {
                let of = if *excludes { fields.remove(inclusive) } else { None };
                fields.remove(exclusive);
                fields.extend(of.map(|bound| (exclusive.to_owned(), bound)));
            }
            let sign = i128::from(side.sign());
            let oriented = |key| Some(integer(fields.get(key)?.as_number()?)? * sign);
            let is_large = fields.get(exclusive).and_then(Value::as_f64).is_some_and(|bound| bound.abs() >= EXACT);
            let Some(below) = oriented(exclusive).filter(|_| self.of_integers && is_large) else { continue };
            let most = oriented(inclusive).map_or(below - 1, |most| most.min(below - 1));
            if let Some(most) = Number::from_i128(most * sign) {
                fields.remove(exclusive);
                fields.insert(inclusive.to_owned(), most.into());
            }
        }
    }
}

/// The digits of a schema's bounds but 0, which engines compare with those of a number one by one.
pub(super) fn n_digits(fields: &Map<String, Value>) -> usize {
    let bounds = BOUNDS.into_iter().filter_map(|key| fields.get(key)?.as_number());
    bounds.filter(|bound| bound.as_f64() != Some(0.0)).map(|bound| bound.to_string().len()).sum()
}

/// The least and the largest integer within all bounds. `None`: there is none on one side.
fn integers_within(fields: &Map<String, Value>) -> Option<(i128, i128)> {
    let most = |side: Side| {
        let bounds = side.keys().into_iter().zip([0, 1]).filter_map(|(key, exclusive)| {
            let bound = fields.get(key)?.as_number()?;
            let oriented = bound.as_f64()? * f64::from(side.sign());
            let whole = integer(bound).map(|whole| whole * i128::from(side.sign()));
            let is_whole = whole.is_some() || oriented.fract() == 0.0;
            let exclusive = if is_whole { exclusive } else { 0 };
            Some(whole.unwrap_or(oriented.floor() as i128).saturating_sub(exclusive))
        });
        bounds.min()
    };
    Some((most(Side::Lower)?.checked_neg()?, most(Side::Upper)?))
}
