//! Messages and files of a pairing as they arrive, without a connection: for fuzz targets.

use std::sync::LazyLock;

use rcgen::KeyPair;

use super::authority::{self, CertificateRequest, Grant};
use super::error::PairingError;
use super::membership::{About, MachineName, Membership};
use super::wire::{Answer, Hello, PAKE_BYTES};

/// What a run of a pairing has agreed on.
const TRANSCRIPT: [u8; 32] = [7; 32];

struct ExamplePairing {
    first: Membership,
    key: KeyPair,
    request: CertificateRequest,
}

static EXAMPLE: LazyLock<Result<ExamplePairing, PairingError>> = LazyLock::new(|| {
    let (key, request) = authority::request(&TRANSCRIPT)?;
    Ok(ExamplePairing { first: authority::found_cluster(name())?, key, request })
});

fn name() -> MachineName {
    MachineName::of_this_machine()
}

/// Reads a record of this kind: a hello, an answer, an opened request, an opened grant, a stored file. `None`: it was none. Else
/// whether it is written as it was read; records in JSON have several spellings, and are not written.
#[doc(hidden)]
pub fn read_record(kind: u8, bytes: &[u8]) -> Option<bool> {
    let run = EXAMPLE.as_ref().ok()?;
    let is_record = match kind % 5 {
        0 => return Some(Hello::parse(bytes).ok()?.to_bytes() == bytes),
        1 => return Some(Answer::parse(bytes).ok()?.to_bytes() == bytes),
        2 => serde_json::from_slice(bytes).is_ok_and(|request: CertificateRequest| {
            authority::grant(&run.first, &name(), &request, &TRANSCRIPT).is_ok()
        }),
        3 => serde_json::from_slice(bytes)
            .is_ok_and(|grant: Grant| authority::accept(grant, &run.key, name(), name()).is_ok()),
        _ => serde_json::from_slice::<About>(bytes).is_ok(),
    };
    is_record.then_some(true)
}

/// A record of each kind, which [`read_record`] accepts.
#[doc(hidden)]
pub fn records() -> Vec<Vec<u8>> {
    let Ok(ExamplePairing { first, request, .. }) = &*EXAMPLE else { return Vec::new() };
    let hello = Hello { room: 417, name: name(), pake: [7; PAKE_BYTES] };
    let answer = Answer { name: name(), pake: [9; PAKE_BYTES] };
    let grant = authority::grant(first, &name(), request, &TRANSCRIPT);
    vec![
        hello.to_bytes(),
        answer.to_bytes(),
        serde_json::to_vec(request).unwrap_or_default(),
        grant.ok().and_then(|grant| serde_json::to_vec(&grant).ok()).unwrap_or_default(),
        serde_json::to_vec(&first.about).unwrap_or_default(),
    ]
}
