//! The MACs that can seal a handoff's records.

use aegis::aegis128x2::Aegis128X2Mac;
use serde::{Deserialize, Serialize};

/// The number of bytes of a record after its payload.
pub const MAC_BYTES: usize = 32;

/// The MAC of a handoff's records. The reader offers some, the writer chooses, and the head says which one follows it.
/// The head itself always has [`Mac::Blake3`]. The numbers are part of the wire format and never reused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Mac {
    /// Keyed BLAKE3. Fast on every processor with vector instructions.
    #[default]
    Blake3 = 0,
    /// The MAC of AEGIS-128X2 with a tag of 256 bits (RFC 10032). Several times faster where the processor has
    /// instructions for AES, much slower elsewhere.
    Aegis128x2 = 1,
}

impl Mac {
    /// Every MAC.
    pub const ALL: [Mac; 2] = [Mac::Blake3, Mac::Aegis128x2];

    /// Returns the MACs for a reader on this machine, best first.
    pub fn best_first() -> &'static [Mac] {
        if has_aes() { &[Mac::Aegis128x2, Mac::Blake3] } else { &[Mac::Blake3] }
    }

    /// Returns the MAC for a writer on this machine: the first of a reader's list that is fast here. `offered` has wire
    /// numbers. Readers of earlier versions offer none; every reader accepts BLAKE3.
    pub fn choose(offered: &[u8]) -> Mac {
        let is_fast = |mac: &Mac| Mac::best_first().contains(mac);
        offered.iter().filter_map(|&number| Mac::from_number(number)).find(is_fast).unwrap_or_default()
    }

    /// Returns the MAC with this wire number.
    pub fn from_number(number: u8) -> Option<Mac> {
        Mac::ALL.into_iter().find(|mac| *mac as u8 == number)
    }

    /// Returns true for the MAC of heads that name none.
    pub(super) fn is_default(&self) -> bool {
        *self == Mac::default()
    }
}

/// Returns true if the processor has instructions for AES.
fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}

/// The computation of one record's MAC.
pub(super) enum RecordMac {
    Blake3(Box<blake3::Hasher>),
    Aegis128x2(Box<Aegis128X2Mac<MAC_BYTES>>),
}

impl RecordMac {
    /// Adds the record's next bytes.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            RecordMac::Blake3(hasher) => _ = hasher.update(bytes),
            RecordMac::Aegis128x2(state) => state.update(bytes),
        }
    }

    /// Returns the MAC of all bytes.
    pub(super) fn finish(self) -> [u8; MAC_BYTES] {
        match self {
            RecordMac::Blake3(hasher) => *hasher.finalize().as_bytes(),
            RecordMac::Aegis128x2(state) => state.finalize(),
        }
    }

    /// Returns true if `mac` is the MAC of all bytes. Takes constant time.
    pub(super) fn is(self, mac: &[u8; MAC_BYTES]) -> bool {
        match self {
            RecordMac::Blake3(hasher) => hasher.finalize() == blake3::Hash::from_bytes(*mac),
            RecordMac::Aegis128x2(state) => state.verify(mac).is_ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_takes_the_first_offered_mac_that_it_knows_and_computes_fast() {
        let fast_here = Mac::best_first()[0];
        assert_eq!(Mac::choose(&[1, 0]), fast_here);
        assert_eq!(Mac::choose(&[200, 1, 0]), fast_here);
        assert_eq!(Mac::choose(&[0, 1]), Mac::Blake3);
        assert_eq!(Mac::choose(&[200]), Mac::Blake3);
        assert_eq!(Mac::choose(&[]), Mac::Blake3, "a reader of an earlier version");
    }

    #[test]
    fn macs_keep_their_numbers() {
        assert_eq!(Mac::ALL.map(|mac| mac as u8), [0, 1]);
        assert_eq!(Mac::from_number(2), None);
        assert_eq!(serde_json::to_value(Mac::ALL).unwrap(), serde_json::json!(["blake3", "aegis128x2"]));
    }
}
