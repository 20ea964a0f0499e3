use std::io::{BufRead, BufReader, PipeReader, Read, pipe};

use super::*;

/// A queue of its own that writes into a pipe.
fn queue() -> (&'static LogQueue, PipeReader) {
    let log: &LogQueue = Box::leak(Box::new(LogQueue::new()));
    let (reader, writer) = pipe().unwrap();
    log.start_with(writer, |n_dropped| format!("{n_dropped} lost\n")).unwrap();
    (log, reader)
}

fn line(n: usize) -> String {
    format!("{n:>1023}\n")
}

/// Reads lines until one begins with this.
fn read_until(reader: &mut impl BufRead, last: &str) -> Vec<String> {
    let mut lines = Vec::new();
    while !lines.last().is_some_and(|line: &String| line.starts_with(last)) {
        let mut line = String::new();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0);
        lines.push(line);
    }
    lines
}

#[test]
fn lines_that_nobody_reads_are_dropped_and_their_number_stands_where_they_would() {
    let (log, reader) = queue();
    // More than the queue, the lines that the thread holds, and the pipe.
    let n_pushed = 8 * MAX_QUEUED_BYTES / 1024;
    (0..n_pushed).for_each(|n| log.push(line(n).as_bytes()));
    assert!(log.n_dropped() > 0);

    let mut reader = BufReader::new(reader);
    let (mut n, mut n_told) = (0, 0);
    while n < n_pushed {
        let mut read = String::new();
        reader.read_line(&mut read).unwrap();
        match read.strip_suffix(" lost\n") {
            Some(n_lost) => {
                let n_lost: usize = n_lost.parse().unwrap();
                (n, n_told) = (n + n_lost, n_told + n_lost);
            }
            None => {
                assert_eq!(read, line(n), "a line that was not dropped, in its place");
                n += 1;
            }
        }
    }
    assert_eq!((n, n_told as u64), (n_pushed, log.n_dropped()));
    log.push(b"after\n");
    assert_eq!(read_until(&mut reader, "after"), ["after\n"]);
}

#[test]
fn a_line_longer_than_the_queue_is_dropped_and_counted() {
    let (log, reader) = queue();
    log.push(&vec![b'x'; MAX_QUEUED_BYTES + 1]);
    let mut reader = BufReader::new(reader);
    assert_eq!(read_until(&mut reader, "1 lost"), ["1 lost\n"]);
    assert_eq!(log.n_dropped(), 1);
}

#[test]
fn the_caller_of_a_last_line_goes_on_when_it_is_written_or_nobody_reads() {
    let (log, mut reader) = queue();
    log.push(b"first\n");
    log.push_last(b"last\n");
    let state = log.lock();
    assert!(state.n_written == 2 || state.is_stalled, "{state:?}");
    drop(state);
    let mut both = [0; 11];
    reader.read_exact(&mut both).unwrap();
    assert_eq!(&both, b"first\nlast\n");
}

#[test]
fn nobody_waits_for_a_log_that_is_known_to_be_stuck() {
    let (log, mut reader) = queue();
    (0..2 * MAX_QUEUED_BYTES / 1024).for_each(|n| log.push(line(n).as_bytes()));
    // The first caller waits in vain; the next one does not wait.
    log.push_last(b"error\n");
    assert!(log.lock().is_stalled);
    log.push_last(b"error\n");
    log.flush();
    assert!(log.lock().is_stalled, "the flush ends, too");
    thread::spawn(move || io::copy(&mut reader, &mut io::sink()));
    while log.lock().is_stalled {
        thread::yield_now();
    }
    let state = log.lock();
    assert_eq!(state.n_written, state.n_queued, "callers wait again once all is read");
}

#[test]
fn the_last_lines_are_remembered_within_bounds_and_without_colours() {
    let (log, _reader) = queue();
    log.push(b"\x1b[33mfirst\x1b[0m line\n");
    assert_eq!(log.recent(), ["first line"]);
    (0..500).for_each(|n| log.push(format!("short {n}\n").as_bytes()));
    let recent = log.recent();
    assert_eq!((recent.len(), &*recent[0], &*recent[199]), (MAX_RECENT_LINES, "short 300", "short 499"));
    (0..500).for_each(|n| log.push(line(n).as_bytes()));
    let recent = log.recent();
    assert_eq!(recent.len(), MAX_RECENT_BYTES / 1024, "64 lines of a KiB, whether they were written or dropped");
    assert!(recent[63].ends_with("499"));
    log.push(&vec![b'x'; 2 * MAX_RECENT_BYTES]);
    assert_eq!(log.recent(), ["x".repeat(MAX_RECENT_BYTES)]);
}
