//! Whole runs, between both sides or with one that lies.

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::*;
use crate::code::MAX_FAILED_ATTEMPTS;
use crate::exchange::StartedJoiner;
use crate::join::{Joiner, join_over};
use crate::wire::{Answer, VERSION};

fn own_card() -> MacAddress {
    "a4:83:e7:12:34:56".parse().unwrap()
}

/// The first machine, and folders for it and for others.
struct Home {
    folder: tempfile::TempDir,
    session: PairingSession,
}

impl Home {
    fn new() -> Home {
        Home::living(CODE_LIFETIME)
    }

    fn living(lifetime: Duration) -> Home {
        let folder = tempfile::tempdir().unwrap();
        let of_first = ClusterFolder::at(folder.path().join("first"));
        let session = PairingSession::with_lifetime(of_first, name("first"), false, lifetime).unwrap();
        Home { folder, session }
    }

    fn folder(&self, machine: &str) -> ClusterFolder {
        ClusterFolder::at(self.folder.path().join(machine))
    }

    fn joiner(&self, machine: &str, code: PairingCode) -> Joiner {
        Joiner { code, name: name(machine), folder: self.folder(machine), replaces: false, mac_of: |_| None }
    }

    fn code(&self) -> PairingCode {
        self.session.code().clone()
    }

    /// A code of the same room that is wrong.
    fn wrong_code(&self) -> PairingCode {
        let mut text = self.code().to_string();
        let last = if text.ends_with('0') { "1" } else { "0" };
        text.replace_range(text.len() - 1.., last);
        text.parse().unwrap()
    }

    /// A connection to the first machine, and what becomes of it there.
    fn connect(&self) -> (DuplexStream, tokio::task::JoinHandle<Result<JoinedMachine, PairingError>>) {
        let (near, mut far) = duplex(16 << 10);
        let session = self.session.clone();
        (near, tokio::spawn(async move { session.admit_one(&mut far).await }))
    }

    async fn join(&self, joiner: &Joiner) -> [Result<(), PairingError>; 2] {
        let (mut connection, first) = self.connect();
        let joined = join_over(joiner, Some(own_card()), &mut connection).await.map(drop);
        drop(connection);
        [joined, first.await.unwrap().map(drop)]
    }
}

fn name(text: &str) -> MachineName {
    MachineName::parse(text).unwrap()
}

#[tokio::test]
async fn machines_with_the_code_share_a_key_and_an_authority() {
    let home = Home::new();
    for machine in ["second", "third"] {
        let [joined, admitted] = home.join(&home.joiner(machine, home.code())).await;
        joined.unwrap();
        admitted.unwrap();
    }
    let [first, second, third] = ["first", "second", "third"].map(|name| home.folder(name).read().unwrap().unwrap());
    for member in [&second, &third] {
        assert_eq!(member.cluster_key, first.cluster_key);
        assert_eq!(member.authority, first.authority);
        assert_eq!(member.about.admitted_by, Some(name("first")));
        assert!(member.authority_key.is_none() && member.private_key != first.private_key);
    }
    assert_ne!(second.private_key, third.private_key);
    assert_eq!(home.session.0.attempts.n_left(), MAX_FAILED_ATTEMPTS, "a right code costs no attempt");
    // The first machine can admit more later, and the others cannot.
    let later = PairingSession::new(home.folder("first"), name("first"), false).unwrap();
    assert_eq!(later.about(), &first.about);
    let refused = PairingSession::new(home.folder("second"), name("second"), false).err().unwrap();
    assert!(matches!(&refused, PairingError::NotTheFirst { admitted_by } if admitted_by == "first"), "{refused}");
    assert!(PairingSession::new(home.folder("second"), name("second"), true).is_ok());
}

#[tokio::test]
async fn a_wrong_code_leaves_nothing_on_either_side() {
    let home = Home::new();
    let [joined, admitted] = home.join(&home.joiner("second", home.wrong_code())).await;
    for result in [joined, admitted] {
        assert!(matches!(result, Err(PairingError::Refused(PairingRefusal::WrongCode))), "{result:?}");
    }
    assert_eq!(std::fs::read_dir(home.folder.path()).unwrap().count(), 0);
    assert_eq!(home.session.0.attempts.n_left(), MAX_FAILED_ATTEMPTS - 1);
}

#[tokio::test]
async fn five_wrong_codes_make_the_right_one_void() {
    let home = Home::new();
    for _ in 0..MAX_FAILED_ATTEMPTS {
        let [joined, _] = home.join(&home.joiner("second", home.wrong_code())).await;
        assert!(matches!(joined, Err(PairingError::Refused(PairingRefusal::WrongCode))));
    }
    let [joined, _] = home.join(&home.joiner("second", home.code())).await;
    assert!(matches!(joined, Err(PairingError::Refused(PairingRefusal::Void))), "{joined:?}");
    assert!(!home.folder("second").exists());
}

#[tokio::test]
async fn guesses_at_the_same_time_are_five_at_most() {
    let home = Arc::new(Home::new());
    let mut runs = Vec::new();
    for i in 0..40 {
        let (mut connection, first) = home.connect();
        let joiner = home.joiner(&format!("guesser-{i}"), home.wrong_code());
        let joined = tokio::spawn(async move { join_over(&joiner, Some(own_card()), &mut connection).await.map(drop) });
        runs.push((joined, first));
    }
    let mut n_computed = 0;
    for (joined, first) in runs {
        assert!(joined.await.unwrap().is_err());
        n_computed +=
            usize::from(matches!(first.await.unwrap(), Err(PairingError::Refused(PairingRefusal::WrongCode))));
    }
    assert_eq!(n_computed, MAX_FAILED_ATTEMPTS as usize);
}

#[tokio::test]
async fn a_guesser_that_leaves_before_its_proof_has_spent_an_attempt() {
    let home = Home::new();
    let (mut connection, first) = home.connect();
    let (_, hello) = StartedJoiner::new(&home.wrong_code(), name("guesser")).unwrap();
    wire::send(&mut connection, Kind::Hello, &hello.to_bytes()).await.unwrap();
    wire::receive(&mut connection, Kind::Answer).await.unwrap();
    drop(connection);
    assert!(matches!(first.await.unwrap(), Err(PairingError::Lost(_))));
    assert_eq!(home.session.0.attempts.n_left(), MAX_FAILED_ATTEMPTS - 1);
}

#[tokio::test(start_paused = true)]
async fn an_expired_code_is_refused() {
    let home = Home::living(Duration::from_secs(1));
    tokio::time::advance(Duration::from_secs(2)).await;
    let [joined, _] = home.join(&home.joiner("second", home.code())).await;
    assert!(matches!(joined, Err(PairingError::Refused(PairingRefusal::Expired))), "{joined:?}");
}

#[tokio::test(start_paused = true)]
async fn whoever_says_nothing_is_gone_after_a_deadline_and_costs_no_attempt() {
    let home = Home::new();
    let (_silent, first) = home.connect();
    assert!(matches!(first.await.unwrap(), Err(PairingError::Late)));
    assert_eq!(home.session.0.attempts.n_left(), MAX_FAILED_ATTEMPTS);
    // A first machine that says nothing is given up, too.
    let (mut near, _far) = duplex(1 << 10);
    let joined = join_over(&home.joiner("second", home.code()), Some(own_card()), &mut near).await;
    assert!(matches!(joined, Err(PairingError::Late)));
}

#[tokio::test]
async fn other_rooms_versions_and_strangers_cost_no_attempt() {
    let home = Home::new();
    let other_room = format!("{:03}-0000-0000", (home.code().room() + 1) % 1_000).parse().unwrap();
    let [joined, _] = home.join(&home.joiner("second", other_room)).await;
    assert!(matches!(joined, Err(PairingError::Refused(PairingRefusal::Room))), "{joined:?}");
    let (_, hello) = StartedJoiner::new(&home.code(), name("second")).unwrap();
    let hello = hello.to_bytes();
    let frame = |payload: &[u8]| [&[Kind::Hello.to_byte(), 0, payload.len() as u8], payload].concat();
    let mut newer = hello.clone();
    newer[10] = VERSION + 1;
    for (sent, reply) in [
        (frame(&newer), Some(PairingRefusal::Version)),
        (frame(&hello[..20]), Some(PairingRefusal::Failed)),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), None),
        (vec![0; 4_096], None),
        (vec![0xff; 4_096], None),
    ] {
        let (mut connection, first) = home.connect();
        connection.write_all(&sent).await.unwrap();
        let mut answer = Vec::new();
        connection.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, reply.map_or(Vec::new(), |refusal| vec![8, 0, 1, refusal.to_byte()]));
        assert!(first.await.unwrap().is_err());
    }
    assert_eq!(home.session.0.attempts.n_left(), MAX_FAILED_ATTEMPTS);
}

/// Passes messages on between both sides. `change` sees each, with its kind.
async fn man_in_the_middle(home: &Home, change: impl Fn(u8, &mut Vec<u8>)) -> [Result<(), PairingError>; 2] {
    let (mut to_first, first) = home.connect();
    let (mut near, mut far) = duplex(16 << 10);
    let joiner = home.joiner("second", home.code());
    let joined = tokio::spawn(async move { join_over(&joiner, Some(own_card()), &mut near).await.map(drop) });
    let mut from_joiner = true;
    loop {
        let (from, to) = if from_joiner { (&mut far, &mut to_first) } else { (&mut to_first, &mut far) };
        let mut head = [0; 3];
        if from.read_exact(&mut head).await.is_err() {
            break;
        }
        let mut payload = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
        from.read_exact(&mut payload).await.unwrap();
        change(head[0], &mut payload);
        if to.write_all(&[&head[..], &payload].concat()).await.is_err() {
            break;
        }
        from_joiner = !from_joiner;
    }
    drop((far, to_first));
    [joined.await.unwrap(), first.await.unwrap().map(drop)]
}

#[tokio::test]
async fn a_man_in_the_middle_changes_nothing_unnoticed() {
    // Unchanged, the same path works.
    let [joined, admitted] = man_in_the_middle(&Home::new(), |_, _| ()).await;
    joined.unwrap();
    admitted.unwrap();
    // The last byte of each message: a point, a proof, a sealed tag.
    for kind in 1..=7 {
        let home = Home::new();
        let [joined, admitted] = man_in_the_middle(&home, |of, payload| {
            if of == kind {
                *payload.last_mut().unwrap() ^= 1;
            }
        })
        .await;
        assert!(admitted.is_err(), "{kind}");
        // The joiner has stored its pairing before its last message.
        assert_eq!(joined.is_ok(), kind == 7, "{kind}: {joined:?}");
        assert_eq!(home.folder("second").exists(), kind == 7, "{kind}");
        if kind == 4 {
            assert!(matches!(joined, Err(PairingError::Unproven)), "{joined:?}");
        }
    }
}

#[tokio::test]
async fn whoever_answers_without_the_code_learns_no_secret() {
    let home = Home::new();
    let (mut near, mut far) = duplex(16 << 10);
    let joiner = home.joiner("second", home.code());
    let impostor = async {
        let hello = Hello::parse(&wire::receive(&mut far, Kind::Hello).await.unwrap()).unwrap();
        let (keys, answer) = exchange::answer(&home.wrong_code(), &hello, name("first")).unwrap();
        wire::send(&mut far, Kind::Answer, &answer.to_bytes()).await.unwrap();
        wire::receive(&mut far, Kind::JoinerProof).await.unwrap();
        wire::send(&mut far, Kind::FirstProof, keys.first_proof()).await.unwrap();
        // Nothing more comes: no request, so no key of the joiner's either.
        wire::receive(&mut far, Kind::Request).await
    };
    let joining = async move { join_over(&joiner, Some(own_card()), &mut near).await };
    let (joined, request) = tokio::join!(joining, impostor);
    assert!(matches!(joined, Err(PairingError::Unproven)), "{joined:?}");
    assert!(matches!(request, Err(PairingError::Lost(_))));
}

#[tokio::test]
async fn a_recorded_run_cannot_be_played_again() {
    let home = Home::new();
    let recorded = Arc::new(std::sync::Mutex::new(Vec::new()));
    let [joined, _] = man_in_the_middle(&home, |kind, payload| {
        recorded.lock().unwrap().push((kind, payload.clone()));
    })
    .await;
    joined.unwrap();
    let (mut connection, first) = home.connect();
    let of = |wanted: Kind| {
        let recorded = recorded.lock().unwrap();
        recorded.iter().find(|(kind, _)| *kind == wanted.to_byte()).unwrap().1.clone()
    };
    wire::send(&mut connection, Kind::Hello, &of(Kind::Hello)).await.unwrap();
    let answer = wire::receive(&mut connection, Kind::Answer).await.unwrap();
    assert_ne!(Answer::parse(&answer).unwrap().pake, Answer::parse(&of(Kind::Answer)).unwrap().pake);
    wire::send(&mut connection, Kind::JoinerProof, &of(Kind::JoinerProof)).await.unwrap();
    let refused = wire::receive(&mut connection, Kind::FirstProof).await.unwrap_err();
    assert!(matches!(refused, PairingError::Refused(PairingRefusal::WrongCode)), "{refused}");
    assert!(first.await.unwrap().is_err());
    assert_eq!(home.session.0.attempts.n_left(), MAX_FAILED_ATTEMPTS - 1);
}

#[tokio::test]
async fn a_machine_in_a_cluster_joins_another_only_when_told() {
    let (home, other) = (Home::new(), Home::new());
    home.join(&home.joiner("second", home.code())).await[0].as_ref().unwrap();
    let before = home.folder("second").about().unwrap().unwrap();
    let joiner = Joiner { folder: home.folder("second"), ..other.joiner("second", other.code()) };
    let refused = crate::join::join(&joiner, "127.0.0.1:1").await.err().unwrap();
    assert!(matches!(&refused, PairingError::AlreadyPaired { cluster } if *cluster == before.cluster), "{refused}");
    let joiner = Joiner { replaces: true, ..joiner };
    other.join(&joiner).await[0].as_ref().unwrap();
    assert_eq!(home.folder("second").about().unwrap().unwrap().cluster, other.session.about().cluster);
}

#[tokio::test]
async fn a_session_ends_when_all_have_joined_or_the_code_is_void() {
    for (n_expected, reason) in [(2, EndReason::Complete), (3, EndReason::Void)] {
        let home = Home::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let session = home.session.clone();
        let admitting = tokio::spawn(async move { session.admit(listener, Some(n_expected), |_| ()).await });
        for machine in ["second", "third"] {
            crate::join::join(&home.joiner(machine, home.code()), &address).await.unwrap();
        }
        if reason == EndReason::Void {
            for _ in 0..MAX_FAILED_ATTEMPTS {
                assert!(crate::join::join(&home.joiner("guesser", home.wrong_code()), &address).await.is_err());
            }
        }
        assert_eq!(admitting.await.unwrap(), PairingEnd { reason, n_joined: 2 });
    }
}

#[tokio::test]
async fn the_first_machine_remembers_how_those_that_joined_are_woken() {
    let home = Home::new();
    let first = home.folder("first");
    assert!(home.join(&home.joiner("second", home.code())).await.iter().all(Result::is_ok));
    assert_eq!(first.machines().unwrap(), [("second".to_owned(), own_card())].into());
    // One that does not know its card, or is of an older version.
    let (mut connection, joined) = home.connect();
    join_over(&home.joiner("third", home.code()), None, &mut connection).await.unwrap();
    assert_eq!(joined.await.unwrap().unwrap(), JoinedMachine { name: name("third"), mac: None });
    assert_eq!(first.machines().unwrap().len(), 1);
    assert_eq!(card(&[0; 6]).unwrap(), None, "no card has it");
    assert!(card(&[0; 7]).is_err() && card(&[0; 5]).is_err());
    assert!(home.folder("second").machines().unwrap().is_empty());
    // It goes with the pairing.
    first.forget().unwrap();
    assert!(!first.exists() && first.machines().unwrap().is_empty());
}
