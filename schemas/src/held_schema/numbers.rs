//! Numbers in schemas, as engines hold them: with 64-bit floats, patterns of digits, and integers of 64 bits.

use serde_json::{Map, Number, Value};

use crate::written_number::{nearest, text_of};

/// The largest integer from which on a 64-bit float stands for several.
pub(super) const EXACT: f64 = 9_007_199_254_740_992.0;
pub(super) const TWO_TO_63: f64 = 9_223_372_036_854_775_808.0;

/// No reply has so many characters, items or properties, and engines count no further.
const TOO_MANY: f64 = 2_147_483_648.0;

/// The largest step, without its decimal point: an engine looks through as many remainders before the first token, and beside
/// bounds for each of their digits.
const MAX_STEP: u128 = 100_000;

/// The largest step that is a power of ten, of which a few remainders decide.
const MAX_ROUND_STEP: u128 = 100_000_000;

/// The most decimals of a step: engines multiply remainders by powers of ten in 32 bits.
const MAX_STEP_DECIMALS: u32 = 8;

/// A count as engines hold it.
pub(super) enum HeldCount {
    Held(u64),
    /// No reply exceeds it.
    HoldsAnyway,
    /// No reply reaches it.
    Unreachable,
    /// JSON Schema allows no such count.
    Wrong,
}

impl HeldCount {
    /// Reads a count, which some clients write as `1.0`.
    pub(super) fn of(value: &Value, is_most: bool) -> HeldCount {
        match value.as_f64().filter(|count| *count >= 0.0 && count.fract() == 0.0) {
            Some(count) if count < TOO_MANY => HeldCount::Held(count as u64),
            Some(_) if is_most => HeldCount::HoldsAnyway,
            Some(_) => HeldCount::Unreachable,
            None => HeldCount::Wrong,
        }
    }
}

/// A step of numbers: `digits` divided by ten to the power of `n_decimals`.
#[derive(Clone, Copy)]
pub(super) struct Step {
    digits: u128,
    n_decimals: u32,
}

impl Step {
    /// Reads a step as engines read it. `None`: they do not hold it.
    pub(super) fn of(step: f64) -> Option<Step> {
        let (mut digits, mut n_decimals) = (step.abs(), 0);
        while digits.fract() != 0.0 && n_decimals <= MAX_STEP_DECIMALS {
            digits *= 10.0;
            n_decimals += 1;
        }
        let step = Step { digits: digits as u128, n_decimals };
        (digits.fract() == 0.0 && step.is_held()).then_some(step)
    }

    /// The step of numbers that are multiples of both. `None`: engines do not hold it.
    pub(super) fn and(self, other: Step) -> Option<Step> {
        let n_decimals = self.n_decimals.max(other.n_decimals);
        let scaled = |step: Step| step.digits * 10_u128.pow(n_decimals - step.n_decimals);
        let (a, b) = (scaled(self), scaled(other));
        let (mut divisor, mut rest) = (a, b);
        while rest != 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        let all = Step { digits: a / divisor * b, n_decimals };
        // Engines multiply them in 32 bits.
        (a * b <= u128::from(u32::MAX) && all.is_held()).then_some(all)
    }

    /// Returns true if engines hold it beside bounds of so many digits.
    pub(super) fn is_held_within(self, n_digits: usize) -> bool {
        self.is_round() || self.digits.saturating_mul(n_digits as u128) <= MAX_STEP
    }

    fn is_round(self) -> bool {
        (0..=MAX_ROUND_STEP.ilog10()).any(|n| 10_u128.pow(n) == self.digits)
    }

    fn is_held(self) -> bool {
        let is_small = self.digits <= MAX_STEP || self.is_round();
        is_small && self.digits > 0 && self.n_decimals <= MAX_STEP_DECIMALS
    }
}

/// The nearest number of 64 bits for one that they do not hold, and if engines hold the same of both: no digit matters beyond
/// 64 bits.
pub(super) fn shortened(value: &Value) -> Option<(Number, bool)> {
    text_of(value)?;
    let nearest = nearest(value)?;
    let is_beyond = nearest.as_f64().is_some_and(|float| float.abs() >= 2.0 * TWO_TO_63);
    Some((nearest, is_beyond))
}

/// Returns true if a value has a number of which a 64-bit float is only the nearest.
pub(super) fn has_inexact(value: &Value) -> bool {
    match value {
        Value::Object(_) if text_of(value).is_some() => true,
        Value::Number(number) => is_inexact(number),
        Value::Array(items) => items.iter().any(has_inexact),
        Value::Object(fields) => fields.values().any(has_inexact),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}

/// The integer that a number was written as, if it has at most 64 bits.
pub(super) fn integer(number: &Number) -> Option<i128> {
    number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from))
}

fn is_inexact(number: &Number) -> bool {
    match (integer(number), number.as_f64()) {
        (Some(integer), Some(float)) => float as i128 != integer || float <= -TWO_TO_63,
        (None, Some(float)) => float.abs() >= EXACT && float.fract() == 0.0,
        _ => true,
    }
}

/// Holds a text near a number that cannot be held exactly: to the nearest one that can, or to an integer of the same size.
pub(super) fn near(fields: &mut Map<String, Value>, number: &Value) {
    let Some(nearest) = nearest(number) else { return };
    if !is_inexact(&nearest) {
        fields.insert("const".to_owned(), nearest.into());
        return;
    }
    if fields.contains_key("type") {
        return;
    }
    fields.insert("type".to_owned(), "integer".into());
    if let Some(float) = nearest.as_f64().filter(|float| float.abs() < TWO_TO_63.next_down()) {
        fields.insert("minimum".to_owned(), written(float.next_down()).into());
        fields.insert("maximum".to_owned(), written(float.next_up()).into());
    }
}

/// Writes a float so that its JSON is read as the same one: integers by all their digits.
pub(super) fn written(float: f64) -> Number {
    let integer = float as i128;
    let written = if float.fract() == 0.0 { Number::from_i128(integer) } else { Number::from_f64(float) };
    written.unwrap_or_else(|| 0.into())
}
