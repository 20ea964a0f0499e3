//! Calls in the pieces in which servers send them: however they are cut, they are the calls of the whole reply.

use std::slice::from_ref;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

/// The calls, or the error, of pieces that each come in an event of their own, without numbers unless a piece has one.
fn of(events: &[&[Value]]) -> Result<String, String> {
    let chunks: Vec<Value> = events.iter().map(|pieces| calls(pieces)).chain([finish("tool_calls")]).collect();
    read(&chunks).map_err(|error| error.to_string()).map(|_| called(&chunks))
}

fn at(index: impl Into<Value>, id: &str, name: &str, arguments: impl Into<Value>) -> Value {
    piece(index.into(), json!(id), json!(name), arguments.into())
}

#[test]
fn a_piece_without_a_number_reaches_the_call_of_its_id_or_the_last_one_or_none() {
    let both = [at(0, "a", "f", ""), at(1, "b", "g", "")];
    let bare = |id: &str, arguments: &str| at(Value::Null, id, "", arguments);
    let two = Ok("f({\"a\":1})g({\"b\":2})".to_owned());
    let unsure = |result: Result<String, String>| {
        assert!(result.as_ref().is_err_and(|error| error.contains("may be of several calls")), "{result:?}");
    };
    assert_eq!(of(&[&both, &[bare("b", "{\"b\":2}")]]), Ok("f({})g({\"b\":2})".to_owned()));
    assert_eq!(of(&[&both, &[bare("b", "{\"b\":")], &[bare("a", "{\"a\":1}")], &[bare("b", "2}")]]), two);
    assert_eq!(of(&[&both, &[at(0, "b", "", "{\"b\":2}")], &[at(1, "a", "", "{\"a\":1}")]]), two);
    for both in [&both, &[at(0, "a", "f", ""), at(0, "b", "g", "")], &[bare("a", ""), bare("b", "")]] {
        let both = [0, 1].map(|i| {
            let mut piece = both[i].clone();
            piece["function"]["name"] = json!(["f", "g"][i]);
            piece
        });
        unsure(of(&[&both, &[bare("", "{\"b\":2}")]]));
        assert_eq!(of(&[&both, &[bare("", "{\"a\":1}"), bare("", "{\"b\":2}")]]), two);
        assert_eq!(of(&[&both, &[bare("a", "{\"a\":1}")], &[bare("", "{\"b\":2}")]]), two);
        assert_eq!(of(&[&both, &[bare("a", "{\"a\":")], &[bare("", "1}")], &[bare("", "{\"b\":2}")]]), two);
        unsure(of(&[&both, &[bare("", "{\"a\""), bare("", ":1}"), bare("", "{")]]));
    }
    // All have number 0, and two are open.
    unsure(of(&[&[at(0, "a", "f", ""), at(0, "b", "g", "")], &[at(0, "", "", "{}")]]));
    unsure(of(&[&[at(0, "a", "f", ""), at(0, "b", "f", "")], &[at(0, "c", "f", "{}")]]));
    // The one that began last, or was continued last.
    let (f, g) = (at(0, "a", "f", ""), at(1, "b", "g", ""));
    assert_eq!(of(&[from_ref(&f), from_ref(&g), &[bare("", "{\"b\":2}")]]), Ok("f({})g({\"b\":2})".to_owned()));
    assert_eq!(of(&[from_ref(&f), &[bare("", "{\"a\":1}")], from_ref(&g), &[bare("", "{\"b\":2}")]]), two);
    let one = at(1, "", "", "{\"b\":");
    assert_eq!(of(&[&both, &[one], &[bare("", "2}")], &[bare("", "{\"a\":1}")]]), two);
    unsure(of(&[&[f], &[g], &[bare("", "{\"a\":1}"), bare("", "{\"b\":2}")]]));
    // Two begin without numbers, and have those of their order.
    let unnumbered = [bare("a", ""), bare("b", "")].map(|mut piece| {
        piece["function"]["name"] = json!(if piece["id"] == "a" { "f" } else { "g" });
        piece
    });
    assert_eq!(of(&[&unnumbered, &[at(1, "", "", "{\"b\":2}")], &[at(0, "", "", "{\"a\":1}")]]), two);
}

#[test]
fn a_name_after_whole_arguments_begins_a_call_if_arguments_follow() {
    for index in [json!(0), Value::Null] {
        for id in ["", "id"] {
            let name = |name: &str| at(index.clone(), id, name, "");
            let more = |arguments: &str| at(index.clone(), "", "", arguments);
            let twice = [[name("f")], [more("{\"a\":1}")], [name("f")], [more("{\"a\"")], [more(":2}")]];
            let twice: Vec<&[Value]> = twice.iter().map(|event| &event[..]).collect();
            assert_eq!(of(&twice), Ok("f({\"a\":1})f({\"a\":2})".to_owned()), "{index} {id}");
            assert_eq!(of(&[&twice.concat()]), Ok("f({\"a\":1})f({\"a\":2})".to_owned()), "{index} {id}");
            // Otherwise it was a repetition.
            assert_eq!(of(&twice[..3]), Ok("f({\"a\":1})".to_owned()));
            let other = at(index.clone(), "other", "g", "{}");
            assert_eq!(of(&[twice[0], twice[1], twice[2], &[other]]), Ok("f({\"a\":1})g({})".to_owned()));
        }
    }
}

#[test]
fn a_repeated_name_is_no_part_of_the_next_name_and_whole_arguments_get_no_more() {
    for index in [json!(0), Value::Null] {
        let part = |name: &str, arguments: &str| at(index.clone(), "", name, arguments);
        let (whole, repeat) = (part("f", "{\"a\":1}"), part("f", ""));
        let of = |next: &[Value]| {
            let events = [from_ref(&whole), from_ref(&repeat)];
            of(&events.into_iter().chain(next.iter().map(from_ref)).collect::<Vec<_>>())
        };
        assert_eq!(of(&[part("g", "{\"b\":1}")]), Ok("f({\"a\":1})g({\"b\":1})".to_owned()));
        let pieces = [part("g", ""), part("g", "{\"b\""), part("g", ":2}"), part("g", "")];
        assert_eq!(of(&pieces), Ok("f({\"a\":1})g({\"b\":2})".to_owned()));
        assert_eq!(of(&[part("g", "")]), Ok("f({\"a\":1})g({})".to_owned()));
        for more in ["}", "{\"a\":1}"] {
            assert!(self::of(&[from_ref(&whole), &[part("", more)]]).is_err(), "{more}");
        }
    }
}

#[test]
fn an_empty_object_is_no_arguments_until_text_follows() {
    for empty in [json!({}), json!([]), json!("{}")] {
        for (index, id) in [(json!(0), "a"), (json!(0), ""), (Value::Null, "a"), (Value::Null, "")] {
            let first = at(index.clone(), id, "f", empty.clone());
            let text = |id: &str, name: &str| at(index.clone(), id, name, "{\"a\":1}");
            assert_eq!(of(&[from_ref(&first), &[text("", "")]]), Ok("f({\"a\":1})".to_owned()), "{first}");
            assert_eq!(of(&[from_ref(&first), &[text(id, "f")]]), Ok("f({\"a\":1})".to_owned()), "{first}");
            assert_eq!(of(&[from_ref(&first)]), Ok("f({})".to_owned()));
            assert_eq!(of(&[from_ref(&first), from_ref(&first)]), Ok("f({})f({})".to_owned()));
            assert_eq!(of(&[from_ref(&first), &[text("b", "f")]]), Ok("f({})f({\"a\":1})".to_owned()));
            if empty.is_string() {
                continue;
            }
            let begun = at(index.clone(), id, "f", "{\"a\":");
            let rest = at(index.clone(), id, "", "1}");
            let between = at(index.clone(), id, "", empty.clone());
            assert_eq!(of(&[&[begun], &[between], &[rest]]), Ok("f({\"a\":1})".to_owned()));
        }
        let both = [at(0, "a", "f", empty.clone()), at(1, "b", "g", empty.clone())];
        let rest = [at(0, "", "", "{\"a\":1}"), at(1, "", "", "{\"b\":2}")];
        assert_eq!(of(&[&both, &rest[..1], &rest[1..]]), Ok("f({\"a\":1})g({\"b\":2})".to_owned()));
    }
    let raw = r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":{ }}}]},"finish_reason":"stop"}]}"#;
    let mut reader = ChunkReader::default();
    let mut out = Vec::new();
    reader.read(raw.as_bytes(), &mut out).unwrap();
    reader.end(&mut out).unwrap();
    assert!(out.contains(&arguments(0, "{}")), "{out:?}");
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Numbers {
    Own,
    /// Each call's own, in some of its pieces.
    OwnAtTimes,
    Zero,
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ids {
    /// Each call's own, in all of its pieces.
    Every,
    /// Each call's own, in its first piece.
    First,
    /// Another in each piece.
    Fresh,
    Never,
}

/// How a server cuts calls.
#[derive(Debug, Clone, Copy)]
struct Cutting {
    numbers: Numbers,
    ids: Ids,
    has_name_always: bool,
    begins_empty: bool,
    places_object: bool,
}

impl Cutting {
    fn all() -> Vec<Cutting> {
        let mut all = Vec::new();
        for numbers in [Numbers::Own, Numbers::OwnAtTimes, Numbers::Zero, Numbers::None] {
            for ids in [Ids::Every, Ids::First, Ids::Fresh, Ids::Never] {
                for bits in 0..8 {
                    let [has_name_always, begins_empty, places_object] = [0, 1, 2].map(|bit| bits >> bit & 1 == 1);
                    all.push(Cutting { numbers, ids, has_name_always, begins_empty, places_object });
                }
            }
        }
        // After an empty object, another id is another call's.
        all.retain(|cutting| cutting.ids != Ids::Fresh || !cutting.places_object);
        all.retain(|cutting| cutting.ids == Ids::Every || cutting.numbers != Numbers::OwnAtTimes);
        all
    }

    /// Pieces of these calls say whose they are, so they may mix.
    fn tells(self, made: &[(&str, &str)]) -> bool {
        let are_names_different = (1..made.len()).all(|at| made[..at].iter().all(|(name, _)| *name != made[at].0));
        self.numbers == Numbers::Own || self.ids == Ids::Every && are_names_different
    }

    /// Pieces of a call may share an event. Otherwise those that repeat its name would be of several calls.
    fn packs(self) -> bool {
        self.ids == Ids::Every
            || !self.has_name_always && self.ids != Ids::Fresh
            || self.numbers == Numbers::Own && self.ids != Ids::Fresh
    }

    /// A call's pieces.
    fn cut(self, nth: usize, (name, text): (&str, &str), random: &mut StdRng) -> Vec<Value> {
        let mut cuts: Vec<usize> = (0..random.random_range(0..4)).map(|_| random.random_range(1..text.len())).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        cuts.dedup();
        let mut texts: Vec<Value> = cuts.windows(2).map(|cut| json!(text[cut[0]..cut[1]])).collect();
        if self.begins_empty {
            texts.insert(0, if self.places_object { json!({}) } else { json!("") });
        }
        let pieces = texts.into_iter().enumerate().map(|(at, text)| {
            let number = match self.numbers {
                Numbers::Own => json!(nth),
                Numbers::OwnAtTimes if random.random() => json!(nth),
                Numbers::Zero => json!(0),
                Numbers::None | Numbers::OwnAtTimes => Value::Null,
            };
            let id = match self.ids {
                Ids::Every => format!("id{nth}"),
                Ids::First if at == 0 => format!("id{nth}"),
                Ids::Fresh => format!("id{nth}-{at}"),
                Ids::First | Ids::Never => String::new(),
            };
            piece(number, json!(id), json!(if at == 0 || self.has_name_always { name } else { "" }), text)
        });
        pieces.collect()
    }
}

#[test]
fn calls_are_those_of_the_whole_reply_however_they_are_cut() {
    const TEXTS: [&str; 5] = ["{\"a\":1}", "{\"b\":{\"c\":\"}{\"}}", "{\"d\":[{},{}]}", "{ }", "{\"e\":\"\\\"\"}"];
    let mut random = StdRng::seed_from_u64(7);
    for cutting in Cutting::all() {
        for _ in 0..40 {
            let n = random.random_range(1..5_usize);
            let made: Vec<(&str, &str)> = (0..n)
                .map(|_| (["f", "g", "h"][random.random_range(0..3)], TEXTS[random.random_range(0..5)]))
                .collect();
            let expected: String = made.iter().map(|(name, text)| format!("{name}({text})")).collect();
            let whole = made.iter().enumerate().map(|(nth, (name, text))| at(nth, "", name, *text));
            let message = json!({ "tool_calls": whole.collect::<Vec<_>>() });
            let whole = json!({ "choices": [{ "message": message, "finish_reason": "tool_calls" }] });
            assert_eq!(called(&[whole]), expected);
            // Calls begin in their order.
            let mut waiting: Vec<_> = made
                .iter()
                .enumerate()
                .map(|(nth, call)| cutting.cut(nth, *call, &mut random).into_iter().peekable())
                .collect();
            let mut pieces = Vec::new();
            let mut n_begun = 0;
            while let Some(first) = waiting.iter_mut().position(|pieces| pieces.peek().is_some()) {
                let last = if cutting.tells(&made) { n_begun.min(n - 1) } else { first };
                let from = random.random_range(first..=last);
                n_begun = n_begun.max(from + 1);
                pieces.extend(waiting[from].next());
            }
            let mut chunks = Vec::new();
            let mut rest = &pieces[..];
            while !rest.is_empty() {
                let n = if cutting.packs() { random.random_range(1..4_usize).min(rest.len()) } else { 1 };
                chunks.push(calls(&rest[..n]));
                rest = &rest[n..];
            }
            chunks.push(finish("tool_calls"));
            let shown = || chunks.iter().map(Value::to_string).collect::<Vec<_>>().join("\n");
            assert!(read(&chunks).is_ok(), "{cutting:?}\n{}\n{:?}", shown(), read(&chunks).err());
            assert_eq!(called(&chunks), expected, "{cutting:?}\n{}", shown());
        }
    }
}
