use super::*;

const NODE: Proven = Proven { process: 7, role: Role::Prefill };

fn end(address: &str, certificate: Option<u8>) -> ConnectionEnd {
    ConnectionEnd { address: address.parse().unwrap(), certificate: certificate.map(|byte| [byte; 32]) }
}

/// What a caller with `ours` that dialled `dialled` makes of the answer of a node with `theirs` that was reached at `reached`.
fn asked(ours: &str, theirs: &str, dialled: ConnectionEnd, reached: ConnectionEnd) -> Result<Proven, NotProven> {
    let question = Question::new(ours);
    let proof = answer(theirs.as_bytes(), question.message(), reached, NODE).unwrap();
    question.verify(&proof, dialled)
}

#[test]
fn the_same_key_at_the_same_end_is_proven() {
    let here = end("192.168.0.7:9000", None);
    assert_eq!(asked("secret", "secret", here, here), Ok(NODE));
    // A dual-stack socket shows IPv4 addresses as IPv6, and each end has its own scope.
    assert_eq!(asked("secret", "secret", here, end("[::ffff:192.168.0.7]:9000", None)), Ok(NODE));
    assert_eq!(asked("k", "k", end("[fe80::1%3]:1", None), end("[fe80::1%9]:1", None)), Ok(NODE));
    let tls = end("192.168.0.7:9000", Some(1));
    assert_eq!(asked("secret", "secret", tls, tls), Ok(NODE));
}

#[test]
fn another_key_is_another_key() {
    let here = end("192.168.0.7:9000", None);
    for theirs in ["Secret", "", "secret2"] {
        assert_eq!(asked("secret", theirs, here, here), Err(NotProven::OtherKey));
    }
}

/// A stranger at .66 passes the question on to the node at .7, whose answer names .7.
#[test]
fn an_answer_that_was_passed_on_proves_nothing() {
    let stranger = end("192.168.0.66:9000", None);
    let node = end("192.168.0.7:9000", None);
    assert_eq!(asked("secret", "secret", stranger, node), Err(NotProven::Elsewhere));
    let question = Question::new("secret");
    let honest = answer(b"secret", question.message(), node, NODE).unwrap();
    let lie = KeyProof { address: stranger.address, ..honest };
    assert_eq!(question.verify(&lie, stranger), Err(NotProven::OtherKey));
}

#[test]
fn another_certificate_than_the_nodes_proves_nothing() {
    let at = |certificate| end("192.168.0.7:9000", certificate);
    for (dialled, reached) in [(Some(1), Some(2)), (None, Some(1)), (Some(1), None)] {
        assert!(asked("secret", "secret", at(dialled), at(reached)).is_err(), "{dialled:?} {reached:?}");
    }
}

#[test]
fn a_changed_role_or_process_is_no_proof() {
    let here = end("192.168.0.7:9000", None);
    for change in [(|proof| KeyProof { role: Role::Decode, ..proof }) as fn(KeyProof) -> KeyProof, |proof| KeyProof {
        process: 8,
        ..proof
    }] {
        let question = Question::new("secret");
        let proof = answer(b"secret", question.message(), here, NODE).unwrap();
        assert_eq!(question.verify(&change(proof), here), Err(NotProven::OtherKey));
    }
}

#[test]
fn an_answer_fits_one_question_only_and_no_message_answers_itself() {
    let here = end("192.168.0.7:9000", None);
    let earlier = Question::new("secret");
    let proof = answer(b"secret", earlier.message(), here, NODE).unwrap();
    assert_eq!(Question::new("secret").verify(&proof, here), Err(NotProven::OtherKey));
    let question = Question::new("secret");
    let echo = KeyProof { message: question.message().to_owned(), ..proof };
    assert_eq!(question.verify(&echo, here), Err(NotProven::NotANode));
}

#[test]
fn what_is_no_message_is_refused() {
    let here = end("192.168.0.7:9000", None);
    let long = "00".repeat(34);
    for message in ["", "0", "zz", "00", &long, &"ff".repeat(33), "é"] {
        assert_eq!(answer(b"secret", message, here, NODE), None, "{message}");
        let question = Question::new("secret");
        let proof = answer(b"secret", question.message(), here, NODE).unwrap();
        let answer = KeyProof { message: message.to_owned(), ..proof };
        assert!(question.verify(&answer, here).is_err());
    }
}
