//! The exchange that turns the code into keys of one run: SPAKE2, then proofs by both sides, then sealed messages.
//!
//! Roles, the protocol's version, the room, both machines' names and both SPAKE2 messages are in the transcript. So a
//! message of another run, another role or another version fits nowhere. The joiner proves first: only the first machine's
//! proof tells a guesser whether a code is right, and it is sent only to those who know the code. Pure: no I/O.

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use spake2::{Ed25519Group, Identity, Password, Spake2};

use super::code::PairingCode;
use super::error::PairingError;
use super::membership::MachineName;
use super::wire::{Answer, Hello, Kind, PAKE_BYTES, PROOF_BYTES, VERSION};

/// Contexts of BLAKE3's key derivation. Each names this use alone.
const TRANSCRIPT: &str = "baton 2026-11-25 pairing v1 transcript";
const JOINER_PROOF: &str = "baton 2026-11-25 pairing v1 joiner's proof";
const FIRST_PROOF: &str = "baton 2026-11-25 pairing v1 first machine's proof";
const JOINER_SEALS: &str = "baton 2026-11-25 pairing v1 joiner seals";
const FIRST_SEALS: &str = "baton 2026-11-25 pairing v1 first machine seals";

/// SPAKE2's identities. The names are in the transcript.
const JOINER: &[u8] = b"baton pairing v1 joiner";
const FIRST: &[u8] = b"baton pairing v1 first machine";

/// A joiner that has said hello.
pub(crate) struct StartedJoiner {
    state: Spake2<Ed25519Group>,
    hello: Hello,
}

impl StartedJoiner {
    pub(crate) fn new(code: &PairingCode, name: MachineName) -> Result<(StartedJoiner, Hello), PairingError> {
        let password = Password::new(code.secret());
        let (state, pake) = Spake2::start_a(&password, &Identity::new(JOINER), &Identity::new(FIRST));
        let hello = Hello { room: code.room(), name, pake: of_length(pake)? };
        Ok((StartedJoiner { state, hello: hello.clone() }, hello))
    }

    pub(crate) fn finish(self, answer: &Answer) -> Result<RunKeys, PairingError> {
        let shared = self.state.finish(&answer.pake);
        RunKeys::derive(shared, &self.hello, answer)
    }
}

/// The first machine's part: answers a hello, and has the keys.
pub(crate) fn answer(code: &PairingCode, hello: &Hello, name: MachineName) -> Result<(RunKeys, Answer), PairingError> {
    let password = Password::new(code.secret());
    let (state, pake) = Spake2::<Ed25519Group>::start_b(&password, &Identity::new(JOINER), &Identity::new(FIRST));
    let answer = Answer { name, pake: of_length(pake)? };
    let keys = RunKeys::derive(state.finish(&hello.pake), hello, &answer)?;
    Ok((keys, answer))
}

fn of_length(pake: Vec<u8>) -> Result<[u8; PAKE_BYTES], PairingError> {
    pake.try_into().map_err(|_| PairingError::Protocol("a SPAKE2 message of a wrong length"))
}

/// The keys of one run. Both sides have the same only if both used the same code.
pub(crate) struct RunKeys {
    transcript: [u8; 32],
    joiner_proof: [u8; PROOF_BYTES],
    first_proof: [u8; PROOF_BYTES],
    joiner_seals: LessSafeKey,
    first_seals: LessSafeKey,
}

impl RunKeys {
    fn derive(shared: Result<Vec<u8>, spake2::Error>, hello: &Hello, answer: &Answer) -> Result<RunKeys, PairingError> {
        let shared = shared.map_err(|_| PairingError::Protocol("a SPAKE2 message that is no point"))?;
        let mut transcript = blake3::Hasher::new_derive_key(TRANSCRIPT);
        transcript.update(&[VERSION]).update(&hello.room.to_be_bytes());
        for part in [hello.name.as_str().as_bytes(), answer.name.as_str().as_bytes(), &hello.pake, &answer.pake] {
            // With its length, so that no bytes can move from one part to the next.
            transcript.update(&(part.len() as u64).to_be_bytes()).update(part);
        }
        let transcript = *transcript.finalize().as_bytes();
        let key = |context| {
            let mut hasher = blake3::Hasher::new_derive_key(context);
            *hasher.update(&shared).update(&transcript).finalize().as_bytes()
        };
        let proof = |context| *blake3::keyed_hash(&key(context), &transcript).as_bytes();
        let seals = |context| match UnboundKey::new(&CHACHA20_POLY1305, &key(context)) {
            Ok(key) => Ok(LessSafeKey::new(key)),
            Err(_) => Err(PairingError::Protocol("no key for ChaCha20-Poly1305")),
        };
        Ok(RunKeys {
            transcript,
            joiner_proof: proof(JOINER_PROOF),
            first_proof: proof(FIRST_PROOF),
            joiner_seals: seals(JOINER_SEALS)?,
            first_seals: seals(FIRST_SEALS)?,
        })
    }

    /// The hash of everything that both sides have said before their proofs.
    pub(crate) fn transcript(&self) -> &[u8; 32] {
        &self.transcript
    }

    /// The joiner's proof that it knows the code.
    pub(crate) fn joiner_proof(&self) -> &[u8; PROOF_BYTES] {
        &self.joiner_proof
    }

    pub(crate) fn first_proof(&self) -> &[u8; PROOF_BYTES] {
        &self.first_proof
    }

    pub(crate) fn is_joiner_proof(&self, proof: [u8; PROOF_BYTES]) -> bool {
        is_equal(proof, self.joiner_proof)
    }

    pub(crate) fn is_first_proof(&self, proof: [u8; PROOF_BYTES]) -> bool {
        is_equal(proof, self.first_proof)
    }

    /// Encrypts the one message of this kind in a run.
    pub(crate) fn seal(&self, kind: Kind, mut message: Vec<u8>) -> Result<Vec<u8>, PairingError> {
        let sealed = self.key(kind).seal_in_place_append_tag(nonce(kind), Aad::from(&self.transcript), &mut message);
        sealed.map_err(|_| PairingError::Protocol("a message cannot be sealed"))?;
        Ok(message)
    }

    /// Decrypts the message of this kind. Errors: it was not sealed in this run, or was changed.
    pub(crate) fn open(&self, kind: Kind, mut sealed: Vec<u8>) -> Result<Vec<u8>, PairingError> {
        let opened = self.key(kind).open_in_place(nonce(kind), Aad::from(&self.transcript), &mut sealed);
        let n = opened.map_err(|_| PairingError::Protocol("a sealed message was changed on the way"))?.len();
        sealed.truncate(n);
        Ok(sealed)
    }

    /// Each direction has its own key.
    fn key(&self, kind: Kind) -> &LessSafeKey {
        match kind {
            Kind::Grant => &self.first_seals,
            _ => &self.joiner_seals,
        }
    }
}

/// Each kind is sent once in a run, and a run's keys are never used again, so the kind is nonce enough.
fn nonce(kind: Kind) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[0] = kind.to_byte();
    Nonce::assume_unique_for_key(nonce)
}

/// In constant time, as [`blake3::Hash`] compares.
fn is_equal(a: [u8; PROOF_BYTES], b: [u8; PROOF_BYTES]) -> bool {
    blake3::Hash::from_bytes(a) == blake3::Hash::from_bytes(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> MachineName {
        MachineName::parse(text).unwrap()
    }

    fn code(text: &str) -> PairingCode {
        text.parse().unwrap()
    }

    /// The keys of both sides, after changes to the hello and to the answer on their way.
    fn run(
        codes: [&str; 2],
        change_hello: impl FnOnce(&mut Hello),
        change_answer: impl FnOnce(&mut Answer),
    ) -> [RunKeys; 2] {
        let (joiner, mut hello) = StartedJoiner::new(&code(codes[0]), name("b")).unwrap();
        change_hello(&mut hello);
        let (first, mut answer) = answer(&code(codes[1]), &hello, name("a")).unwrap();
        change_answer(&mut answer);
        [joiner.finish(&answer).unwrap(), first]
    }

    const CODE: &str = "417-3815-9062";

    fn agree([joiner, first]: &[RunKeys; 2]) -> bool {
        let proofs = first.is_joiner_proof(*joiner.joiner_proof());
        assert_eq!(proofs, joiner.is_first_proof(*first.first_proof()));
        proofs
    }

    #[test]
    fn the_same_code_gives_the_same_keys() {
        let keys = run([CODE, CODE], |_| (), |_| ());
        assert!(agree(&keys));
        let [joiner, first] = keys;
        let sealed = joiner.seal(Kind::Request, b"hello".to_vec()).unwrap();
        assert_eq!(first.open(Kind::Request, sealed).unwrap(), b"hello");
        let sealed = first.seal(Kind::Grant, b"secret".to_vec()).unwrap();
        assert!(!sealed.windows(6).any(|window| window == b"secret"));
        assert_eq!(joiner.open(Kind::Grant, sealed).unwrap(), b"secret");
    }

    #[test]
    fn another_code_gives_other_keys() {
        let keys = run([CODE, "417-3815-9063"], |_| (), |_| ());
        assert!(!agree(&keys));
        let sealed = keys[0].seal(Kind::Request, b"hello".to_vec()).unwrap();
        assert!(keys[1].open(Kind::Request, sealed).is_err());
    }

    #[test]
    fn whoever_changes_a_name_or_a_room_is_noticed() {
        assert!(!agree(&run([CODE, CODE], |hello| hello.name = name("mallory"), |_| ())));
        assert!(!agree(&run([CODE, CODE], |_| (), |answer| answer.name = name("mallory"))));
        assert!(!agree(&run([CODE, CODE], |hello| hello.room = 418, |_| ())));
    }

    #[test]
    fn a_side_does_not_prove_itself_with_the_others_proof() {
        let [joiner, first] = run([CODE, CODE], |_| (), |_| ());
        assert!(!joiner.is_first_proof(*joiner.joiner_proof()));
        assert!(!first.is_joiner_proof(*first.first_proof()));
        let mut tampered = *first.first_proof();
        tampered[31] ^= 1;
        assert!(!joiner.is_first_proof(tampered));
    }

    #[test]
    fn messages_of_another_run_fit_nowhere() {
        let [old_joiner, old_first] = run([CODE, CODE], |_| (), |_| ());
        let [joiner, first] = run([CODE, CODE], |_| (), |_| ());
        assert!(!first.is_joiner_proof(*old_joiner.joiner_proof()));
        let replayed = old_first.seal(Kind::Grant, b"secret".to_vec()).unwrap();
        assert!(joiner.open(Kind::Grant, replayed).is_err());
        // Nor does one of another kind, or one that was changed or cut.
        let sealed = joiner.seal(Kind::Request, b"hello".to_vec()).unwrap();
        assert!(first.open(Kind::Stored, sealed.clone()).is_err());
        assert!(first.open(Kind::Request, sealed[..sealed.len() - 1].to_vec()).is_err());
        assert!(first.open(Kind::Request, Vec::new()).is_err());
        let mut changed = sealed;
        changed[0] ^= 1;
        assert!(first.open(Kind::Request, changed).is_err());
    }

    #[test]
    fn a_reflected_or_impossible_point_is_refused() {
        let (joiner, hello) = StartedJoiner::new(&code(CODE), name("b")).unwrap();
        // The joiner's own message, sent back.
        assert!(joiner.finish(&Answer { name: name("a"), pake: hello.pake }).is_err());
        for byte in [0, 1, 0x42, 0xff] {
            let hello = Hello { pake: [byte; PAKE_BYTES], ..hello.clone() };
            assert!(answer(&code(CODE), &hello, name("a")).is_err(), "{byte}");
        }
    }
}
