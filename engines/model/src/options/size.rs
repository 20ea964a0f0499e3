//! Sizes with units.

use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const UNITS: [(&str, f64); 9] = [
    ("KiB", 1024.0),
    ("MiB", 1048576.0),
    ("GiB", 1073741824.0),
    ("TiB", 1099511627776.0),
    ("kB", 1e3),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
];

/// A size as written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(extend("x-expected" = WrittenSize::EXPECTED))]
pub enum WrittenSize {
    /// Bytes.
    Number(u64),
    /// With a unit, or digits alone.
    Text(String),
}

impl WrittenSize {
    /// Completes "must be …".
    pub const EXPECTED: &str = "a number of bytes, or a size like \"24GiB\" or \"500MB\"";

    /// Bytes. `None` if it is no size.
    pub fn bytes(&self) -> Option<u64> {
        let text = match self {
            WrittenSize::Number(bytes) => return Some(*bytes),
            WrittenSize::Text(text) => text.trim(),
        };
        let (number, unit) =
            text.split_at(text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len()));
        if unit.is_empty() {
            return number.parse().ok();
        }
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit.trim())?;
        let bytes = number.parse::<f64>().ok()? * factor;
        (0.0..9e18).contains(&bytes).then_some(bytes as u64)
    }
}

impl FromStr for WrittenSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let size = WrittenSize::Text(text.to_owned());
        size.bytes().map(|_| size).ok_or_else(|| format!("must be {}", Self::EXPECTED))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit_or_are_bytes() {
        let check = |text: &str, bytes: Option<u64>| {
            assert_eq!(WrittenSize::Text(text.to_owned()).bytes(), bytes, "{text:?}");
        };
        check("24GiB", Some(24 << 30));
        check(" 1.5 MB ", Some(1_500_000));
        check("0", Some(0));
        check("4096", Some(4096));
        for wrong in ["", "GiB", "1 GIB", "-1GiB", "1.5", "1e9", "99999999TiB", "18446744073709551616"] {
            check(wrong, None);
        }
    }
}
