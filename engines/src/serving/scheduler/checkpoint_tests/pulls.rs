//! A prefill node that sends what a test says.

use std::sync::{Arc, Mutex};

use baton_link::handoff::{KvPuller, LocalKv, PullEnd, PullEvent, PullOrder};
use baton_schemas::handoff::{HandoffFailure, HandoffReport, KvSource, LinkMeasurement};
use baton_schemas::kv::{
    Codec, Fingerprint, Handoff, HandoffId, HandoffReader, HandoffRecord, HandoffWriter, Mac, ModelKnowledge,
    StreamChoice,
};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc;

use super::strict::{chunk, layout, part};

const KEY: &[u8] = b"key";

/// The positions of a chunk.
const CHUNK: u32 = 16;

/// How a pull goes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Script {
    /// It breaks off after so many chunks.
    pub(super) breaks_after: Option<u32>,
    /// The states come before the last chunk.
    pub(super) states_first: bool,
    /// The end comes without states.
    pub(super) lacks_states: bool,
    /// It knows of no checkpoints, as nodes of earlier versions.
    pub(super) lacks_checkpoints: bool,
    /// The chunk with the rows before a checkpoint goes on after it, where the states cannot be taken.
    pub(super) crosses_checkpoints: bool,
    /// It has other weights, which compute KV at this distance.
    pub(super) distance: Option<f64>,
}

/// Notes the first and the last position of each pull, and the checkpoints that it asks for.
#[derive(Default)]
pub(super) struct ScriptedPeer {
    pub(super) script: Mutex<Script>,
    pub(super) pulled: Mutex<Vec<(u32, u32)>>,
    pub(super) asked: Mutex<Vec<Vec<u32>>>,
}

impl ScriptedPeer {
    /// The verified records of a pull.
    fn events(&self, order: &PullOrder) -> Vec<PullEvent> {
        let Script { breaks_after, states_first, lacks_states, lacks_checkpoints, crosses_checkpoints, distance } =
            *self.script.lock().unwrap();
        let PullOrder { tokens, start, .. } = order;
        let end = tokens.len() as u32;
        let handoff = Handoff {
            id: HandoffId([7; 16]),
            fingerprint: Fingerprint { vocabulary: [1; 32], weights: [2; 32] },
            layout: layout(),
            start: *start,
            tokens: tokens.clone(),
        };
        let mut reader = HandoffReader::new(KEY, handoff.clone(), &[Codec::None]).unwrap();
        let checkpoints = if lacks_checkpoints { &[][..] } else { &order.checkpoints };
        let (codec, mac, known) = (Codec::None, Mac::Blake3, ModelKnowledge::default());
        let choice = StreamChoice { codec, state_codec: Codec::None, mac, checkpoints, known };
        let (mut writer, head) = HandoffWriter::begin_as(KEY, handoff, choice).unwrap();
        let mut records = head;
        let grid = (*start..end).step_by(CHUNK as usize).skip(1);
        let mut ends: Vec<u32> = grid.chain([end]).chain(checkpoints.iter().copied()).collect();
        ends.sort_unstable();
        ends.dedup();
        ends.retain(|end| !crosses_checkpoints || !checkpoints.contains(end));
        let mut p0 = *start;
        for (n_sent, p1) in ends.into_iter().enumerate() {
            if breaks_after == Some(n_sent as u32) {
                break;
            }
            let is_last = p1 == end && !lacks_states;
            if is_last && states_first {
                records.extend(writer.state(&part(tokens)).unwrap());
            }
            records.extend(writer.frame(&chunk(tokens, p0..p1)).unwrap());
            for checkpoint in checkpoints.iter().filter(|position| (p0 + 1..=p1).contains(position)) {
                records.extend(writer.state(&part(&tokens[..*checkpoint as usize])).unwrap());
            }
            if is_last && !states_first {
                records.extend(writer.state(&part(tokens)).unwrap());
            }
            p0 = p1;
        }
        let mut events = Vec::new();
        let bytes = records.concat();
        let mut bytes = &bytes[..];
        while let Some(record) = reader.read(&mut bytes).unwrap() {
            match record {
                HandoffRecord::Frame(kv) => events.push(PullEvent::Chunk(kv)),
                HandoffRecord::State(state) => events.push(PullEvent::State(state)),
                HandoffRecord::Head(_) => {}
                other => panic!("{other:?}"),
            }
        }
        let end = match breaks_after {
            Some(_) => PullEnd::from(HandoffFailure::PrefillLost),
            None => {
                let report = HandoffReport { kv_distance: distance, ..HandoffReport::default() };
                PullEnd { report, prefilled_at: None }
            }
        };
        events.push(PullEvent::End(end));
        events
    }
}

impl KvPuller for ScriptedPeer {
    fn introduce(&self, _: LocalKv) {}

    fn pull(&self, order: PullOrder, _: Arc<dyn Fn() + Send + Sync>) -> mpsc::Receiver<PullEvent> {
        self.asked.lock().unwrap().push(order.checkpoints.clone());
        self.pulled.lock().unwrap().push((order.start, order.tokens.len() as u32));
        let events = self.events(&order);
        let (sender, receiver) = mpsc::channel(events.len());
        events.into_iter().for_each(|event| sender.try_send(event).unwrap());
        receiver
    }

    fn takes_other_weights(&self) -> bool {
        self.script.lock().unwrap().distance.is_some()
    }

    fn measure_link(&self, _: &KvSource) -> BoxFuture<'static, Result<LinkMeasurement, HandoffFailure>> {
        async { Err(HandoffFailure::PrefillDown) }.boxed()
    }
}
