//! What to say of a key that is not known: the key that was probably meant, in its own table or in another one.

use baton_schemas::sampling_fields::SamplingFields;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use super::keys::RawKey;
use super::own_models::{RawLoading, RawOwnModel};
use super::raw::{RawConfig, RawDeadlines, RawModel, RawTracing};
use super::upstream::RawUpstream;
use crate::config::engine_args::EngineArgs;

/// Names at least this alike (Jaro–Winkler) are probably misspellings of each other.
const ALIKE: f64 = 0.8;

/// So much likelier is a key of the same table than one of another: most mistakes are misspellings.
const AT_HOME: f64 = 0.1;

/// A table of the file, by its path without indexes; as people write it; and its keys.
struct Table {
    path: &'static [&'static str],
    heading: &'static str,
    keys: &'static [&'static str],
}

fn tables() -> [Table; 12] {
    [
        Table { path: &[], heading: "the top of the file", keys: fields_of::<RawConfig>() },
        Table { path: &["model"], heading: "[model]", keys: fields_of::<RawModel>() },
        Table { path: &["model", "engine"], heading: "[model.engine]", keys: fields_of::<EngineArgs>() },
        Table { path: &["model", "sampling"], heading: "[model.sampling]", keys: fields_of::<SamplingFields>() },
        Table { path: &["models"], heading: "[[models]]", keys: fields_of::<RawOwnModel>() },
        Table { path: &["models", "engine"], heading: "[models.engine]", keys: fields_of::<EngineArgs>() },
        Table { path: &["models", "sampling"], heading: "[models.sampling]", keys: fields_of::<SamplingFields>() },
        Table { path: &["loading"], heading: "[loading]", keys: fields_of::<RawLoading>() },
        Table { path: &["deadlines"], heading: "[deadlines]", keys: fields_of::<RawDeadlines>() },
        Table { path: &["tracing"], heading: "[tracing]", keys: fields_of::<RawTracing>() },
        Table { path: &["keys"], heading: "[[keys]]", keys: fields_of::<RawKey>() },
        Table { path: &["upstream"], heading: "[[upstream]]", keys: fields_of::<RawUpstream>() },
    ]
}

/// What other programs call what has another name here.
const OTHERS_WORDS: [(&str, &str); 21] = [
    ("api_key", "key"),
    ("api_key_env", "key_env"),
    ("token", "key"),
    ("path", "source"),
    ("file", "source"),
    ("model", "source"),
    ("gguf", "source"),
    ("id", "name"),
    ("alias", "aliases"),
    ("host", "listen"),
    ("bind", "listen"),
    ("port", "listen"),
    ("address", "listen"),
    ("parallel", "slots"),
    ("context", "ctx_size"),
    ("n_ctx", "ctx_size"),
    ("num_ctx", "ctx_size"),
    ("ngl", "gpu_layers"),
    ("base_url", "url"),
    ("type", "kind"),
    ("cors", "allowed_origins"),
];

/// A key that may have been meant.
struct Guess {
    key: &'static str,
    heading: &'static str,
    is_at_home: bool,
    likelihood: f64,
}

/// What to say of the last key of `path`, whose value is a table or is none, unless its table has a key of this name.
pub(super) fn unknown_key(path: &[String], is_table: bool) -> Option<String> {
    let (name, parents) = path.split_last()?;
    let tables = tables();
    let home = tables.iter().find(|table| table.path.iter().eq(parents))?;
    if home.keys.contains(&name.as_str()) {
        return None;
    }
    let guesses = tables.iter().flat_map(|table| {
        table.keys.iter().map(|&key| {
            let is_at_home = table.path == home.path;
            let likelihood = likeness(name, key) + if is_at_home { AT_HOME } else { 0.0 };
            Guess { key, heading: table.heading, is_at_home, likelihood }
        })
    });
    // A whole table that stands in the wrong place was not meant to be a value.
    let guesses = guesses.filter(|guess| !is_table || guess.is_at_home || inner_table(&tables, guess).is_some());
    let likely: Vec<Guess> = guesses.filter(|guess| guess.likelihood >= ALIKE + AT_HOME).collect();
    let best = likely.iter().map(|guess| guess.likelihood).max_by(f64::total_cmp);
    // As likely in several tables, it is told of all of them.
    let best: Vec<&Guess> = likely.iter().filter(|guess| Some(guess.likelihood) == best).collect();
    Some(match best.first() {
        Some(guess) if guess.is_at_home => format!("unknown key {name:?}; did you mean {:?}?", guess.key),
        Some(guess) => {
            let same = || best.iter().filter(|other| other.key == guess.key);
            let headings = same().map(|other| other.heading).collect::<Vec<_>>().join(" or ");
            let inner = same().filter_map(|other| inner_table(&tables, other));
            let inner = inner.map(|table| table.heading).collect::<Vec<_>>().join(" or ");
            match (is_table, guess.key == name) {
                (true, _) => format!("unknown table {name:?} here; did you mean {inner}?"),
                (false, true) => format!("unknown key {name:?} here; it belongs into {headings}"),
                (false, false) => format!("unknown key {name:?}; did you mean {:?} of {headings}?", guess.key),
            }
        }
        None => format!("unknown key {name:?}; there are {}", home.keys.join(", ")),
    })
}

/// From 0 to 1.
fn likeness(written: &str, key: &str) -> f64 {
    if OTHERS_WORDS.contains(&(written, key)) { 1.0 } else { strsim::jaro_winkler(written, key) }
}

/// What was guessed, if it is a table itself.
fn inner_table<'a>(tables: &'a [Table], guess: &Guess) -> Option<&'a Table> {
    let parent = tables.iter().find(|table| table.heading == guess.heading)?;
    let is_inner =
        |table: &&Table| table.path.split_last().is_some_and(|(key, path)| *key == guess.key && path == parent.path);
    tables.iter().find(is_inner)
}

/// The names of a struct's fields, as serde knows them.
fn fields_of<T: for<'de> Deserialize<'de>>() -> &'static [&'static str] {
    let mut fields: &'static [&'static str] = &[];
    // Ends with the error below: all it is for are the fields.
    let _ = T::deserialize(Fields(&mut fields));
    fields
}

/// Asked for a struct, it notes the fields and gives up.
struct Fields<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Fields<'_> {
    type Error = de::value::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = fields;
        self.deserialize_any(visitor)
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Self::Error> {
        Err(de::Error::custom("no value"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, is_table: bool, expected: &str) {
        let path: Vec<String> = path.split('.').map(str::to_owned).collect();
        assert_eq!(unknown_key(&path, is_table).unwrap_or_default(), expected, "{path:?}");
    }

    #[test]
    fn a_key_of_its_table_is_known() {
        check("listen", false, "");
        check("model.engine.slots", false, "");
        check("upstream.url", false, "");
        check("model.engine", true, "");
    }

    #[test]
    fn a_misspelling_is_of_the_same_table_first() {
        check("listen_on", false, "unknown key \"listen_on\"; did you mean \"listen\"?");
        check("model.engine.max_quued", false, "unknown key \"max_quued\"; did you mean \"max_queued\"?");
        check("model.nam", false, "unknown key \"nam\"; did you mean \"name\"?");
    }

    #[test]
    fn a_key_in_the_wrong_table_is_told_the_right_one() {
        let engines = "[model.engine] or [models.engine]";
        check("max_queued", false, &format!("unknown key \"max_queued\" here; it belongs into {engines}"));
        check("max_quued", false, &format!("unknown key \"max_quued\"; did you mean \"max_queued\" of {engines}?"));
        check("model.slots", false, &format!("unknown key \"slots\" here; it belongs into {engines}"));
        check("engine", true, &format!("unknown table \"engine\" here; did you mean {engines}?"));
        check("sampling", true, "unknown table \"sampling\" here; did you mean [model.sampling] or [models.sampling]?");
        check("model.requests_per_minute", false, "unknown key \"requests_per_minute\" here; it belongs into [[keys]]");
        check("model.listen", false, "unknown key \"listen\" here; it belongs into the top of the file");
    }

    #[test]
    fn other_programs_words_are_understood() {
        check("model.path", false, "unknown key \"path\"; did you mean \"source\"?");
        check("port", false, "unknown key \"port\"; did you mean \"listen\"?");
        check("model.engine.n_ctx", false, "unknown key \"n_ctx\"; did you mean \"ctx_size\"?");
        check("upstream.api_key", false, "unknown key \"api_key\"; did you mean \"key\"?");
        check("upstream.type", false, "unknown key \"type\"; did you mean \"kind\"?");
    }

    #[test]
    fn what_is_like_nothing_gets_the_list() {
        check("zzz", false, &format!("unknown key \"zzz\"; there are {}", fields_of::<RawConfig>().join(", ")));
    }
}
