//! The address of a network card, which wakes its machine (Wake-on-LAN).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The address of a network card: 6 bytes, written as `a4:83:e7:12:34:56`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress([u8; 6]);

/// A text that is not the address of one network card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be six bytes in hexadecimal like a4:83:e7:12:34:56, of one network card")]
pub struct InvalidMac;

impl MacAddress {
    /// Errors: these bytes address a group, or no card.
    pub fn of_bytes(bytes: [u8; 6]) -> Result<MacAddress, InvalidMac> {
        // The lowest bit of the first byte marks the address of a group.
        let is_of_one = bytes[0] & 1 == 0 && bytes != [0; 6];
        if is_of_one { Ok(MacAddress(bytes)) } else { Err(InvalidMac) }
    }

    /// Its bytes, the first one first.
    pub fn to_bytes(self) -> [u8; 6] {
        self.0
    }
}

impl FromStr for MacAddress {
    type Err = InvalidMac;

    /// Parses six pairs of hexadecimal digits between `:` or `-`. Errors: another form, or the address of a group or of no card.
    fn from_str(text: &str) -> Result<MacAddress, InvalidMac> {
        let separator = if text.contains('-') { '-' } else { ':' };
        let mut bytes = [0; 6];
        let mut parts = text.split(separator);
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit()));
            *byte = u8::from_str_radix(part.ok_or(InvalidMac)?, 16).map_err(|_| InvalidMac)?;
        }
        if parts.next().is_some() {
            return Err(InvalidMac);
        }
        MacAddress::of_bytes(bytes)
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl TryFrom<String> for MacAddress {
    type Error = InvalidMac;

    fn try_from(text: String) -> Result<MacAddress, InvalidMac> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(mac: MacAddress) -> String {
        mac.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_six_bytes_of_one_card() {
        for text in ["a4:83:e7:12:34:56", "A4-83-E7-12-34-56"] {
            assert_eq!(text.parse::<MacAddress>().map(|mac| mac.to_string()), Ok("a4:83:e7:12:34:56".to_owned()));
        }
        for text in [
            "",
            "a4:83:e7:12:34",
            "a4:83:e7:12:34:56:78",
            "a4:83:e7:12:34:5",
            "a4:83-e7:12:34:56",
            "a4:83:e7:12:34:5g",
            "+4:83:e7:12:34:56",
            // The loopback's.
            "00:00:00:00:00:00",
            "ff:ff:ff:ff:ff:ff",
            "01:00:5e:00:00:01",
        ] {
            assert_eq!(text.parse::<MacAddress>(), Err(InvalidMac), "{text}");
        }
    }
}
