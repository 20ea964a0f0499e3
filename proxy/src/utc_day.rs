//! A day in UTC: the unit of usage, budgets and expiry.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::civil::Date;
use jiff::tz::Offset;

const SECONDS_A_DAY: i64 = 86_400;

/// A day in UTC, from 1970 on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UtcDay(Date);

impl UtcDay {
    /// The day of this time. A clock before 1970 counts as 1970.
    pub fn of(time: SystemTime) -> UtcDay {
        UtcDay::at(time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64))
    }

    /// The day with this [`number`](Self::number). What is before 1970 or beyond the calendar counts as its first or last day.
    pub fn of_number(number: i64) -> UtcDay {
        UtcDay::at(number.max(0).saturating_mul(SECONDS_A_DAY))
    }

    fn at(seconds: i64) -> UtcDay {
        let timestamp = jiff::Timestamp::from_second(seconds).unwrap_or(jiff::Timestamp::MAX);
        UtcDay(Offset::UTC.to_datetime(timestamp).date())
    }

    /// Today.
    pub fn today() -> UtcDay {
        UtcDay::of(SystemTime::now())
    }

    /// The number of days since 1970-01-01.
    pub fn number(self) -> i64 {
        self.starts_at() / SECONDS_A_DAY
    }

    /// The day so many days earlier.
    pub fn days_before(self, n: u32) -> UtcDay {
        UtcDay(self.0.saturating_sub(jiff::Span::new().days(i64::from(n))))
    }

    /// The day so many days later.
    pub fn days_after(self, n: u32) -> UtcDay {
        UtcDay(self.0.saturating_add(jiff::Span::new().days(i64::from(n))))
    }

    /// The day after this one.
    pub fn next(self) -> UtcDay {
        UtcDay(self.0.tomorrow().unwrap_or(Date::MAX))
    }

    /// The first day of its month.
    pub fn first_of_month(self) -> UtcDay {
        UtcDay(self.0.first_of_month())
    }

    /// The first day of the month after its own.
    pub fn first_of_next_month(self) -> UtcDay {
        UtcDay(self.0.last_of_month()).next()
    }

    /// From a time until the day begins; zero afterwards.
    pub fn begins_after(self, now: SystemTime) -> Duration {
        let begins = UNIX_EPOCH + Duration::from_secs(self.starts_at().max(0) as u64);
        begins.duration_since(now).unwrap_or_default()
    }

    /// Its first second, since the Unix epoch.
    fn starts_at(self) -> i64 {
        Offset::UTC.to_timestamp(self.0.at(0, 0, 0, 0)).map_or(i64::MAX, jiff::Timestamp::as_second)
    }
}

/// `2026-12-31`.
impl fmt::Display for UtcDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A text that is no day from 1970 on, written as `2026-12-31`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoDay;

impl FromStr for UtcDay {
    type Err = NoDay;

    fn from_str(text: &str) -> Result<UtcDay, NoDay> {
        let is_plain = text.len() == 10 && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-');
        let date = text.parse::<Date>().ok().filter(|date| is_plain && date.year() >= 1970);
        date.map(UtcDay).ok_or(NoDay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn day(text: &str) -> UtcDay {
        text.parse().unwrap()
    }

    #[test]
    fn days_are_counted_in_utc_and_months_end_where_the_calendar_says() {
        let time = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!((UtcDay::of(time(0)).to_string(), UtcDay::of(time(0)).number()), ("1970-01-01".into(), 0));
        let last = day("2024-02-29");
        assert_eq!(UtcDay::of(time(1_709_251_199)), last);
        assert_eq!(UtcDay::of(time(1_709_251_200)), day("2024-03-01"));
        assert_eq!(last.number() + 1, last.next().number());
        assert_eq!((last.first_of_month(), last.first_of_next_month()), (day("2024-02-01"), day("2024-03-01")));
        assert_eq!(day("2026-12-31").first_of_next_month(), day("2027-01-01"));
        assert_eq!(day("2026-01-03").days_before(3), day("2025-12-31"));
        assert_eq!((UtcDay::of_number(last.number()), UtcDay::of_number(-1)), (last, UtcDay::of(time(0))));
        assert!(UtcDay::of_number(i64::MAX) > day("9999-12-01"));
        assert_eq!(last.next().begins_after(time(1_709_251_190)), Duration::from_secs(10));
        assert_eq!(last.begins_after(time(1_709_251_190)), Duration::ZERO);
        for wrong in ["2026-13-01", "2026-02-30", "2026-1-1", "1969-12-31", "2026-01-01T00:00:00Z", "20260101", ""] {
            assert_eq!(wrong.parse::<UtcDay>(), Err(NoDay), "{wrong}");
        }
    }
}
