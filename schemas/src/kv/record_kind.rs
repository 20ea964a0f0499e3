//! The kinds of records.

/// The kind of a record. The numbers are part of the wire format and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RecordKind {
    /// Describes the stream. Always and only the first record.
    Head = 1,
    /// The KV of a range of positions.
    Frame = 2,
    /// Everything was sent. The last record.
    End = 3,
    /// The prefill failed. The last record.
    Error = 4,
    /// A sign of life before the next frame.
    Wait = 5,
    /// States of recurrent layers at a position.
    State = 6,
}

impl RecordKind {
    /// Returns the kind with this wire number.
    pub fn from_number(number: u8) -> Option<RecordKind> {
        [RecordKind::Head, RecordKind::Frame, RecordKind::End, RecordKind::Error, RecordKind::Wait, RecordKind::State]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}
