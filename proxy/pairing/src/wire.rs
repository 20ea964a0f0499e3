//! Messages of pairing, on a TCP connection of their own.
//!
//! ```text
//! frame    kind u8 | length u16, big-endian | payload
//!
//! kind  sender  payload
//! 1     joiner  "baton-pair" | version u8 | room u16 | length of name u8 | name | SPAKE2 message, 33 bytes
//! 2     first   length of name u8 | name | SPAKE2 message, 33 bytes
//! 3     joiner  proof that it knows the code, 32 bytes
//! 4     first   proof that it knows the code, 32 bytes
//! 5     joiner  sealed JSON: its public key, and a signature with it
//! 6     first   sealed JSON: the cluster key and certificates
//! 7     joiner  sealed: everything is stored. Empty, or the 6 bytes of the address of its network card
//! 8     first   reason u8: the run is refused
//! ```
//!
//! Nothing secret is sent before both proofs are checked. "Sealed" is ChaCha20-Poly1305 under keys of this run. A length
//! is checked against the kind's limit before anything is allocated.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::error::{PairingError, PairingRefusal};
use super::membership::{MAX_NAME_BYTES, MachineName};

/// The version of the messages and of how keys are derived. Part of the transcript.
pub(crate) const VERSION: u8 = 1;

const MAGIC: &[u8; 10] = b"baton-pair";

/// A side byte and a compressed point of edwards25519.
pub(crate) const PAKE_BYTES: usize = 33;

/// A keyed BLAKE3 hash.
pub(crate) const PROOF_BYTES: usize = 32;

/// What the message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Hello,
    Answer,
    JoinerProof,
    FirstProof,
    Request,
    Grant,
    Stored,
    Refusal,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::Hello,
        Kind::Answer,
        Kind::JoinerProof,
        Kind::FirstProof,
        Kind::Request,
        Kind::Grant,
        Kind::Stored,
        Kind::Refusal,
    ];

    pub(crate) fn to_byte(self) -> u8 {
        match self {
            Kind::Hello => 1,
            Kind::Answer => 2,
            Kind::JoinerProof => 3,
            Kind::FirstProof => 4,
            Kind::Request => 5,
            Kind::Grant => 6,
            Kind::Stored => 7,
            Kind::Refusal => 8,
        }
    }

    /// The longest payload, in bytes.
    fn max_bytes(self) -> usize {
        match self {
            // A later version's may be longer, and must still be told that the versions differ.
            Kind::Hello => 512,
            Kind::Answer => 1 + MAX_NAME_BYTES + PAKE_BYTES,
            Kind::JoinerProof | Kind::FirstProof => PROOF_BYTES,
            Kind::Request => 1_024,
            // Two certificates of some 600 bytes in PEM.
            Kind::Grant => 8_192,
            Kind::Stored => 64,
            Kind::Refusal => 1,
        }
    }
}

/// The first message of a joiner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) room: u16,
    pub(crate) name: MachineName,
    pub(crate) pake: [u8; PAKE_BYTES],
}

/// The first machine's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) name: MachineName,
    pub(crate) pake: [u8; PAKE_BYTES],
}

impl Hello {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = [&MAGIC[..], &[VERSION], &self.room.to_be_bytes()].concat();
        push_name_and_pake(&mut bytes, &self.name, &self.pake);
        bytes
    }

    /// Errors: the refusal to answer with, or `None` if whoever sent it does not pair at all.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Hello, Option<PairingRefusal>> {
        let rest = bytes.strip_prefix(&MAGIC[..]).ok_or(None)?;
        let (&version, rest) = rest.split_first().ok_or(None)?;
        if version != VERSION {
            return Err(Some(PairingRefusal::Version));
        }
        let (room, rest) = rest.split_first_chunk::<2>().ok_or(None)?;
        let (name, pake) = name_and_pake(rest).ok_or(None)?;
        Ok(Hello { room: u16::from_be_bytes(*room), name, pake })
    }
}

impl Answer {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        push_name_and_pake(&mut bytes, &self.name, &self.pake);
        bytes
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Answer, PairingError> {
        let (name, pake) = name_and_pake(bytes).ok_or(PairingError::Protocol("its answer is malformed"))?;
        Ok(Answer { name, pake })
    }
}

fn push_name_and_pake(bytes: &mut Vec<u8>, name: &MachineName, pake: &[u8; PAKE_BYTES]) {
    let name = name.as_str().as_bytes();
    // A name has at most 63 bytes.
    bytes.push(name.len() as u8);
    bytes.extend_from_slice(name);
    bytes.extend_from_slice(pake);
}

fn name_and_pake(bytes: &[u8]) -> Option<(MachineName, [u8; PAKE_BYTES])> {
    let (&n, rest) = bytes.split_first()?;
    let (name, pake) = rest.split_at_checked(usize::from(n))?;
    let name = MachineName::parse(std::str::from_utf8(name).ok()?)?;
    Some((name, pake.try_into().ok()?))
}

/// Sends one message.
pub(crate) async fn send(
    connection: &mut (impl AsyncWrite + Unpin),
    kind: Kind,
    payload: &[u8],
) -> Result<(), PairingError> {
    let fits = payload.len() <= kind.max_bytes();
    let n =
        u16::try_from(payload.len()).ok().filter(|_| fits).ok_or(PairingError::Protocol("a message is too long"))?;
    // One write, so that the messages of a run are one packet each.
    let frame = [&[kind.to_byte()][..], &n.to_be_bytes(), payload].concat();
    connection.write_all(&frame).await.map_err(PairingError::Lost)?;
    connection.flush().await.map_err(PairingError::Lost)
}

/// Receives the next message, which must be of this kind. Errors: another kind, a refusal, or too long.
pub(crate) async fn receive(
    connection: &mut (impl AsyncRead + Unpin),
    expected: Kind,
) -> Result<Vec<u8>, PairingError> {
    let mut head = [0; 3];
    connection.read_exact(&mut head).await.map_err(PairingError::Lost)?;
    let kind = Kind::ALL.into_iter().find(|kind| kind.to_byte() == head[0]);
    let kind = kind.ok_or(PairingError::Protocol("an unknown message"))?;
    let n = usize::from(u16::from_be_bytes([head[1], head[2]]));
    if n > kind.max_bytes() {
        return Err(PairingError::Protocol("a message is too long"));
    }
    if kind != expected && kind != Kind::Refusal {
        return Err(PairingError::Protocol("a message out of turn"));
    }
    let mut payload = vec![0; n];
    connection.read_exact(&mut payload).await.map_err(PairingError::Lost)?;
    if kind == Kind::Refusal && expected != Kind::Refusal {
        let refusal = payload.first().copied().and_then(PairingRefusal::from_byte);
        return Err(refusal.map_or(PairingError::Protocol("an unknown refusal"), PairingError::Refused));
    }
    Ok(payload)
}

/// A message of a fixed length.
pub(crate) fn exactly<const N: usize>(payload: Vec<u8>) -> Result<[u8; N], PairingError> {
    payload.try_into().map_err(|_| PairingError::Protocol("a message of a wrong length"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Hello {
        Hello { room: 417, name: MachineName::parse("spark-2").unwrap(), pake: [7; PAKE_BYTES] }
    }

    #[test]
    fn a_hello_is_read_as_it_was_written() {
        assert_eq!(Hello::parse(&hello().to_bytes()), Ok(hello()));
        let answer = Answer { name: hello().name, pake: [9; PAKE_BYTES] };
        assert_eq!(Answer::parse(&answer.to_bytes()).unwrap(), answer);
    }

    #[test]
    fn a_cut_long_or_foreign_hello_is_refused() {
        let bytes = hello().to_bytes();
        for n in 0..bytes.len() {
            assert_eq!(Hello::parse(&bytes[..n]), Err(None), "{n}");
            assert!(Answer::parse(&bytes[..n]).is_err());
        }
        assert_eq!(Hello::parse(&[&bytes[..], &[0]].concat()), Err(None));
        assert_eq!(Hello::parse(b"GET / HTTP/1.1\r\nHost: spark.local\r\n\r\n"), Err(None));
        let mut other = bytes.clone();
        other[MAGIC.len()] = VERSION + 1;
        assert_eq!(Hello::parse(&other), Err(Some(PairingRefusal::Version)));
        // A name that would move a terminal's cursor.
        let mut escape = bytes;
        escape[14] = 0x1b;
        assert_eq!(Hello::parse(&escape), Err(None));
    }

    proptest! {
        #[test]
        fn what_is_read_is_written_alike(rest in prop::collection::vec(any::<u8>(), 0..120), n_name in 0..70_u8) {
            // Likely to be whole: a name of its length, and a SPAKE2 message of any bytes.
            let name = vec![b'a'; usize::from(n_name)];
            for rest in [rest.clone(), [&[n_name][..], &name, &rest[..rest.len().min(PAKE_BYTES)]].concat()] {
                let bytes = [&MAGIC[..], &[VERSION, 1, 2], &rest].concat();
                if let Ok(hello) = Hello::parse(&bytes) {
                    prop_assert_eq!(hello.to_bytes(), bytes);
                }
                if let Ok(answer) = Answer::parse(&rest) {
                    prop_assert_eq!(answer.to_bytes(), rest);
                }
            }
        }
    }

    #[tokio::test]
    async fn a_message_is_refused_by_its_head_alone() {
        let check = async |sent: &[u8], expected: &str| {
            // Only the head arrives: the refusal waits for nothing more, and allocates nothing.
            let error = receive(&mut &sent[..], Kind::Answer).await.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(&[99, 0, 1], "unknown message").await;
        check(&[Kind::Answer.to_byte(), 0xff, 0xff], "too long").await;
        check(&[Kind::Grant.to_byte(), 0, 4], "out of turn").await;
        check(&[Kind::Answer.to_byte(), 0, 4, 1, 2], "lost").await;
        check(&[Kind::Refusal.to_byte(), 0, 1, 4], "void").await;
        check(&[Kind::Refusal.to_byte(), 0, 1, 0], "unknown refusal").await;
        check(&[Kind::Refusal.to_byte(), 0, 0], "unknown refusal").await;
        check(&[], "lost").await;
    }
}
