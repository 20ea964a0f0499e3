//! Why a machine was not paired.

use std::io;
use std::path::PathBuf;

use super::code::MAX_FAILED_ATTEMPTS;

/// Why the first machine refuses a run. Sent as one byte, whose numbers are never used again for something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PairingRefusal {
    /// It speaks another version of the protocol.
    #[error("it speaks another version of pairing: install the same Baton on both machines")]
    Version,
    /// The code's first group is of no code that it shows.
    #[error("it shows another code: compare the first group of digits")]
    Room,
    /// The code is wrong.
    #[error("the code is wrong. Each wrong code counts, and after {MAX_FAILED_ATTEMPTS} the code is void")]
    WrongCode,
    /// Too many wrong codes.
    #[error(
        "the code is void after {MAX_FAILED_ATTEMPTS} failed attempts: run `baton pair` there again for a new code"
    )]
    Void,
    /// The code's time is over.
    #[error("the code has expired: run `baton pair` there again for a new code")]
    Expired,
    /// Other runs could use up the remaining attempts.
    #[error("other machines are being paired: try again in a few seconds")]
    Busy,
    /// A message was malformed, or what was asked for cannot be done; the first machine shows why.
    #[error("pairing failed there; that machine shows why")]
    Failed,
}

impl PairingRefusal {
    pub(crate) fn to_byte(self) -> u8 {
        match self {
            PairingRefusal::Version => 1,
            PairingRefusal::Room => 2,
            PairingRefusal::WrongCode => 3,
            PairingRefusal::Void => 4,
            PairingRefusal::Expired => 5,
            PairingRefusal::Busy => 6,
            PairingRefusal::Failed => 7,
        }
    }

    pub(crate) fn from_byte(byte: u8) -> Option<PairingRefusal> {
        let all = [
            PairingRefusal::Version,
            PairingRefusal::Room,
            PairingRefusal::WrongCode,
            PairingRefusal::Void,
            PairingRefusal::Expired,
            PairingRefusal::Busy,
            PairingRefusal::Failed,
        ];
        all.into_iter().find(|refusal| refusal.to_byte() == byte)
    }
}

/// Why a machine was not paired, for its owner. Never holds a secret.
#[derive(Debug, thiserror::Error)]
pub enum PairingError {
    /// The other machine cannot be reached.
    #[error("no machine that shows a code answers at {address}: {error}")]
    Unreachable { address: String, error: io::Error },
    /// The other machine says no. Nothing proves that the message is its own.
    #[error("the other machine says: {0}")]
    Refused(PairingRefusal),
    /// The other machine sent what no machine that pairs sends.
    #[error("the other side does not speak Baton's pairing: {0}")]
    Protocol(&'static str),
    /// The other machine could not prove that it knows the code.
    #[error("the other machine does not know this code: it shows another one, or somebody answers in its place")]
    Unproven,
    /// The connection broke, or was closed.
    #[error("the connection to the other machine was lost: {0}")]
    Lost(io::Error),
    /// No answer in time.
    #[error("the other machine did not answer in time")]
    Late,
    /// This machine has a cluster.
    #[error(
        "this machine already is in cluster {cluster}: leave it with `baton pair --forget`, or join another one with \
         --replace"
    )]
    AlreadyPaired { cluster: String },
    /// This machine cannot sign certificates.
    #[error(
        "this machine joined the cluster of {admitted_by}, which alone admits machines: run `baton pair` there, or start a \
         new cluster with --replace"
    )]
    NotTheFirst { admitted_by: String },
    /// A key or certificate cannot be made or used.
    #[error("{what} cannot be used: {reason}")]
    Certificate { what: &'static str, reason: String },
    /// A file cannot be read or written.
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
    /// A stored file is damaged.
    #[error("{} is damaged ({reason}): remove the pairing with `baton pair --forget`, and pair again", path.display())]
    Damaged { path: PathBuf, reason: String },
    /// There is no folder for configurations.
    #[error("there is no folder for the pairing: set HOME, XDG_CONFIG_HOME or BATON_CLUSTER_FOLDER")]
    NoFolder,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_survives_the_wire() {
        let known: Vec<PairingRefusal> = (0..=u8::MAX).filter_map(PairingRefusal::from_byte).collect();
        assert_eq!(known.len(), 7);
        assert!(known.iter().all(|&refusal| PairingRefusal::from_byte(refusal.to_byte()) == Some(refusal)));
    }
}
