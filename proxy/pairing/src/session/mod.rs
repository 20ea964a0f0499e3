//! The part of the first machine, which shows a code and admits those that know it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Notify, Semaphore};
use tokio::task::JoinSet;

use crate::attempts::Attempts;
use crate::authority::{self, CertificateRequest};
use crate::code::{CODE_LIFETIME, PairingCode};
use crate::error::{PairingError, PairingRefusal};
use crate::exchange;
use crate::folder::ClusterFolder;
use crate::mac_address::MacAddress;
use crate::membership::{About, MachineName, Membership};
use crate::wire::{self, Hello, Kind};

/// Connections at the same time. More than attempts, so that strangers do not keep machines out at once.
const MAX_CONNECTIONS: usize = 16;

/// The deadline of a first message. Whoever only connects is gone soon.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// The deadline of a run after its first message.
const RUN_DEADLINE: Duration = Duration::from_secs(15);

/// How long runs may take to finish after the code has ended.
const FINISH_DEADLINE: Duration = Duration::from_secs(3);

/// A pause after an accept that failed, such as for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The first machine while it shows a code. Cheap to clone.
#[derive(Clone)]
pub struct PairingSession(Arc<FirstMachine>);

struct FirstMachine {
    code: PairingCode,
    attempts: Attempts,
    member: Membership,
    folder: ClusterFolder,
    /// What is to be stored before the first machine joins. A code that nobody uses leaves nothing behind.
    unstored: Mutex<Option<Replaces>>,
    n_joined: AtomicUsize,
    joined: Notify,
}

/// A new cluster's pairing may take the place of another.
struct Replaces(bool);

/// A machine that has joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinedMachine {
    pub name: MachineName,
    /// The address of its network card, if it knows it.
    pub mac: Option<MacAddress>,
}

/// What happened while a code is shown.
#[derive(Debug)]
pub enum PairingEvent {
    /// A machine has joined and stored its pairing.
    Joined { machine: JoinedMachine, address: SocketAddr },
    /// A run failed. `n_left` attempts are left; a run that spent none has the same number as before.
    Failed { address: SocketAddr, error: PairingError, n_left: u32 },
}

/// Why no more machines are admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// As many have joined as were expected.
    Complete,
    /// The code's time is over.
    Expired,
    /// Too many attempts failed.
    Void,
}

/// The end of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairingEnd {
    pub reason: EndReason,
    pub n_joined: usize,
}

impl PairingSession {
    /// Shows a new code for this machine's cluster, or for a new one if it has none or `replaces` it. Errors: this machine
    /// is in a cluster without being its first machine.
    pub fn new(folder: ClusterFolder, machine: MachineName, replaces: bool) -> Result<PairingSession, PairingError> {
        PairingSession::with_lifetime(folder, machine, replaces, CODE_LIFETIME)
    }

    fn with_lifetime(
        folder: ClusterFolder,
        machine: MachineName,
        replaces: bool,
        lifetime: Duration,
    ) -> Result<PairingSession, PairingError> {
        let present = if replaces { None } else { folder.read()? };
        if let Some(admitted_by) = present.as_ref().and_then(|member| member.about.admitted_by.as_ref()) {
            return Err(PairingError::NotTheFirst { admitted_by: admitted_by.to_string() });
        }
        let (member, unstored) = match present {
            Some(member) => (member, None),
            None => {
                folder.check_usable()?;
                (authority::found_cluster(machine)?, Some(Replaces(replaces)))
            }
        };
        Ok(PairingSession(Arc::new(FirstMachine {
            code: PairingCode::random(),
            attempts: Attempts::new(lifetime),
            member,
            folder,
            unstored: Mutex::new(unstored),
            n_joined: AtomicUsize::new(0),
            joined: Notify::new(),
        })))
    }

    pub fn code(&self) -> &PairingCode {
        &self.0.code
    }

    /// The cluster that machines join.
    pub fn about(&self) -> &About {
        &self.0.member.about
    }

    /// Machines that have joined so far.
    pub fn n_joined(&self) -> usize {
        self.0.n_joined.load(Ordering::Relaxed)
    }

    /// Admits machines until the code ends, or `expected` have joined. Dropping the future ends all runs.
    pub async fn admit(
        &self,
        listener: TcpListener,
        expected: Option<usize>,
        report: impl Fn(PairingEvent) + Send + Sync + 'static,
    ) -> PairingEnd {
        let report = Arc::new(report);
        let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut runs = JoinSet::new();
        let reason = loop {
            // No losing arm loses anything: an accept that was not ready has accepted nothing.
            let accepted = tokio::select! {
                () = self.0.attempts.voided() => break EndReason::Void,
                () = self.0.attempts.expired() => break EndReason::Expired,
                () = self.has_admitted(expected) => break EndReason::Complete,
                accepted = listener.accept() => accepted,
                Some(_) = runs.join_next() => continue,
            };
            let Ok((mut connection, address)) = accepted else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            // Dropped, which closes it.
            let Ok(permit) = Arc::clone(&connections).try_acquire_owned() else { continue };
            let session = self.clone();
            let report = Arc::clone(&report);
            runs.spawn(async move {
                let _permit = permit;
                match session.admit_one(&mut connection).await {
                    Ok(machine) => {
                        report(PairingEvent::Joined { machine, address });
                        session.0.n_joined.fetch_add(1, Ordering::Relaxed);
                        session.0.joined.notify_waiters();
                    }
                    Err(error) => {
                        let n_left = session.0.attempts.n_left();
                        report(PairingEvent::Failed { address, error, n_left });
                    }
                }
            });
        };
        // Those who have proved themselves may finish. The rest is silent, and dropping the set ends it.
        let finish = async { while runs.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(FINISH_DEADLINE, finish).await;
        PairingEnd { reason, n_joined: self.n_joined() }
    }

    async fn has_admitted(&self, expected: Option<usize>) {
        loop {
            let told = self.0.joined.notified();
            if expected.is_some_and(|expected| self.n_joined() >= expected) {
                return;
            }
            told.await;
        }
    }

    /// One run. A machine that is refused is told why.
    async fn admit_one(
        &self,
        connection: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ) -> Result<JoinedMachine, PairingError> {
        let hello = tokio::time::timeout(HELLO_DEADLINE, wire::receive(connection, Kind::Hello)).await;
        let admitted = match hello.map_err(|_| PairingError::Late)? {
            Ok(hello) => {
                let run = self.run(connection, &hello);
                tokio::time::timeout(RUN_DEADLINE, run).await.unwrap_or(Err(PairingError::Late))
            }
            // A joiner refuses nothing, and its words must not pass for those of this machine.
            Err(PairingError::Refused(_)) => return Err(PairingError::Protocol("a message out of turn")),
            // Nobody who pairs: no answer.
            Err(error) => return Err(error),
        };
        if let Err(error) = &admitted {
            let refusal = match error {
                PairingError::Refused(refusal) => *refusal,
                _ => PairingRefusal::Failed,
            };
            // Best effort: it may be gone.
            let payload = [refusal.to_byte()];
            let told = wire::send(connection, Kind::Refusal, &payload);
            let _ = tokio::time::timeout(HELLO_DEADLINE, told).await;
        }
        admitted
    }

    async fn run(
        &self,
        connection: &mut (impl AsyncRead + AsyncWrite + Unpin),
        hello: &[u8],
    ) -> Result<JoinedMachine, PairingError> {
        let first = &*self.0;
        let hello = Hello::parse(hello)
            .map_err(|refusal| refusal.map_or(PairingError::Protocol("a malformed hello"), PairingError::Refused))?;
        if hello.room != first.code.room() {
            return Err(PairingError::Refused(PairingRefusal::Room));
        }
        let attempt = first.attempts.begin().map_err(PairingError::Refused)?;
        let (keys, answer) = exchange::answer(&first.code, &hello, first.member.about.machine.clone())?;
        wire::send(connection, Kind::Answer, &answer.to_bytes()).await?;
        let proof = wire::exactly(wire::receive(connection, Kind::JoinerProof).await?)?;
        if !keys.is_joiner_proof(proof) {
            return Err(PairingError::Refused(PairingRefusal::WrongCode));
        }
        attempt.succeed();
        wire::send(connection, Kind::FirstProof, keys.first_proof()).await?;
        let request = keys.open(Kind::Request, wire::receive(connection, Kind::Request).await?)?;
        let request: CertificateRequest =
            serde_json::from_slice(&request).map_err(|_| PairingError::Protocol("a malformed request"))?;
        let grant = authority::grant(&first.member, &hello.name, &request, keys.transcript())?;
        self.store().await?;
        let grant = serde_json::to_vec(&grant).map_err(|_| PairingError::Protocol("a grant without JSON"))?;
        wire::send(connection, Kind::Grant, &keys.seal(Kind::Grant, grant)?).await?;
        let stored = keys.open(Kind::Stored, wire::receive(connection, Kind::Stored).await?)?;
        let joined = JoinedMachine { name: hello.name, mac: card(&stored)? };
        self.note(&joined).await;
        Ok(joined)
    }

    /// Remembers how a machine is woken. The pairing is complete without that.
    async fn note(&self, joined: &JoinedMachine) {
        let Some(mac) = joined.mac else { return };
        // One at a time.
        let _alone = self.0.unstored.lock().await;
        if let Err(error) = self.0.folder.note_machine(&joined.name, mac) {
            tracing::warn!(%error, machine = %joined.name, "the address of a machine's network card is not remembered");
        }
    }

    /// Stores a new cluster, before anybody gets its secrets.
    async fn store(&self) -> Result<(), PairingError> {
        let mut unstored = self.0.unstored.lock().await;
        if let Some(Replaces(replaces)) = &*unstored {
            self.0.folder.store(&self.0.member, *replaces)?;
            *unstored = None;
        }
        Ok(())
    }
}

/// The last words of a joiner: nothing, or the address of its network card.
fn card(stored: &[u8]) -> Result<Option<MacAddress>, PairingError> {
    if stored.is_empty() {
        return Ok(None);
    }
    let bytes =
        stored.try_into().map_err(|_| PairingError::Protocol("an address of a network card of a wrong length"))?;
    // One that is none, such as a virtual machine's, wakes nobody.
    Ok(MacAddress::of_bytes(bytes).ok())
}

#[cfg(test)]
mod tests;
