use bytes::BytesMut;

use super::*;
use crate::EngineError;
use crate::draft::{DraftCounts, DraftReport, DraftedTokens, DrafterKind, DrafterLoss};
use crate::node::NodeErrorReply;
use crate::sequence::{Alternative, FinishReason, GeneratedToken, Logprobs, SequenceEvent, Timings};

fn token(id: u32, bytes: &[u8]) -> GeneratedToken {
    GeneratedToken { id, bytes: bytes.to_vec(), special: false, logprobs: None, drafts: None }
}

fn token_with_everything() -> GeneratedToken {
    let alternative = |id, bytes: &[u8], logprob| Alternative { id, bytes: bytes.to_vec(), logprob };
    let top = vec![alternative(7, &[0xF0, 0x9F], -0.25), alternative(9, b"", -3.5)];
    GeneratedToken {
        id: 7,
        bytes: vec![0xF0, 0x9F],
        special: true,
        logprobs: Some(Logprobs { chosen: -0.25, rank: Some(3), top }),
        drafts: Some(DraftReport {
            verified: Some((DrafterKind::Remote, DraftCounts { n: 200, n_accepted: 3 })),
            loss: Some(DrafterLoss::Wrong),
        }),
    }
}

/// Feeds the bytes in pieces of this size and returns what `see` makes of each frame.
fn split<T>(
    bytes: &[u8],
    size: usize,
    most: usize,
    see: impl Fn(RawFrame<'_>) -> T,
) -> Result<Vec<T>, StreamFrameError> {
    let mut buffer = FrameBuffer::new(most);
    let mut seen = Vec::new();
    for piece in bytes.chunks(size) {
        buffer.space().extend_from_slice(piece);
        while let Some(frame) = buffer.next_frame()? {
            seen.push(see(frame));
        }
    }
    assert!(buffer.space().is_empty(), "bytes are left over");
    Ok(seen)
}

fn client_error(bytes: &[u8]) -> StreamFrameError {
    let parsed = split(bytes, bytes.len(), MAX_CLIENT_PAYLOAD, |frame| ClientFrame::parse(frame).map(drop));
    parsed.and_then(|frames| frames.into_iter().collect::<Result<(), _>>()).unwrap_err()
}

fn node_error(bytes: &[u8]) -> StreamFrameError {
    let parsed = split(bytes, bytes.len(), MAX_NODE_PAYLOAD, |frame| match NodeFrame::parse(frame)? {
        NodeFrame::Step(mut tokens) => tokens.try_for_each(|token| token.map(drop)),
        _ => Ok(()),
    });
    parsed.and_then(|frames| frames.into_iter().collect::<Result<(), _>>()).unwrap_err()
}

#[test]
fn the_bytes_are_those_of_the_documentation() {
    let mut out = BytesMut::new();
    assert!(
        put_start(
            &mut out,
            5,
            &NewStream { work: StreamWork::Generate, credit: 64, traceparent: Some("00-ab"), body: b"{}" }
        )
        .is_empty()
    );
    put_credit(&mut out, 5, 32);
    put_cancel(&mut out, 5);
    assert_eq!(put_told(&mut out, 5, 9, &[300, 2]), [0; 0]);
    let expected = [
        &[19, 0, 0, 0, 1, 0, 0, 0, 5, 0, 0, 0, 1, 5, 0, 0, 64, 0, 0, 0, 2, 0, 0, 0][..],
        b"00-ab{}",
        &[4, 0, 0, 0, 3, 0, 0, 0, 5, 0, 0, 0, 32, 0, 0, 0],
        &[0, 0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0],
        &[12, 0, 0, 0, 5, 0, 0, 0, 5, 0, 0, 0, 9, 0, 0, 0, 44, 1, 0, 0, 2, 0, 0, 0],
    ];
    assert_eq!(&out[..], expected.concat());

    let mut writer = NodeFrameWriter::default();
    writer.accepted(5);
    writer.token(5, &token(300, b"Hi")).unwrap();
    writer.token(6, &token_with_everything()).unwrap();
    writer.vector(7, &[1.0]).unwrap();
    writer.alive();
    writer.drafted(8, &DraftedTokens { from: 11, at: 12, tokens: vec![300] }).unwrap();
    let expected = [
        &[0, 0, 0, 0, 17, 0, 0, 0, 5, 0, 0, 0][..],
        &[66, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0],
        &[5, 0, 0, 0, 44, 1, 0, 0, 0, 0, 2, 0, b'H', b'i'],
        &[6, 0, 0, 0, 7, 0, 0, 0, 15, 0, 2, 0, 0xF0, 0x9F, 5, 200, 3, 6],
        &[0, 0, 0x80, 0xBE, 2, 0, 0, 0, 3, 0, 0, 0],
        &[7, 0, 0, 0, 0, 0, 0x80, 0xBE, 2, 0, 0xF0, 0x9F],
        &[9, 0, 0, 0, 0, 0, 0x60, 0xC0, 0, 0],
        &[4, 0, 0, 0, 19, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0x80, 0x3F],
        &[0, 0, 0, 0, 22, 0, 0, 0, 0, 0, 0, 0],
        &[12, 0, 0, 0, 23, 0, 0, 0, 8, 0, 0, 0, 11, 0, 0, 0, 12, 0, 0, 0, 44, 1, 0, 0],
    ];
    assert_eq!(&writer.frames()[..], expected.concat());
}

#[test]
fn what_a_node_writes_is_read_unchanged_wherever_the_bytes_break() {
    let finished = SequenceEvent::Finished { reason: FinishReason::Stop, timings: Timings::default() };
    let error = EngineError::invalid("no");
    let mut writer = NodeFrameWriter::default();
    writer.accepted(1);
    for stream in 1..=128 {
        writer.token(stream, &token(stream, b"a")).unwrap();
    }
    writer.token(1, &token_with_everything()).unwrap();
    writer.event(1, &finished).unwrap();
    writer.token(2, &token(2, b"")).unwrap();
    writer.error(2, error.clone());
    writer.end(3);
    assert_eq!(writer.n_steps(), 2, "tokens that follow each other share a step");
    let bytes = writer.frames().to_vec();
    for size in [1, 5, 12, 13, 1_000, bytes.len()] {
        let frames = split(&bytes, size, MAX_NODE_PAYLOAD, |frame| {
            let said = match NodeFrame::parse(frame).unwrap() {
                NodeFrame::Step(tokens) => {
                    let tokens: Vec<StreamToken> = tokens.map(Result::unwrap).collect();
                    if tokens.len() > 1 {
                        assert_eq!(tokens.len(), 129);
                        assert_eq!(tokens[128], StreamToken { stream: 1, token: token_with_everything() });
                    }
                    format!("{} tokens", tokens.len())
                }
                NodeFrame::Event(json) => {
                    assert_eq!(serde_json::from_slice::<SequenceEvent>(json).unwrap(), finished);
                    "event".into()
                }
                NodeFrame::Error(json) => {
                    assert_eq!(serde_json::from_slice::<NodeErrorReply>(json).unwrap().error, error);
                    "error".into()
                }
                other => format!("{other:?}"),
            };
            (frame.stream, said)
        });
        let expected = [(1, "Accepted"), (0, "129 tokens"), (1, "event"), (0, "1 tokens"), (2, "error"), (3, "End")];
        let expected: Vec<_> = expected.iter().map(|(stream, said)| (*stream, (*said).to_owned())).collect();
        assert_eq!(frames.unwrap(), expected, "{size}");
    }
}

#[test]
fn a_long_body_is_cut_into_pieces_that_other_frames_pass() {
    let body: Vec<u8> = (0..200_000_u32).map(|i| i as u8).collect();
    let mut out = BytesMut::new();
    let mut rest =
        put_start(&mut out, 1, &NewStream { work: StreamWork::Generate, credit: 1, traceparent: None, body: &body });
    while !rest.is_empty() {
        put_cancel(&mut out, 9);
        rest = put_body(&mut out, 1, rest);
    }
    let frames = split(&out, 7_777, MAX_CLIENT_PAYLOAD, |frame| match ClientFrame::parse(frame).unwrap() {
        ClientFrame::Start(start) => {
            assert_eq!((start.work, start.body_bytes, start.traceparent), (StreamWork::Generate, 200_000, None));
            start.piece.to_vec()
        }
        ClientFrame::Body(piece) => piece.to_vec(),
        other => {
            assert_eq!(other, ClientFrame::Cancel);
            Vec::new()
        }
    });
    let frames = frames.unwrap();
    assert_eq!(frames.len(), 7);
    assert_eq!(frames.concat(), body);
}

#[test]
fn a_full_step_is_followed_by_another() {
    let mut writer = NodeFrameWriter::default();
    let long = token(1, &[b'x'; MAX_TOKEN_TEXT]);
    for _ in 0..600 {
        writer.token(1, &long).unwrap();
    }
    assert_eq!(writer.n_steps(), 3);
    let bytes = writer.frames().to_vec();
    let counts = split(&bytes, bytes.len(), MAX_NODE_PAYLOAD, |frame| match NodeFrame::parse(frame).unwrap() {
        NodeFrame::Step(tokens) => tokens.map(|token| assert_eq!(token.unwrap().token, long)).count(),
        other => panic!("{other:?}"),
    });
    assert_eq!(counts.unwrap(), [255, 255, 90]);
}

#[test]
fn what_breaks_a_limit_is_not_written() {
    let mut writer = NodeFrameWriter::default();
    let too_long = token(1, &[0; MAX_TOKEN_TEXT + 1]);
    assert_eq!(writer.token(1, &too_long), Err(UnwritableFrame::TooLong { bytes: MAX_TOKEN_TEXT + 1 }));
    let alternatives = |n: usize, bytes: usize| {
        let top = vec![Alternative { id: 1, bytes: vec![0; bytes], logprob: -1.0 }; n];
        GeneratedToken { logprobs: Some(Logprobs { chosen: -1.0, rank: None, top }), ..token(1, b"a") }
    };
    for (n, bytes) in [(MAX_ALTERNATIVES + 1, 1), (1, MAX_TOKEN_TEXT + 1), (17, MAX_TOKEN_TEXT)] {
        assert!(matches!(writer.token(1, &alternatives(n, bytes)), Err(UnwritableFrame::TooLong { .. })));
    }
    for chosen in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let token =
            GeneratedToken { logprobs: Some(Logprobs { chosen, rank: None, top: Vec::new() }), ..token(1, b"a") };
        assert_eq!(writer.token(1, &token), Err(UnwritableFrame::NotFinite));
        assert_eq!(writer.vector(1, &[0.0, chosen]), Err(UnwritableFrame::NotFinite));
    }
    assert!(matches!(writer.vector(1, &[0.0; 1 << 20]), Err(UnwritableFrame::TooLong { .. })));
    for n in [0, 33] {
        let drafted = DraftedTokens { from: 1, at: 1, tokens: vec![0; n] };
        assert!(matches!(writer.drafted(1, &drafted), Err(UnwritableFrame::TooLong { .. })));
    }
    assert!(matches!(writer.event(1, &"x".repeat(2 << 20)), Err(UnwritableFrame::TooLong { .. })));
    assert!(writer.is_empty());
    writer.error(1, EngineError::invalid_field("\u{1}".repeat(2 << 20), "\u{1}".repeat(2 << 20)));
    assert!((1_000..MAX_NODE_PAYLOAD).contains(&writer.len()), "a long error is cut: {}", writer.len());
}

#[test]
fn hostile_bytes_are_refused_by_name() {
    let head = |length: u32, kind: u8, stream: u32| {
        [&length.to_le_bytes()[..], &[kind, 0, 0, 0], &stream.to_le_bytes()].concat()
    };
    // A giant length is refused before the payload comes.
    assert!(matches!(client_error(&head(u32::MAX, 2, 1)), StreamFrameError::TooLong { length: u32::MAX, .. }));
    assert!(matches!(node_error(&head(MAX_NODE_PAYLOAD as u32 + 1, 18, 1)), StreamFrameError::TooLong { .. }));
    assert_eq!(node_error(&head(0, 99, 1)), StreamFrameError::UnknownKind(99));
    assert_eq!(node_error(&head(0, 4, 1)), StreamFrameError::UnknownKind(4), "an endpoint's frame");
    assert_eq!(client_error(&head(0, 17, 1)), StreamFrameError::UnknownKind(17), "a node's frame");
    assert_eq!(node_error(&head(0, 22, 1)), StreamFrameError::Stream(1));
    assert_eq!(node_error(&head(0, 17, 0)), StreamFrameError::Stream(0));
    assert_eq!(client_error(&[0, 0, 0, 0, 4, 0, 1, 0, 1, 0, 0, 0]), StreamFrameError::Reserved);

    let with =
        |kind: u8, stream: u32, payload: &[u8]| [&head(payload.len() as u32, kind, stream)[..], payload].concat();
    let is_malformed =
        |error: StreamFrameError| assert!(matches!(error, StreamFrameError::Malformed { .. }), "{error}");
    for credit in [0, MAX_CREDIT + 1, u32::MAX] {
        is_malformed(client_error(&with(3, 1, &credit.to_le_bytes())));
    }
    is_malformed(client_error(&with(2, 1, b"")));
    is_malformed(client_error(&with(1, 1, &[1, 0, 0])));
    is_malformed(client_error(&with(1, 1, &[9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])));
    is_malformed(client_error(&with(1, 1, &[1, 5, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])));
    is_malformed(client_error(&with(1, 1, &[1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, b'a', b'b'])));
    is_malformed(client_error(&with(1, 1, &[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 255])));
    // A token that is cut, one that claims more alternatives than there are bytes, and values that are not finite.
    is_malformed(node_error(&with(16, 0, &[1, 0, 0, 0])));
    is_malformed(node_error(&with(16, 0, &[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 9, 0, b'a'])));
    let logprobs = |chosen: f32, count: u16| {
        let token = [1, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0];
        [&token[..], &chosen.to_le_bytes(), &count.to_le_bytes(), &[0, 0]].concat()
    };
    is_malformed(node_error(&with(16, 0, &logprobs(-1.0, u16::MAX))));
    is_malformed(node_error(&with(16, 0, &logprobs(f32::NAN, 0))));
    // More than a token may have, though the bytes are there.
    let padded = |payload: &[u8]| with(16, 0, &[payload, &[0; 1 << 16]].concat());
    let said = |bytes: &[u8]| node_error(bytes).to_string();
    assert!(said(&padded(&logprobs(-1.0, MAX_ALTERNATIVES as u16 + 1))).contains("too many alternatives"));
    assert!(said(&padded(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 16])).contains("too long"));
    let alternative = [&[9, 0, 0, 0, 0, 0, 128, 191, 0, 16][..], &[b'a'; MAX_TOKEN_TEXT]].concat();
    let too_long = [logprobs(-1.0, 17), alternative.repeat(17)].concat();
    assert!(said(&with(16, 0, &too_long)).contains("alternatives are too long"));
    is_malformed(node_error(&with(19, 1, &f32::INFINITY.to_le_bytes())));
    is_malformed(node_error(&with(19, 1, &[0; 3])));
    // Drafts: no token, a part of one, and more than a frame has.
    for n_bytes in [0, 3, 4, 4 + 3, 4 + 4 * 65] {
        is_malformed(client_error(&with(5, 1, &vec![0; n_bytes])));
    }
    for n_bytes in [0, 7, 8, 8 + 3, 8 + 4 * 33] {
        is_malformed(node_error(&with(23, 1, &vec![0; n_bytes])));
    }
    assert_eq!(node_error(&with(5, 1, &[0; 8])), StreamFrameError::UnknownKind(5), "an endpoint's frame");
    assert_eq!(client_error(&with(23, 1, &[0; 12])), StreamFrameError::UnknownKind(23), "a node's frame");
    for flags in [4, 16] {
        let step = with(16, 0, &[1, 0, 0, 0, 1, 0, 0, 0, flags, 0, 0, 0]);
        assert_eq!(node_error(&step), StreamFrameError::Reserved, "a rank without log-probabilities, an unknown flag");
    }
    for report in [[9, 1, 0, 0], [1, 1, 2, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 99]] {
        let step = with(16, 0, &[&[1, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0][..], &report].concat());
        assert!(matches!(node_error(&step), StreamFrameError::Malformed { .. }), "{report:?}");
    }
    let ranked = [&[1, 0, 0, 0, 1, 0, 0, 0, 6, 0, 0, 0][..], &(-1f32).to_le_bytes(), &[0, 0, 0, 0], &[1, 0]].concat();
    is_malformed(node_error(&with(16, 0, &ranked)));
}
