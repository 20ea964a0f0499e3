use super::*;
use crate::{ApiCall, ApiPath, UpstreamKind};

/// The outcome of a reply of one word, in whose stream this line follows every half a second.
async fn after_a_word(kind: UpstreamKind, word: &'static str, line: &'static str) -> (usize, String, f64) {
    let seconds = Duration::from_secs;
    let deadlines = UpstreamDeadlines { connect: seconds(1), first: seconds(30), idle: seconds(10) };
    let endless = futures::stream::unfold((), move |()| async move {
        tokio::time::sleep(Duration::from_millis(500)).await;
        Some((Ok(Bytes::from_static(line.as_bytes())), ()))
    });
    let word = Ok::<_, String>(Bytes::from_static(word.as_bytes()));
    let pieces = Box::pin(futures::stream::iter([word]).chain(endless));
    let reading = ReplyReading {
        framing: kind.protocol().framing(),
        deadlines,
        first_due: Instant::now() + deadlines.first,
        reader: kind.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
    };
    let began = Instant::now();
    let hour = tokio::time::sleep(seconds(3_600));
    let mut reply = Box::pin(deltas(pieces, reading, (), drop).take(1_000).take_until(hour));
    let mut n_deltas = 0;
    while let Some(delta) = reply.next().await {
        match delta {
            Ok(_) => n_deltas += 1,
            Err(error) => return (n_deltas, error.to_string(), began.elapsed().as_secs_f64()),
        }
    }
    (n_deltas, String::new(), began.elapsed().as_secs_f64())
}

#[tokio::test(start_paused = true)]
async fn a_reply_that_brings_nothing_new_ends() {
    let word = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"}}]}\n\n";
    let thought = "data: {\"choices\":[{\"index\":0,\"delta\":{\"reasoning_content\":\"hm\"}}]}\n\n";
    let empty = "data: {\"choices\":[{\"index\":0,\"delta\":{}}]}\n\n";
    let openai = UpstreamKind::OpenAi;
    let ollama_word = "{\"message\":{\"content\":\"hi\"},\"done\":false}\n";
    let ollama_empty = "{\"message\":{\"content\":\"\"},\"done\":false}\n";
    for (kind, word, line) in
        [(openai, word, empty), (openai, word, ": alive\n\n"), (UpstreamKind::Ollama, ollama_word, ollama_empty)]
    {
        let (n_deltas, error, seconds) = after_a_word(kind, word, line).await;
        assert!(n_deltas == 1 && error.contains("nothing new"), "{line}: {n_deltas} {error}");
        assert!((30.0..31.0).contains(&seconds), "{line}: {seconds}");
    }
    for line in [word, thought] {
        let (n_deltas, error, _) = after_a_word(openai, word, line).await;
        assert_eq!((n_deltas, error.as_str()), (1_000, ""), "{line}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_whole_reply_may_neither_stall_nor_trickle() {
    let seconds = Duration::from_secs;
    let deadlines = UpstreamDeadlines { connect: seconds(1), first: seconds(30), idle: seconds(10) };
    for (pause, error, due) in [(60, "stalled", 10), (5, "stalled", 30)] {
        let space = move |()| async move {
            tokio::time::sleep(seconds(pause)).await;
            Some((Ok::<_, String>(Bytes::from_static(b" ")), ()))
        };
        let reading = ReplyReading {
            framing: Framing::Whole,
            deadlines,
            first_due: Instant::now() + deadlines.first,
            reader: UpstreamKind::OpenAi.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
        };
        let began = Instant::now();
        let read: Vec<_> = deltas(Box::pin(futures::stream::unfold((), space)), reading, (), drop).collect().await;
        let [Err(found)] = &read[..] else { panic!("{read:?}") };
        assert!(found.to_string().contains(error), "{found}");
        assert_eq!(began.elapsed().as_secs(), due);
    }
}

#[tokio::test]
async fn an_event_stream_that_is_called_json_is_read() {
    let second = Duration::from_secs(1);
    let events =
        "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    let whole = "{\"choices\":[{\"message\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}]}";
    for (before, body) in [
        ("", events),
        (" \n", events),
        ("\u{FEFF}", events),
        (": alive\n\n", events),
        ("event: x\n", events),
        ("", whole),
        (" \n", whole),
    ] {
        let reading = ReplyReading {
            framing: Framing::Whole,
            deadlines: UpstreamDeadlines { connect: second, first: second, idle: second },
            first_due: Instant::now() + second,
            reader: UpstreamKind::OpenAi.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
        };
        let body = format!("{before}{body}");
        let pieces = body.as_bytes().chunks(7).map(|piece| Ok::<_, String>(Bytes::copy_from_slice(piece)));
        let pieces: Vec<_> = pieces.collect();
        let read: Vec<_> = deltas(futures::stream::iter(pieces), reading, (), drop).collect().await;
        let [Ok(TextDelta::Text { text, .. }), Ok(TextDelta::Finished(_))] = &read[..] else {
            panic!("{body}: {read:?}")
        };
        assert_eq!(text, "hi");
    }
}

#[tokio::test]
async fn a_flood_of_blank_lines_ends_by_the_deadline_and_not_by_its_size() {
    let deadlines = UpstreamDeadlines {
        connect: Duration::from_secs(1),
        first: Duration::from_millis(50),
        idle: Duration::from_millis(10),
    };
    let blank = Bytes::from(vec![b'\n'; 64 << 10]);
    let flood = futures::stream::repeat_with(move || Ok::<_, String>(blank.clone()));
    let reading = ReplyReading {
        framing: Framing::ServerSentEvents,
        deadlines,
        first_due: Instant::now() + deadlines.first,
        reader: UpstreamKind::OpenAi.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
    };
    let read: Vec<_> = deltas(flood, reading, (), drop).collect().await;
    let [Err(error)] = &read[..] else { panic!("{read:?}") };
    assert!(error.to_string().contains("nothing new"), "{error}");
}

#[tokio::test]
async fn a_complete_body_needs_no_end_of_its_last_line() {
    let second = Duration::from_secs(1);
    let ended = "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}]}";
    let done = format!("{ended}\n\ndata: [DONE]");
    let ollama = "{\"message\":{\"content\":\"hi\"},\"done\":true,\"done_reason\":\"stop\"}";
    for (kind, reply, is_whole) in [
        (UpstreamKind::OpenAi, ended, true),
        (UpstreamKind::OpenAi, &done, true),
        (UpstreamKind::OpenAi, &done[..done.len() - 2], true),
        (UpstreamKind::OpenAi, &ended[..ended.len() - 2], false),
        (UpstreamKind::Ollama, ollama, true),
        (UpstreamKind::Ollama, &ollama[..ollama.len() - 2], false),
    ] {
        let reading = ReplyReading {
            framing: kind.protocol().framing(),
            deadlines: UpstreamDeadlines { connect: second, first: second, idle: second },
            first_due: Instant::now() + second,
            reader: kind.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
        };
        let pieces = [Ok::<_, String>(Bytes::copy_from_slice(reply.as_bytes()))];
        let read: Vec<_> = deltas(futures::stream::iter(pieces), reading, (), drop).collect().await;
        match (&read[..], is_whole) {
            ([Ok(TextDelta::Text { text, .. }), Ok(TextDelta::Finished(_))], true) => assert_eq!(text, "hi"),
            ([Err(error)], false) => assert!(error.to_string().contains("cut inside a line"), "{error}"),
            _ => panic!("{reply}: {read:?}"),
        }
    }
}

#[tokio::test]
async fn a_reply_ends_with_its_last_event_and_not_with_its_body() {
    let kind = UpstreamKind::OpenAi;
    let second = Duration::from_secs(1);
    let reply = "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    // Cut at every place, and with an end that never comes.
    for cut in 0..reply.len() {
        let pieces = [&reply[..cut], &reply[cut..]].map(|piece| Ok::<_, String>(Bytes::from_static(piece.as_bytes())));
        let pieces = futures::stream::iter(pieces).chain(futures::stream::pending());
        let reading = ReplyReading {
            framing: kind.protocol().framing(),
            deadlines: UpstreamDeadlines { connect: second, first: second, idle: second },
            first_due: Instant::now() + second,
            reader: kind.protocol().delta_reader(&ApiCall::new(ApiPath::Api("x"), [])),
        };
        let read: Vec<_> = deltas(pieces, reading, (), drop).collect().await;
        let [Ok(TextDelta::Text { text, .. }), Ok(TextDelta::Finished(_))] = &read[..] else { panic!("{read:?}") };
        assert_eq!(text, "hi", "{cut}");
    }
}
