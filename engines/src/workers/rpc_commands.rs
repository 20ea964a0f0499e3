//! The bytes of ggml's RPC protocol, as far as a pipe must understand them: where a request ends, and which one is
//! answered.
//!
//! The layout is that of ggml-rpc.cpp, version 7:
//!
//! ```text
//! request: command (1 byte), length (8 bytes), content      answer: length (8 bytes), content
//! ```
//!
//! All integers are little-endian. Some commands have no answer. The client waits for the answer of a command that has
//! one before it sends the next command, so at most one is outstanding. Nothing is kept but the numbers, and an answer
//! about memory.

/// Bytes before the content of a request.
const REQUEST_HEAD: usize = 1 + 8;

/// Bytes before the content of an answer.
const ANSWER_HEAD: usize = 8;

/// The most bytes of a tensor's values in one request. The server allocates what a request announces.
const MAX_TENSOR_BYTES: u64 = 16 << 30;

/// The most bytes of a graph: a graph has some thousand tensors of some hundred bytes.
const MAX_GRAPH_BYTES: u64 = 256 << 20;

/// The most bytes of any other request: some tensors without their values.
const MAX_OTHER_BYTES: u64 = 64 << 10;

/// The most bytes of an answer: a tensor's values.
const MAX_ANSWER_BYTES: u64 = MAX_TENSOR_BYTES;

/// Free and total memory, two integers.
const MEMORY_ANSWER: u64 = 16;

/// The number of devices, an integer of 4 bytes.
const DEVICE_COUNT_ANSWER: u64 = 4;

/// The longest content that is looked at.
const MAX_KEPT: u64 = MEMORY_ANSWER;

/// The commands, with ggml's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RpcCommand {
    AllocBuffer,
    GetAlignment,
    GetMaxSize,
    BufferGetBase,
    FreeBuffer,
    BufferClear,
    SetTensor,
    SetTensorHash,
    GetTensor,
    CopyTensor,
    GraphCompute,
    GetDeviceMemory,
    InitTensor,
    GetAllocSize,
    Hello,
    DeviceCount,
    GraphRecompute,
    MemsetTensor,
}

impl RpcCommand {
    /// In the order of ggml's numbers.
    const ALL: [RpcCommand; 18] = [
        RpcCommand::AllocBuffer,
        RpcCommand::GetAlignment,
        RpcCommand::GetMaxSize,
        RpcCommand::BufferGetBase,
        RpcCommand::FreeBuffer,
        RpcCommand::BufferClear,
        RpcCommand::SetTensor,
        RpcCommand::SetTensorHash,
        RpcCommand::GetTensor,
        RpcCommand::CopyTensor,
        RpcCommand::GraphCompute,
        RpcCommand::GetDeviceMemory,
        RpcCommand::InitTensor,
        RpcCommand::GetAllocSize,
        RpcCommand::Hello,
        RpcCommand::DeviceCount,
        RpcCommand::GraphRecompute,
        RpcCommand::MemsetTensor,
    ];

    fn of_number(number: u8) -> Result<RpcCommand, ProtocolFault> {
        RpcCommand::ALL.get(usize::from(number)).copied().ok_or(ProtocolFault::UnknownCommand(number))
    }

    /// Returns true if the server answers.
    fn is_answered(self) -> bool {
        match self {
            RpcCommand::SetTensor
            | RpcCommand::FreeBuffer
            | RpcCommand::BufferClear
            | RpcCommand::GraphCompute
            | RpcCommand::GraphRecompute
            | RpcCommand::InitTensor
            | RpcCommand::MemsetTensor => false,
            RpcCommand::AllocBuffer
            | RpcCommand::GetAlignment
            | RpcCommand::GetMaxSize
            | RpcCommand::BufferGetBase
            | RpcCommand::SetTensorHash
            | RpcCommand::GetTensor
            | RpcCommand::CopyTensor
            | RpcCommand::GetDeviceMemory
            | RpcCommand::GetAllocSize
            | RpcCommand::Hello
            | RpcCommand::DeviceCount => true,
        }
    }

    fn max_bytes(self, max_tensor: u64) -> u64 {
        match self {
            RpcCommand::SetTensor => max_tensor.saturating_add(MAX_OTHER_BYTES),
            RpcCommand::GraphCompute => MAX_GRAPH_BYTES,
            _ => MAX_OTHER_BYTES,
        }
    }
}

/// Bytes that are not ggml's RPC protocol. The connection must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum ProtocolFault {
    #[error("there is no command {0}")]
    UnknownCommand(u8),
    #[error("a request of {bytes} bytes is too long for its command {command:?}")]
    Request { command: RpcCommand, bytes: u64 },
    #[error("an answer of {0} bytes is too long")]
    Answer(u64),
    #[error("the answer to {0:?} is not as the worker has described itself")]
    Content(RpcCommand),
    #[error("an answer came to no request")]
    Unasked,
    #[error("a request came before the answer of the last one")]
    RequestBeforeAnswer,
}

/// Follows the bytes of the requests.
#[derive(Debug)]
pub(super) struct Requests {
    head: [u8; REQUEST_HEAD],
    n_head: usize,
    n_left: u64,
    /// At least one request is complete.
    has_begun: bool,
    /// The most bytes of a tensor.
    max_tensor: u64,
}

impl Requests {
    /// To devices of which the largest has this much memory, bytes; 0 if that is unknown.
    pub(super) fn new(memory: u64) -> Requests {
        let max_tensor = if memory == 0 { MAX_TENSOR_BYTES } else { memory.min(MAX_TENSOR_BYTES) };
        Requests { head: [0; REQUEST_HEAD], n_head: 0, n_left: 0, has_begun: false, max_tensor }
    }

    /// Returns true if the last request is complete, and there was one.
    pub(super) fn is_between(&self) -> bool {
        self.has_begun && self.n_head == 0
    }

    /// Takes the next bytes. Returns the last of their complete requests that is answered, if there is one.
    pub(super) fn read(&mut self, mut bytes: &[u8]) -> Result<Option<RpcCommand>, ProtocolFault> {
        let mut answered = None;
        while !bytes.is_empty() {
            if answered.is_some() {
                return Err(ProtocolFault::RequestBeforeAnswer);
            }
            if self.n_head < REQUEST_HEAD {
                self.n_head += fill(&mut self.head[self.n_head..], &mut bytes);
                if self.n_head < REQUEST_HEAD {
                    break;
                }
                let command = RpcCommand::of_number(self.head[0])?;
                self.n_left = number(&self.head[1..]);
                if self.n_left > command.max_bytes(self.max_tensor) {
                    return Err(ProtocolFault::Request { command, bytes: self.n_left });
                }
            }
            skip(&mut self.n_left, &mut bytes);
            if self.n_left == 0 {
                self.n_head = 0;
                self.has_begun = true;
                answered = Some(RpcCommand::of_number(self.head[0])?).filter(|command| command.is_answered());
            }
        }
        Ok(answered)
    }
}

/// Follows the bytes of one answer.
#[derive(Debug, Default)]
pub(super) struct AnswerBytes {
    head: [u8; ANSWER_HEAD],
    n_head: usize,
    n_left: u64,
    /// The content, if it is no longer than [`MAX_KEPT`].
    kept: Vec<u8>,
}

/// How far an answer is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AnswerProgress {
    /// More bytes follow.
    Incomplete,
    /// These bytes end it.
    Complete,
}

impl AnswerBytes {
    /// Takes the next bytes of the answer.
    pub(super) fn read(&mut self, mut bytes: &[u8]) -> Result<AnswerProgress, ProtocolFault> {
        if self.n_head < ANSWER_HEAD {
            self.n_head += fill(&mut self.head[self.n_head..], &mut bytes);
            if self.n_head < ANSWER_HEAD {
                return Ok(AnswerProgress::Incomplete);
            }
            self.n_left = number(&self.head);
            if self.n_left > MAX_ANSWER_BYTES {
                return Err(ProtocolFault::Answer(self.n_left));
            }
        }
        if number(&self.head) <= MAX_KEPT {
            let n = bytes.len().min(number(&self.head) as usize - self.kept.len());
            self.kept.extend_from_slice(&bytes[..n]);
        }
        skip(&mut self.n_left, &mut bytes);
        match (self.n_left, bytes.is_empty()) {
            (0, true) => Ok(AnswerProgress::Complete),
            (0, false) => Err(ProtocolFault::Unasked),
            (_, _) => Ok(AnswerProgress::Incomplete),
        }
    }

    /// Free and total memory, bytes, if this is a complete answer that has them.
    pub(super) fn memory(&self) -> Option<(u64, u64)> {
        let (free, total) = self.kept.split_at_checked(8)?;
        (total.len() == 8).then(|| (number(free), number(total)))
    }

    /// Returns true if this is the complete answer to a request for a buffer, and there is none: its address is 0.
    pub(super) fn is_no_buffer(&self) -> bool {
        self.memory().is_some_and(|(address, _)| address == 0)
    }

    /// The number of devices, if this is a complete answer that has it.
    pub(super) fn device_count(&self) -> Option<u32> {
        Some(u32::from_le_bytes(self.kept.as_slice().try_into().ok()?))
    }
}

/// An answer with this free and total memory.
pub(super) fn memory_answer(free: u64, total: u64) -> [u8; ANSWER_HEAD + MEMORY_ANSWER as usize] {
    let mut bytes = [0; ANSWER_HEAD + MEMORY_ANSWER as usize];
    for (place, value) in bytes.chunks_exact_mut(8).zip([MEMORY_ANSWER, free, total]) {
        place.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// An answer with this number of devices.
pub(super) fn device_count_answer(n: u32) -> [u8; ANSWER_HEAD + DEVICE_COUNT_ANSWER as usize] {
    let mut bytes = [0; ANSWER_HEAD + DEVICE_COUNT_ANSWER as usize];
    bytes[..ANSWER_HEAD].copy_from_slice(&DEVICE_COUNT_ANSWER.to_le_bytes());
    bytes[ANSWER_HEAD..].copy_from_slice(&n.to_le_bytes());
    bytes
}

/// Moves bytes from the front of `bytes` into `place`, and returns how many.
fn fill(place: &mut [u8], bytes: &mut &[u8]) -> usize {
    let n = place.len().min(bytes.len());
    let (taken, rest) = bytes.split_at(n);
    place[..n].copy_from_slice(taken);
    *bytes = rest;
    n
}

/// Drops bytes of a content of which `n_left` are still to come.
fn skip(n_left: &mut u64, bytes: &mut &[u8]) {
    let n = usize::try_from(*n_left).map_or(bytes.len(), |n| n.min(bytes.len()));
    *bytes = &bytes[n..];
    *n_left -= n as u64;
}

/// Eight bytes as a number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(command: u8, content: &[u8]) -> Vec<u8> {
        [&[command][..], &(content.len() as u64).to_le_bytes(), content].concat()
    }

    #[test]
    fn requests_are_followed_however_they_are_cut() {
        // A graph, which has no answer, and then the question for a device's memory, which has one.
        let bytes = [request(10, &[7; 300]), request(11, &[0; 4])].concat();
        for size in [1, 5, 9, 100, 322] {
            let mut requests = Requests::new(1 << 30);
            let answered: Vec<_> = bytes.chunks(size).filter_map(|piece| requests.read(piece).unwrap()).collect();
            assert_eq!(answered, [RpcCommand::GetDeviceMemory], "{size}");
        }
    }

    #[test]
    fn bytes_of_another_protocol_end_the_connection() {
        let check = |bytes: &[u8], expected| assert_eq!(Requests::new(1 << 30).read(bytes), Err(expected));
        check(b"GET / HTTP/1.1\r\n", ProtocolFault::UnknownCommand(b'G'));
        check(&request(18, &[]), ProtocolFault::UnknownCommand(18));
        let graph = [&[10][..], &u64::MAX.to_le_bytes()].concat();
        check(&graph, ProtocolFault::Request { command: RpcCommand::GraphCompute, bytes: u64::MAX });
        let tensor = [&[6][..], &(2u64 << 30).to_le_bytes()].concat();
        check(&tensor, ProtocolFault::Request { command: RpcCommand::SetTensor, bytes: 2 << 30 });
        check(&[request(14, &[0; 24]), vec![15]].concat(), ProtocolFault::RequestBeforeAnswer);
        assert_eq!(AnswerBytes::default().read(&u64::MAX.to_le_bytes()), Err(ProtocolFault::Answer(u64::MAX)));
        let two = [&1u64.to_le_bytes()[..], &[1, 2]].concat();
        assert_eq!(AnswerBytes::default().read(&two), Err(ProtocolFault::Unasked));
    }

    #[test]
    fn an_answer_is_complete_with_its_last_byte_and_one_about_memory_is_read() {
        let bytes = memory_answer(3 << 30, 1 << 40);
        for size in [1, 7, 24] {
            let mut answer = AnswerBytes::default();
            let progress: Vec<_> = bytes.chunks(size).map(|piece| answer.read(piece).unwrap()).collect();
            let complete = progress.iter().filter(|progress| **progress == AnswerProgress::Complete).count();
            assert_eq!((complete, progress.last()), (1, Some(&AnswerProgress::Complete)), "{size}");
            assert_eq!(answer.memory(), Some((3 << 30, 1 << 40)));
        }
        let mut other = AnswerBytes::default();
        assert_eq!(other.read(&[&3u64.to_le_bytes()[..], b"abc"].concat()), Ok(AnswerProgress::Complete));
        assert_eq!(other.memory(), None);
    }
}
