//! Numbers in schemas, as engines hold them: with 64-bit floats, patterns of digits, and integers of 64 bits.

use serde_json::{Map, Number, Value};

/// The largest bound of numbers that engines hold, which is a pattern of digits.
const MAX_BOUND: f64 = 1e18;
const TWO_TO_63: f64 = 9_223_372_036_854_775_808.0;
/// The smallest bound but 0 that engines hold: its digits become a pattern.
const LEAST_BOUND: f64 = 1e-30;
/// The largest integer from which on a 64-bit float stands for several.
pub(super) const EXACT: f64 = 9_007_199_254_740_992.0;

/// A bound of numbers as engines hold it.
pub(super) fn float_bound(bound: &Number) -> Option<Number> {
    let size = bound.as_f64()?.abs();
    (size <= MAX_BOUND && (size == 0.0 || size >= LEAST_BOUND)).then(|| bound.clone())
}

/// A bound of integers as engines hold it: as a 64-bit float, which becomes an `i64`. A bound that is no float becomes the next
/// one that allows less. `None`: it does not fit, or is a lower one of 19 digits, of which engines cannot count up.
pub(super) fn integer_bound(key: &str, bound: &Number) -> Option<Number> {
    let float = bound.as_f64()?;
    if float.abs() < EXACT {
        return Some(bound.clone());
    }
    let is_lower = matches!(key, "minimum" | "exclusiveMinimum");
    // The lower bound is the upper one of the opposite numbers.
    let sign = if is_lower { -1.0 } else { 1.0 };
    let whole = integer(bound).unwrap_or(float as i128);
    i64::try_from(whole).ok()?;
    let most = whole * sign as i128 - i128::from(key.starts_with("exclusive"));
    if most == i128::from(i64::MAX) && !is_lower {
        // 2^63, which becomes the largest `i64`.
        return Number::from_f64(most as f64);
    }
    let nearest = most.min(i128::from(i64::MAX)) as f64;
    let inside = if nearest as i128 > most || nearest >= TWO_TO_63 { nearest.next_down() } else { nearest };
    if inside <= -MAX_BOUND { None } else { Number::from_f64(inside * sign) }
}

/// Returns true for numbers that engines can count in.
pub(super) fn is_held_step(mut step: f64) -> bool {
    while step.fract() != 0.0 && step.is_finite() {
        step *= 10.0;
    }
    step > 0.0 && step <= f64::from(u32::MAX)
}

/// Returns true if a value has a number of which a 64-bit float is only the nearest.
pub(super) fn has_inexact(value: &Value) -> bool {
    match value {
        Value::Number(number) => is_inexact(number),
        Value::Array(items) => items.iter().any(has_inexact),
        Value::Object(fields) => fields.values().any(has_inexact),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}

/// The integer that a number was written as, if it has at most 64 bits.
fn integer(number: &Number) -> Option<i128> {
    number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from))
}

fn is_inexact(number: &Number) -> bool {
    match (integer(number), number.as_f64()) {
        (Some(integer), Some(float)) => float as i128 != integer || float.abs() >= MAX_BOUND,
        (None, Some(float)) => float.abs() >= EXACT && float.fract() == 0.0,
        _ => true,
    }
}

/// Holds a text near a number that cannot be held exactly: to an integer of the same size, if it is one.
pub(super) fn near(fields: &mut Map<String, Value>, number: &Value) {
    if !number.is_number() || fields.contains_key("type") {
        return;
    }
    fields.insert("type".to_owned(), "integer".into());
    if let Some(float) = number.as_f64().filter(|float| float.abs() < MAX_BOUND) {
        fields.insert("minimum".to_owned(), float.next_down().into());
        fields.insert("maximum".to_owned(), float.next_up().into());
    }
}
