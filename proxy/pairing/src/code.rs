//! The code that an owner types: `417-3815-9062`.
//!
//! Its first group is a room number, which is public: it tells machines that show codes at the same time apart. The other
//! eight digits are the secret, 10⁸ values or 26.6 bits. With five attempts an attacker's chance is 1 in 20 million.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// How long a code lives.
pub const CODE_LIFETIME: Duration = Duration::from_secs(5 * 60);

/// Failed attempts after which a code is void.
pub const MAX_FAILED_ATTEMPTS: u32 = 5;

/// Number of rooms: three digits.
const N_ROOMS: u16 = 1_000;

/// Number of secrets: eight digits.
const N_SECRETS: u32 = 100_000_000;

/// Digits of a code.
const N_DIGITS: usize = 11;

/// A code: a public room and a secret.
#[derive(Clone, PartialEq, Eq)]
pub struct PairingCode {
    room: u16,
    secret: u32,
}

/// The text is no code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a code has eleven digits, like 417-3815-9062")]
pub struct CodeError;

impl PairingCode {
    /// A new code, each equally likely.
    pub fn random() -> PairingCode {
        use rand::RngExt;
        let mut rng = rand::rng();
        PairingCode { room: rng.random_range(0..N_ROOMS), secret: rng.random_range(0..N_SECRETS) }
    }

    /// The public part, below 1,000.
    pub fn room(&self) -> u16 {
        self.room
    }

    /// The password of the exchange.
    pub(crate) fn secret(&self) -> [u8; 4] {
        self.secret.to_be_bytes()
    }
}

impl FromStr for PairingCode {
    type Err = CodeError;

    /// Takes the digits with or without hyphens and spaces.
    fn from_str(text: &str) -> Result<PairingCode, CodeError> {
        let digits: Option<Vec<u32>> =
            text.chars().filter(|c| !matches!(c, '-' | ' ')).take(N_DIGITS + 1).map(|c| c.to_digit(10)).collect();
        let digits = digits.filter(|digits| digits.len() == N_DIGITS).ok_or(CodeError)?;
        let number = |digits: &[u32]| digits.iter().fold(0, |number, digit| number * 10 + digit);
        let room = u16::try_from(number(&digits[..3])).map_err(|_| CodeError)?;
        Ok(PairingCode { room, secret: number(&digits[3..]) })
    }
}

impl fmt::Display for PairingCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:03}-{:04}-{:04}", self.room, self.secret / 10_000, self.secret % 10_000)
    }
}

/// Only the public part: debug output can end up in logs.
impl fmt::Debug for PairingCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PairingCode({:03}-…)", self.room)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_read_as_it_is_shown() {
        for _ in 0..100 {
            let code = PairingCode::random();
            assert_eq!(code.to_string().parse(), Ok(code.clone()));
            assert_eq!(code.to_string().replace('-', " ").parse(), Ok(code.clone()));
            assert_eq!(code.to_string().replace('-', "").parse(), Ok(code));
        }
        assert_eq!("007-0001-0002".parse(), Ok(PairingCode { room: 7, secret: 10_002 }));
        assert_eq!(PairingCode { room: 7, secret: 10_002 }.to_string(), "007-0001-0002");
    }

    #[test]
    fn what_is_no_code_is_refused() {
        for text in ["", "417", "417-3815-906", "417-3815-90620", "417-3815-906x", "٤17-3815-9062", &"1".repeat(9_999)]
        {
            assert_eq!(text.parse::<PairingCode>(), Err(CodeError), "{text:.20}");
        }
    }

    #[test]
    fn debug_output_hides_the_secret() {
        assert_eq!(format!("{:?}", PairingCode { room: 417, secret: 38_159_062 }), "PairingCode(417-…)");
    }
}
