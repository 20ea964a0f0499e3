//! What nodes and endpoints send each other: handoff streams and JSON.

use std::fmt::Debug;
use std::net::SocketAddr;

use baton_link::proof::{self, ConnectionEnd, Proven, Question};
use baton_schemas::embed::{EmbedEvent, EmbedSequences};
use baton_schemas::handoff::PrefillRequest;
use baton_schemas::kv::record::RecordKind;
use baton_schemas::kv::{Codec, Handoff, HandoffHead, HandoffReader, HandoffRecord, Mac};
use baton_schemas::{EngineError, SequenceEvent, SequenceRequest, node};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::sample;

/// The handoffs whose streams are read: a byte says which.
fn handoff(number: u8) -> Handoff {
    match number % 5 {
        0 => sample::handoff(),
        1 => sample::hybrid(),
        2 => sample::quantized(),
        3 => sample::recurrent(),
        _ => sample::compressed(),
    }
}

/// The number of a handoff, then the raw bytes of a stream. Without the key no change passes the MAC check, so this covers the code before it.
pub(crate) fn kv_reader_raw(input: &[u8]) -> bool {
    let [number, input @ ..] = input else { return false };
    let mut checked = Checked::new(handoff(*number));
    // Cut in as many ways as there are lengths.
    let size = input.len() % 257 + 1;
    input.chunks(size).all(|mut piece| checked.read(&mut piece)) && checked.reader.is_ended()
}

/// The number of a handoff, then records, each as `u8 kind, u16 length, payload`, with valid headers and MACs added, so that the payloads are parsed.
pub(crate) fn kv_reader(input: &[u8]) -> bool {
    let Some((number, mut input)) = input.split_first() else { return false };
    let mut checked = Checked::new(handoff(*number));
    let mut index = 0;
    while let [kind, l0, l1, rest @ ..] = input {
        let Some(kind) = RecordKind::from_number(*kind) else { return false };
        let (payload, rest) = rest.split_at(rest.len().min(usize::from(u16::from_le_bytes([*l0, *l1]))));
        let record = sample::sealed(kind, index, payload);
        if !checked.read(&mut &record[..]) {
            return false;
        }
        input = rest;
        index += 1;
    }
    checked.reader.is_ended()
}

/// A reader, and the conditions that its output must meet.
struct Checked {
    handoff: Handoff,
    reader: HandoffReader,
    next: u32,
    /// The positions of the states that were yielded, and those that the head names.
    states: Vec<u32>,
    states_at: Vec<u32>,
}

impl Checked {
    fn new(handoff: Handoff) -> Self {
        let reader = sample::reader_of(handoff.clone());
        Checked { next: handoff.start, reader, handoff, states: Vec::new(), states_at: Vec::new() }
    }

    /// Returns true if the reader accepts more bytes.
    fn read(&mut self, input: &mut &[u8]) -> bool {
        loop {
            match self.reader.read(input) {
                Err(refused) => {
                    assert_eq!(self.reader.read(&mut &b"x"[..]), Err(refused), "a reader that refused is dead");
                    return false;
                }
                Ok(None) => {
                    assert!(input.is_empty(), "bytes are left over");
                    return true;
                }
                Ok(Some(HandoffRecord::Frame(kv))) => {
                    assert_eq!(kv.span().p0, self.next, "frames are consecutive");
                    self.next = kv.span().p1;
                    assert_eq!(self.reader.position(), self.next);
                    let chunk = kv.into_chunk();
                    chunk.check(&self.handoff.layout).expect("a verified frame fits its layout");
                    for (rows, layers) in chunk.sections.iter().zip(&self.handoff.layout.sections) {
                        for (rows, shape) in rows.layers.iter().zip(&layers.layers) {
                            let v = shape.v.map_or(shape.k.dtype, |v| v.dtype);
                            let values = shape.k.dtype.values(&rows.k).chain(v.values(&rows.v));
                            assert!(values.into_iter().all(f32::is_finite), "a value is not finite");
                        }
                    }
                }
                Ok(Some(HandoffRecord::State(state))) => {
                    self.states.push(state.position());
                    let shapes = &self.handoff.layout.states;
                    assert_eq!(state.tensors().len(), shapes.len(), "all states of a position come together");
                    for (tensor, shape) in state.tensors().iter().zip(shapes) {
                        assert_eq!(tensor.len(), shape.values.bytes());
                        assert!(shape.values.dtype.values(tensor).all(f32::is_finite), "a state is not finite");
                    }
                }
                Ok(Some(HandoffRecord::End(_))) => {
                    assert_eq!(self.next, self.handoff.end(), "all is there at the end");
                    assert_eq!(self.states, self.states_at, "all states are there at the end");
                    let last = Some(self.handoff.end()).filter(|_| !self.handoff.layout.states.is_empty());
                    assert_eq!(self.states.last().copied(), last);
                }
                Ok(Some(HandoffRecord::Head(head))) => self.states_at = head.states_at,
                Ok(Some(HandoffRecord::Wait(_) | HandoffRecord::Error(_))) => {}
            }
        }
    }
}

/// JSON of the node protocol: a byte that names the type, then the text. What parses is written, parsed again, and
/// is the same.
pub(crate) fn messages(input: &[u8]) -> bool {
    let [kind, json @ ..] = input else { return false };
    match kind % 14 {
        0 => round_trip::<SequenceRequest>(json),
        1 => round_trip::<SequenceEvent>(json),
        2 => round_trip::<node::NodeErrorReply>(json),
        3 => round_trip::<node::NodeDescription>(json),
        4 => round_trip::<node::NodeLoad>(json),
        5 => round_trip::<node::RenderRequest>(json),
        6 => round_trip::<node::ChildEvent>(json),
        7 => round_trip::<EngineError>(json),
        8 => round_trip::<PrefillRequest>(json),
        9 => round_trip::<EmbedSequences>(json),
        10 => round_trip::<EmbedEvent>(json),
        11 => round_trip::<node::TokenizeRequest>(json),
        12 => round_trip::<node::TokenList>(json),
        _ => round_trip::<node::DetokenizedText>(json),
    }
}

/// The proof of the cluster key, which strangers may ask for and answer: 0 and a question's message, or 1 and an answer in JSON.
/// Nothing but the key proves it.
pub(crate) fn key_proofs(input: &[u8]) -> bool {
    let [side, text @ ..] = input else { return false };
    let place = ConnectionEnd { address: SocketAddr::from(([10, 0, 0, 7], 9000)), certificate: None };
    if side % 2 == 0 {
        let Ok(message) = std::str::from_utf8(text) else { return false };
        let proven = Proven { process: 7, role: node::Role::Prefill };
        let Some(answer) = proof::answer(b"key", message, place, proven) else { return false };
        assert_ne!(Question::new("another key").verify(&answer, place), Ok(proven));
        return true;
    }
    let Ok(answer) = serde_json::from_slice::<node::KeyProof>(text) else { return false };
    let verified = Question::new("key").verify(&answer, place);
    assert!(verified.is_err(), "an answer that is older than its question proves the key: {answer:?}");
    true
}

pub(crate) fn key_proofs_seeds() -> Vec<Vec<u8>> {
    let place = ConnectionEnd { address: SocketAddr::from(([10, 0, 0, 7], 9000)), certificate: None };
    let asked = Question::new("key");
    let proven = Proven { process: 7, role: node::Role::Prefill };
    let answer = proof::answer(b"key", asked.message(), place, proven).expect("a question is answered");
    let answer = serde_json::to_vec(&answer).expect("an answer can be written");
    vec![[&[0], asked.message().as_bytes()].concat(), [&[1], &answer[..]].concat()]
}

fn round_trip<T: DeserializeOwned + Serialize + PartialEq + Debug>(json: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<T>(json) else { return false };
    let written = serde_json::to_string(&value).expect("a message can be written");
    let again: T = serde_json::from_str(&written).expect("what was written can be read");
    assert_eq!(again, value, "{written}");
    true
}

/// The streams that both targets begin with: every codec and MAC, and every handoff.
fn streams() -> Vec<(u8, Vec<Vec<u8>>)> {
    let coded = Codec::OF_ROWS.into_iter().flat_map(|codec| Mac::ALL.map(|mac| (0, codec, mac)));
    let others = [1, 2, 3].map(|number| (number, Codec::None, Mac::Blake3));
    let hybrid = [Codec::PlanesZstd, Codec::StateF16, Codec::StateInt8].map(|codec| (1, codec, Mac::Blake3));
    let all = coded.chain(others).chain(hybrid);
    all.map(|(number, codec, mac)| (number, sample::stream_of(handoff(number), codec, mac))).collect()
}

pub(crate) fn kv_reader_raw_seeds() -> Vec<Vec<u8>> {
    streams().into_iter().map(|(number, records)| [vec![number], records.concat()].concat()).collect()
}

pub(crate) fn kv_reader_seeds() -> Vec<Vec<u8>> {
    let unsealed = |(number, records): (u8, Vec<Vec<u8>>)| {
        let records = records.into_iter().enumerate();
        let unsealed = records.flat_map(|(index, record)| {
            let payload = sample::payload(&record);
            let length = u16::try_from(payload.len()).expect("the sample's records are short");
            [&[sample::kind(&record, index as u32) as u8][..], &length.to_le_bytes(), payload].concat()
        });
        std::iter::once(number).chain(unsealed).collect()
    };
    // The target seals with BLAKE3.
    let has_blake3 = |(_, records): &(u8, Vec<Vec<u8>>)| {
        let head = serde_json::from_slice::<HandoffHead>(sample::payload(&records[0])).expect("the head of the sample");
        head.mac == Mac::Blake3
    };
    streams().into_iter().filter(has_blake3).map(unsealed).collect()
}

pub(crate) fn messages_seeds() -> Vec<Vec<u8>> {
    let texts = [
        r#"{"prompt":[1,2],"sampling":{},"max_tokens":5,"top_logprobs":2,"group":{"id":7,"size":2},"cache_scope":9}"#,
        r#"{"finished":{"reason":"stop","timings":{"prompt_n":3}}}"#,
        r#"{"error":{"kind":"version_mismatch","node":{"oldest":2,"newest":3},"endpoint":{"oldest":1,"newest":1}}}"#,
        r#"{"model":"m","engine":"sim","architecture":"llama","n_ctx":1,"n_ctx_train":1,"n_vocab":1,"n_slots":1,"memory":{},"has_chat_template":true,"streams":{"oldest":1,"newest":2}}"#,
        r#"{"active_slots":1,"queued":2,"free_cells":3,"prefill_tps":1e3,"decode_tps":0.1}"#,
        r#"{"conversation":{"messages":[{"role":"user","content":"hi"}]}}"#,
        r#"{"event":"failed","message":"a","summary":"b"}"#,
        r#"{"kind":"context_overflow","n_prompt":5,"n_ctx":4}"#,
    ];
    texts.iter().enumerate().map(|(kind, json)| [&[kind as u8], json.as_bytes()].concat()).collect()
}
