//! Sends the records of a handoff on an upgraded connection.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use bytes::{Buf, Bytes};
use futures::{Stream, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::progress::{CountedBytes, Progress};
use super::upgrade::UpgradedIo;

/// Sends lists of pieces, each list with as few writes as the socket takes, and closes the connection. Ends early if the
/// peer leaves or sends anything. The bytes have the reply's [`ReadDeadline`](super::ReadDeadline). Call it in the work
/// of an [`UpgradeOffer`](super::UpgradeOffer).
pub async fn send_pieces(io: UpgradedIo, lists: impl Stream<Item = Vec<Bytes>>) {
    let progress = Progress::of_this_task();
    let (mut from_peer, mut to_peer) = tokio::io::split(io);
    let sending = async {
        let mut lists = std::pin::pin!(lists);
        while let Some(pieces) = lists.next().await {
            let mut pieces = Pieces(pieces.into_iter().map(|piece| progress.give(piece)).collect());
            to_peer.write_all_buf(&mut pieces).await?;
        }
        to_peer.shutdown().await
    };
    let mut byte = [0];
    let ended: io::Result<()> = tokio::select! {
        ended = sending => ended,
        left = from_peer.read(&mut byte) => left.map(|_| ()),
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended before all records were sent");
    }
}

/// Bytes in pieces that are written together.
struct Pieces(VecDeque<CountedBytes>);

impl Buf for Pieces {
    fn remaining(&self) -> usize {
        self.0.iter().map(Buf::remaining).sum()
    }

    fn chunk(&self) -> &[u8] {
        self.0.front().map_or(&[], Buf::chunk)
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let pieces = self.0.iter().map(Buf::chunk).filter(|piece| !piece.is_empty());
        slices.iter_mut().zip(pieces).map(|(slice, piece)| *slice = IoSlice::new(piece)).count()
    }

    fn advance(&mut self, mut n_bytes: usize) {
        while let Some(piece) = self.0.front_mut() {
            let n_now = n_bytes.min(piece.remaining());
            piece.advance(n_now);
            n_bytes -= n_now;
            if piece.has_remaining() {
                return;
            }
            self.0.pop_front();
        }
    }
}
