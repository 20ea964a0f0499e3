//! Follows both directions of a tunnel: which request waits for its answer, and for how long.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_schemas::worker::LentDevice;

use super::rpc_commands::{
    AnswerBytes, AnswerProgress, ProtocolFault, Requests, RpcCommand, device_count_answer, memory_answer,
};

/// How long a worker may take for an answer. It computes all that was queued before it: batches of large
/// models take minutes on a processor. A frozen worker is noticed earlier, by other means; this is for a device that hangs.
pub(super) const ANSWER_DEADLINE: Duration = Duration::from_secs(600);

/// How long an engine may send nothing before its first request, or within a request.
pub(super) const REQUEST_DEADLINE: Duration = Duration::from_secs(30);

/// A message that has not come in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LateMessage {
    /// The worker's answer.
    Answer,
    /// The engine's first request, or the rest of one.
    Request,
}

/// The free memory that llama.cpp is told of a worker. It divides the layers by it, and the binding passes on no other
/// shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReportedMemory {
    /// Free memory as the worker reports it, but at most so many bytes.
    AtMost(u64),
    /// So many bytes, whatever the worker reports.
    Told(u64),
}

impl ReportedMemory {
    fn of(self, free: u64) -> u64 {
        match self {
            ReportedMemory::AtMost(most) => free.min(most),
            ReportedMemory::Told(bytes) => bytes,
        }
    }
}

/// How the bytes of an answer are forwarded.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Forward {
    /// They are forwarded as they are.
    AsTheyAre,
    /// They wait for the rest of their answer.
    Nothing,
    /// This answer is forwarded instead.
    Instead(Vec<u8>),
}

/// The worker that has last refused memory, for all workers of an engine.
#[derive(Debug, Clone, Default)]
pub struct Refusals(Arc<Mutex<Option<String>>>);

impl Refusals {
    /// The worker's name.
    pub fn last(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, worker: &str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(worker.to_owned());
    }
}

/// The state of one connection.
#[derive(Debug)]
pub(super) struct RpcExchange {
    requests: Requests,
    /// The request that waits for its answer.
    awaited: Option<Awaited>,
    reported: ReportedMemory,
    /// The worker's devices. Its server must count as many.
    n_devices: u32,
    /// How long the engine has sent nothing of a request that it must complete.
    unsent: Duration,
    /// The worker's name, and where its refusals of memory are noted.
    refusals: Option<(String, Refusals)>,
}

#[derive(Debug)]
struct Awaited {
    command: RpcCommand,
    waited: Duration,
    answer: AnswerBytes,
}

impl RpcExchange {
    /// Between an engine and a worker with these devices.
    pub(super) fn new(reported: ReportedMemory, devices: &[LentDevice]) -> RpcExchange {
        RpcExchange {
            requests: Requests::new(devices.iter().map(|device| device.memory).max().unwrap_or(0)),
            awaited: None,
            reported,
            n_devices: devices.len() as u32,
            unsent: Duration::ZERO,
            refusals: None,
        }
    }

    /// Notes when this worker refuses memory.
    pub(super) fn noting(mut self, worker: &str, refusals: Refusals) -> Self {
        self.refusals = Some((worker.to_owned(), refusals));
        self
    }

    /// Takes bytes of the engine.
    pub(super) fn request(&mut self, bytes: &[u8]) -> Result<(), ProtocolFault> {
        if self.awaited.is_some() {
            return Err(ProtocolFault::RequestBeforeAnswer);
        }
        self.unsent = Duration::ZERO;
        if let Some(command) = self.requests.read(bytes)? {
            self.awaited = Some(Awaited { command, waited: Duration::ZERO, answer: AnswerBytes::default() });
        }
        Ok(())
    }

    /// Takes bytes of the worker.
    pub(super) fn answer(&mut self, bytes: &[u8]) -> Result<Forward, ProtocolFault> {
        let awaited = self.awaited.as_mut().ok_or(ProtocolFault::Unasked)?;
        let progress = awaited.answer.read(bytes)?;
        let command = awaited.command;
        match (progress, command) {
            // Judged as a whole.
            (AnswerProgress::Incomplete, RpcCommand::GetDeviceMemory | RpcCommand::DeviceCount) => {
                return Ok(Forward::Nothing);
            }
            (AnswerProgress::Incomplete, _) => return Ok(Forward::AsTheyAre),
            (AnswerProgress::Complete, _) => {}
        }
        let answer = std::mem::take(&mut awaited.answer);
        self.awaited = None;
        match command {
            RpcCommand::AllocBuffer => {
                if let (true, Some((worker, refusals))) = (answer.is_no_buffer(), &self.refusals) {
                    refusals.note(worker);
                }
                Ok(Forward::AsTheyAre)
            }
            RpcCommand::GetDeviceMemory => {
                let (free, total) = answer.memory().ok_or(ProtocolFault::Content(command))?;
                let free = self.reported.of(free);
                Ok(Forward::Instead(memory_answer(free, total.max(free)).into()))
            }
            RpcCommand::DeviceCount => match answer.device_count() {
                Some(n) if n == self.n_devices => Ok(Forward::Instead(device_count_answer(n).into())),
                _ => Err(ProtocolFault::Content(command)),
            },
            _ => Ok(Forward::AsTheyAre),
        }
    }

    /// Counts time that has passed. Returns what is then overdue.
    pub(super) fn overdue_after(&mut self, passed: Duration) -> Option<LateMessage> {
        if let Some(awaited) = &mut self.awaited {
            awaited.waited += passed;
            return (awaited.waited > ANSWER_DEADLINE).then_some(LateMessage::Answer);
        }
        // An engine may be idle between two requests, but not before its first one.
        if self.requests.is_between() {
            return None;
        }
        self.unsent += passed;
        (self.unsent > REQUEST_DEADLINE).then_some(LateMessage::Request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(n: usize) -> Vec<LentDevice> {
        vec![LentDevice { name: "CPU".into(), memory: 1 << 30, is_processor: true }; n]
    }

    fn memory_request() -> Vec<u8> {
        [&[11][..], &4u64.to_le_bytes(), &[0; 4]].concat()
    }

    #[test]
    fn an_answer_is_awaited_from_its_request_on_and_only_then() {
        let mut exchange = RpcExchange::new(ReportedMemory::AtMost(u64::MAX), &devices(1));
        // A graph has no answer: an engine that is idle after it is not overdue.
        let graph = [&[10][..], &3u64.to_le_bytes(), b"abc"].concat();
        exchange.request(&graph).unwrap();
        let second = Duration::from_secs(1);
        assert_eq!(exchange.overdue_after(ANSWER_DEADLINE + second), None);
        exchange.request(&memory_request()).unwrap();
        assert_eq!(exchange.overdue_after(ANSWER_DEADLINE), None);
        assert_eq!(exchange.overdue_after(second), Some(LateMessage::Answer));
        assert_eq!(exchange.request(&graph), Err(ProtocolFault::RequestBeforeAnswer));
        exchange.answer(&memory_answer(1, 2)).unwrap();
        assert_eq!(exchange.overdue_after(ANSWER_DEADLINE + second), None);
        assert_eq!(exchange.answer(&[0]), Err(ProtocolFault::Unasked));
    }

    #[test]
    fn an_engine_begins_and_completes_its_requests() {
        let mut exchange = RpcExchange::new(ReportedMemory::AtMost(u64::MAX), &devices(1));
        let second = Duration::from_secs(1);
        assert_eq!(exchange.overdue_after(REQUEST_DEADLINE), None);
        assert_eq!(exchange.overdue_after(second), Some(LateMessage::Request), "it says nothing");
        exchange.request(&[10]).unwrap();
        assert_eq!(exchange.overdue_after(REQUEST_DEADLINE), None);
        exchange.request(&3u64.to_le_bytes()).unwrap();
        assert_eq!(exchange.overdue_after(REQUEST_DEADLINE), None);
        assert_eq!(exchange.overdue_after(second), Some(LateMessage::Request), "the graph does not come");
    }

    #[test]
    fn memory_is_reported_as_told() {
        let check = |reported, [free, total]: [u64; 2]| {
            let mut exchange = RpcExchange::new(reported, &devices(1));
            exchange.request(&memory_request()).unwrap();
            let bytes = memory_answer(8_000, 9_000);
            assert_eq!(exchange.answer(&bytes[..10]).unwrap(), Forward::Nothing);
            assert_eq!(exchange.answer(&bytes[10..]).unwrap(), Forward::Instead(memory_answer(free, total).into()));
        };
        check(ReportedMemory::AtMost(u64::MAX), [8_000, 9_000]);
        check(ReportedMemory::AtMost(3_000), [3_000, 9_000]);
        check(ReportedMemory::Told(20_000), [20_000, 20_000]);
    }

    #[test]
    fn a_worker_that_refuses_memory_is_noted() {
        let refusals = Refusals::default();
        let mut exchange =
            RpcExchange::new(ReportedMemory::AtMost(u64::MAX), &devices(1)).noting("spark", refusals.clone());
        let mut allocate = |buffer: u64| {
            exchange.request(&[&[0][..], &12u64.to_le_bytes(), &[7; 12]].concat()).unwrap();
            // The buffer's address and size.
            assert_eq!(exchange.answer(&memory_answer(buffer, 9)[..11]).unwrap(), Forward::AsTheyAre);
            assert_eq!(exchange.answer(&memory_answer(buffer, 9)[11..]).unwrap(), Forward::AsTheyAre);
            refusals.last()
        };
        assert_eq!(allocate(4096), None);
        assert_eq!(allocate(0), Some("spark".to_owned()));
    }

    #[test]
    fn a_worker_has_the_devices_that_it_has_described() {
        let asked = || {
            let mut exchange = RpcExchange::new(ReportedMemory::AtMost(u64::MAX), &devices(2));
            exchange.request(&[&[15][..], &0u64.to_le_bytes()].concat()).unwrap();
            exchange
        };
        let two = device_count_answer(2);
        let mut exchange = asked();
        assert_eq!(exchange.answer(&two[..9]), Ok(Forward::Nothing));
        assert_eq!(exchange.answer(&two[9..]), Ok(Forward::Instead(two.into())));
        let wrong = ProtocolFault::Content(RpcCommand::DeviceCount);
        assert_eq!(asked().answer(&device_count_answer(u32::MAX)), Err(wrong));
        assert_eq!(asked().answer(&memory_answer(1, 2)), Err(wrong));
    }
}
