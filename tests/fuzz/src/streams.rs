//! The frames of the connection between an endpoint and a node, in both directions.

use baton_schemas::EngineError;
use baton_schemas::draft::{DraftCounts, DraftReport, DraftedTokens, DrafterKind, DrafterLoss};
use baton_schemas::sequence::{
    Alternative, CachedTokens, FinishReason, GeneratedToken, Logprobs, SequenceEvent, Timings,
};
use baton_schemas::streams::{
    ClientFrame, FrameBuffer, HEAD_BYTES, MAX_BODY_BYTES, MAX_CLIENT_PAYLOAD, MAX_CREDIT, MAX_NODE_PAYLOAD, NewStream,
    NodeFrame, NodeFrameWriter, RawFrame, StartFrame, StreamFrameError, StreamWork, ToldTokens, put_body, put_cancel,
    put_credit, put_start, put_told,
};
use bytes::BytesMut;

/// Frames of an endpoint.
pub(crate) fn client(input: &[u8]) -> bool {
    check(input, MAX_CLIENT_PAYLOAD, |frame| {
        let mut again = BytesMut::new();
        match ClientFrame::parse(frame)? {
            ClientFrame::Start(start) => {
                assert!(start.credit <= MAX_CREDIT && start.body_bytes <= MAX_BODY_BYTES);
                assert!(start.piece.len() <= start.body_bytes);
                let StartFrame { work, credit, traceparent, piece, .. } = start;
                put_start(&mut again, frame.stream, &NewStream { work, credit, traceparent, body: piece });
                // The length of the whole body is the only thing that one piece does not show.
                let at = HEAD_BYTES + 8;
                again[at..at + 4].copy_from_slice(&(start.body_bytes as u32).to_le_bytes());
            }
            ClientFrame::Body(piece) => assert!(put_body(&mut again, frame.stream, piece).is_empty()),
            ClientFrame::Credit(credit) => {
                assert!((1..=MAX_CREDIT).contains(&credit));
                put_credit(&mut again, frame.stream, credit);
            }
            ClientFrame::Cancel => put_cancel(&mut again, frame.stream),
            ClientFrame::Told(ToldTokens { at, tokens }) => {
                assert!(put_told(&mut again, frame.stream, at, &tokens).is_empty());
            }
        }
        assert_eq!(&again[HEAD_BYTES..], frame.payload);
        Ok(())
    })
}

/// Frames of a node. JSON in them is read by `node_messages`.
pub(crate) fn node(input: &[u8]) -> bool {
    check(input, MAX_NODE_PAYLOAD, |frame| {
        let mut again = NodeFrameWriter::default();
        match NodeFrame::parse(frame)? {
            NodeFrame::Step(tokens) => {
                for token in tokens {
                    let token = token?;
                    again.token(token.stream, &token.token).expect("what was read can be written");
                }
            }
            NodeFrame::Vector(vector) => {
                let values: Vec<f32> = vector.values().collect();
                again.vector(frame.stream, &values).expect("its values are finite");
            }
            NodeFrame::Drafted(drafted) => again.drafted(frame.stream, &drafted).expect("what was read can be written"),
            NodeFrame::Accepted | NodeFrame::End | NodeFrame::Alive => assert!(frame.payload.is_empty()),
            NodeFrame::Event(json) | NodeFrame::Error(json) => assert_eq!(json, frame.payload),
        }
        if !again.is_empty() {
            assert_eq!(&again.frames()[HEAD_BYTES..], frame.payload);
        }
        Ok(())
    })
}

/// Reads all frames, as one piece and as small ones. Returns whether the input was read to its end.
fn check(input: &[u8], most: usize, see: impl Fn(RawFrame<'_>) -> Result<(), StreamFrameError>) -> bool {
    let read = |size: usize| -> Result<(usize, usize), StreamFrameError> {
        let mut buffer = FrameBuffer::new(most);
        let mut n_frames = 0;
        for piece in input.chunks(size) {
            buffer.space().extend_from_slice(piece);
            while let Some(frame) = buffer.next_frame()? {
                assert!(frame.payload.len() <= most);
                see(frame)?;
                n_frames += 1;
            }
        }
        Ok((n_frames, buffer.space().len()))
    };
    let whole = read(input.len().max(1));
    assert_eq!(read(input.len() % 61 + 1), whole, "where the bytes are cut makes a difference");
    whole.is_ok_and(|(_, n_left)| n_left == 0)
}

pub(crate) fn client_seeds() -> Vec<Vec<u8>> {
    let mut out = BytesMut::new();
    let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    put_start(
        &mut out,
        1,
        &NewStream {
            work: StreamWork::Generate,
            credit: 64,
            traceparent: Some(traceparent),
            body: br#"{"prompt":[1,2],"sampling":{}}"#,
        },
    );
    put_credit(&mut out, 1, 32);
    put_start(
        &mut out,
        2,
        &NewStream { work: StreamWork::Embed, credit: 64, traceparent: None, body: br#"{"inputs":[[1],[2,3]]}"# },
    );
    put_start(&mut out, 3, &NewStream { work: StreamWork::Loads, credit: 8, traceparent: None, body: b"" });
    put_cancel(&mut out, 3);
    let body = br#"{"vocabulary":"00","tokens":[1,2],"sampling":{}}"#;
    put_start(&mut out, 4, &NewStream { work: StreamWork::Draft, credit: 0, traceparent: None, body });
    put_told(&mut out, 4, 2, &[7, 8, 9]);
    let mut pieces = BytesMut::new();
    put_start(
        &mut pieces,
        1,
        &NewStream { work: StreamWork::Generate, credit: 64, traceparent: None, body: b"{\"prompt\":" },
    );
    pieces[HEAD_BYTES + 8] += 4;
    put_body(&mut pieces, 1, b"[1]}");
    vec![out.to_vec(), pieces.to_vec()]
}

pub(crate) fn node_seeds() -> Vec<Vec<u8>> {
    let counts = DraftCounts { n: 3, n_accepted: 1 };
    let report = DraftReport { verified: Some((DrafterKind::Remote, counts)), loss: Some(DrafterLoss::Late) };
    let drafts = |id| (id == 1).then_some(report);
    let token =
        |id, logprobs| GeneratedToken { id, bytes: b"abc".to_vec(), special: id == 2, logprobs, drafts: drafts(id) };
    let top = vec![Alternative { id: 1, bytes: vec![0xF0, 0x9F], logprob: -0.5 }; 3];
    let mut writer = NodeFrameWriter::default();
    writer.accepted(1);
    writer.event(1, &SequenceEvent::Started(CachedTokens { n_cached: 7, memory: 2, disk: 3 })).expect("it is short");
    for id in 0..4 {
        let logprobs = (id == 3).then(|| Logprobs { chosen: -0.5, rank: Some(2), top: top.clone() });
        writer.token(1 + id % 2, &token(id, logprobs)).expect("it is short");
    }
    let finished = SequenceEvent::Finished { reason: FinishReason::Length, timings: Timings::default() };
    writer.event(1, &finished).expect("it is short");
    writer.alive();
    writer.vector(3, &[0.5, -0.25, 1.0]).expect("it is finite");
    writer.error(2, EngineError::NotFinite);
    writer.end(4);
    writer.drafted(5, &DraftedTokens { from: 3, at: 4, tokens: vec![1, 2] }).expect("it is short");
    vec![writer.frames().to_vec()]
}
