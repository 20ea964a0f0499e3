//! How long a model stays in memory after its last request, in Ollama's notation: `"5m"`, `300`, `-1`, `0`.

use std::time::Duration;

/// How long a model stays in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepAlive {
    /// Until another model needs the memory.
    Forever,
    /// For this time. Zero: until no request uses it.
    For(Duration),
}

/// Ten years. A longer time counts as forever: a later point in time may not be representable.
const MAX_SECONDS: f64 = 315_360_000.0;

/// The most characters in a duration: more than any sensible one has.
pub(crate) const MAX_CHARS: usize = 64;

impl KeepAlive {
    /// Converts seconds. A negative number means forever. Returns `None` for NaN.
    pub fn of_seconds(seconds: f64) -> Option<KeepAlive> {
        match seconds {
            _ if seconds.is_nan() => None,
            0.0..=MAX_SECONDS => Some(KeepAlive::For(Duration::from_secs_f64(seconds))),
            _ => Some(KeepAlive::Forever),
        }
    }

    /// Parses a Go duration (`5m`, `1h30m`, `0.5s`, `-1s`) or a number of seconds. Returns `None` if it is neither.
    pub fn parse(text: &str) -> Option<KeepAlive> {
        if text.chars().count() > MAX_CHARS {
            return None;
        }
        let (is_negative, rest) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let seconds = seconds(rest)?;
        KeepAlive::of_seconds(if is_negative && seconds > 0.0 { -seconds } else { seconds })
    }

    /// Returns the longer of two times.
    pub fn longer(self, other: KeepAlive) -> KeepAlive {
        match (self, other) {
            (KeepAlive::For(one), KeepAlive::For(two)) => KeepAlive::For(one.max(two)),
            _ => KeepAlive::Forever,
        }
    }

    /// Returns the shorter of two times.
    pub fn shorter(self, other: KeepAlive) -> KeepAlive {
        if self.longer(other) == self { other } else { self }
    }

    /// Returns true if the model may be unloaded at once.
    pub fn is_nothing(self) -> bool {
        self == KeepAlive::For(Duration::ZERO)
    }
}

/// Parses numbers with units, one after the other, or one number without a unit. Returns seconds.
fn seconds(text: &str) -> Option<f64> {
    let number = |digits: &str| {
        let is_number = digits.chars().any(|c| c.is_ascii_digit()) && digits.chars().filter(|c| *c == '.').count() <= 1;
        digits.parse::<f64>().ok().filter(|_| is_number)
    };
    let is_digit = |c: char| c.is_ascii_digit() || c == '.';
    if !text.is_empty() && text.chars().all(is_digit) {
        return number(text);
    }
    let mut rest = text;
    let mut sum = None;
    while !rest.is_empty() {
        let (digits, after) = rest.split_at(rest.find(|c| !is_digit(c))?);
        let (unit, after) = after.split_at(after.find(is_digit).unwrap_or(after.len()));
        let factor = match unit {
            "h" => 3_600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" | "μs" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        sum = Some(sum.unwrap_or(0.0) + number(digits)? * factor);
        rest = after;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Option<f64>) {
        assert_eq!(KeepAlive::parse(text), expected.and_then(KeepAlive::of_seconds), "{text:?}");
    }

    #[test]
    fn durations_are_read_as_go_reads_them() {
        check("5m", Some(300.0));
        check("1h30m", Some(5_400.0));
        check("0.5s", Some(0.5));
        check("1.5h", Some(5_400.0));
        check("250ms", Some(0.25));
        check("+2s", Some(2.0));
        check("300", Some(300.0));
        check(".5s", Some(0.5));
        for zero in ["0", "0s", "0m0s", "-0"] {
            assert!(KeepAlive::parse(zero).is_some_and(KeepAlive::is_nothing), "{zero}");
        }
        for forever in ["-1", "-1s", "-5m", "999999h"] {
            assert_eq!(KeepAlive::parse(forever), Some(KeepAlive::Forever), "{forever}");
        }
    }

    #[test]
    fn what_is_no_duration_is_refused() {
        for wrong in ["", "-", "m", "5x", "5m3", "1.2.3s", ".s", "five", "5 m", "1e3s", "∞", "nan", "5mm", "."] {
            check(wrong, None);
        }
        check(&"1s".repeat(64), None);
        assert_eq!(KeepAlive::of_seconds(f64::NAN), None);
        assert_eq!(KeepAlive::of_seconds(f64::INFINITY), Some(KeepAlive::Forever));
    }
}
