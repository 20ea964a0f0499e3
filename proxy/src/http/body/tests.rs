use std::io::Write;

use futures::{StreamExt, stream};

use super::*;
use crate::account::request_memory::RequestMemory;

fn uncharged() -> MemoryCharge {
    MemoryCharge::new(RequestMemory::of_endpoint(), None)
}

fn check(values: &[&str], expected: Option<ContentEncoding>) {
    let mut headers = HeaderMap::new();
    for value in values {
        headers.append(header::CONTENT_ENCODING, value.parse().unwrap());
    }
    assert_eq!(ContentEncoding::of(&headers).ok(), expected, "{values:?}");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_stalls_or_trickles_is_408_and_a_slow_one_is_read() {
    let spaces = |n: usize| Ok::<_, io::Error>(vec![b' '; n]);
    let every = move |seconds: u64, n_bytes: usize| {
        stream::unfold((), move |()| async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            Some((spaces(n_bytes), ()))
        })
    };
    let stalled = stream::once(async move { spaces(1 << 20) }).chain(stream::pending());
    for body in [stalled.boxed(), every(1, 1_024).boxed()] {
        let asked = Instant::now();
        let mut charge = uncharged();
        let read = read(&mut Body::from_stream(body), 32 << 20, Duration::from_secs(120), &mut charge).await;
        assert_eq!(read.unwrap_err().status, 408);
        assert!(asked.elapsed() < Duration::from_secs(12), "{:?}", asked.elapsed());
    }
    let slow = every(9, PROGRESS_BYTES).take(10).boxed();
    let mut charge = uncharged();
    let read = read(&mut Body::from_stream(slow), 32 << 20, Duration::from_secs(120), &mut charge).await;
    assert_eq!(read.unwrap().len(), 10 * PROGRESS_BYTES);
}

#[tokio::test(start_paused = true)]
async fn a_stop_of_the_process_is_no_stalled_body() {
    let parts = stream::unfold(0, |n| async move {
        tokio::time::sleep(Duration::from_secs(1)).await;
        if n == 3 {
            tokio::time::advance(Duration::from_secs(300)).await;
            // The rest waits in the socket, and is read a little later.
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        (n < 6).then_some((Ok::<_, io::Error>("text"), n + 1))
    });
    let mut charge = uncharged();
    let body = &mut Body::from_stream(parts.boxed());
    let read = read(body, 32 << 20, Duration::from_secs(120), &mut charge).await;
    assert_eq!(read.unwrap().len(), 24);
}

#[test]
fn a_declared_body_gets_little_space_before_its_first_mib_has_come() {
    let mut bytes = Vec::new();
    let data = vec![b' '; 16 << 10];
    append(&mut bytes, &data, 32 << 20);
    assert_eq!(bytes.capacity(), ORDINARY_BODY);
    while bytes.len() <= ORDINARY_BODY {
        append(&mut bytes, &data, 32 << 20);
    }
    assert_eq!(bytes.capacity(), 32 << 20, "exactly, so that it is not copied again");
}

#[test]
fn a_small_packed_body_takes_memory_that_is_kept_for_small_ones() {
    let empty = uncharged();
    let mut ordinary = Vec::new();
    for _ in 0.. {
        let mut charge = empty.another();
        if charge.grow_to(ORDINARY_BODY).is_err() {
            break;
        }
        ordinary.push(charge);
    }
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    packed.write_all(&[b' '; 500]).unwrap();
    let packed = Bytes::from(packed.finish().unwrap());
    let decoded = ContentEncoding::Gzip.decode(&packed, ALWAYS_DECODED, &mut empty.another());
    assert_eq!(decoded.unwrap().len(), 500);
}

#[test]
fn one_known_encoding_is_read() {
    check(&[], Some(ContentEncoding::Identity));
    check(&["identity"], Some(ContentEncoding::Identity));
    check(&["GZIP"], Some(ContentEncoding::Gzip));
    check(&["x-gzip"], Some(ContentEncoding::Gzip));
    check(&[" zstd , identity"], Some(ContentEncoding::Zstd));
    check(&["deflate"], Some(ContentEncoding::Deflate));
    check(&["br"], None);
    check(&["gzip, zstd"], None);
    check(&["gzip", "gzip"], None);
}
