//! The message for an unknown key: the key that was probably meant, in its own table or in another one.

use super::schema::{SchemaPlace, Takes};

/// Names at least this alike (Jaro–Winkler) are probably misspellings of each other.
const ALIKE: f64 = 0.8;

/// The bonus of a key of the same table, because most mistakes are misspellings.
const AT_HOME: f64 = 0.1;

/// A table of the file.
struct Table {
    /// The keys to it, without indexes.
    path: Vec<&'static str>,
    /// Its line in a file.
    heading: String,
    keys: Vec<&'static str>,
}

/// Every table that has keys of its own, in the order of the fields.
fn tables() -> Vec<Table> {
    let mut tables = Vec::new();
    add_tables(&mut tables, SchemaPlace::root(), &[], false);
    tables
}

fn add_tables(tables: &mut Vec<Table>, place: SchemaPlace, path: &[&'static str], is_list: bool) {
    let keys: Vec<&str> = place.keys().map(|(key, _)| key).collect();
    if keys.is_empty() {
        return;
    }
    let heading = match (path.is_empty(), is_list) {
        (true, _) => "the top-level table".to_owned(),
        (false, false) => format!("[{}]", path.join(".")),
        (false, true) => format!("[[{}]]", path.join(".")),
    };
    tables.push(Table { path: path.to_vec(), heading, keys });
    for (key, place) in place.keys() {
        let path = [path, &[key]].concat();
        match place.takes() {
            Takes::Table => add_tables(tables, place, &path, false),
            Takes::List(item) => add_tables(tables, item, &path, true),
            _ => {}
        }
    }
}

/// Other programs' names, each with our key.
const OTHERS_WORDS: [(&str, &str); 25] = [
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
    ("n_gpu_layers", "gpu_layers"),
    ("no_mmap", "mmap"),
    ("ctk", "cache_type_k"),
    ("ctv", "cache_type_v"),
    ("base_url", "url"),
    ("type", "kind"),
    ("cors", "allowed_origins"),
];

/// A key that may have been meant.
struct Guess<'a> {
    key: &'static str,
    heading: &'a str,
    is_at_home: bool,
    likelihood: f64,
}

/// The message for the last key of `path`, which its table does not have. `is_table`: its value is a table.
pub(super) fn unknown_key(path: &[&str], is_table: bool) -> String {
    let tables = tables();
    let (name, parents) = path.split_last().map_or(("", path), |(name, parents)| (*name, parents));
    let Some(home) = tables.iter().find(|table| table.path == parents) else { return format!("unknown key {name:?}") };
    let guesses = tables.iter().flat_map(|table| {
        table.keys.iter().map(|&key| {
            let is_at_home = table.path == home.path;
            let likelihood = likeness(name, key) + if is_at_home { AT_HOME } else { 0.0 };
            Guess { key, heading: &table.heading, is_at_home, likelihood }
        })
    });
    // A whole table in the wrong place was meant to be a table.
    let guesses = guesses.filter(|guess| !is_table || guess.is_at_home || inner_table(&tables, guess).is_some());
    let likely: Vec<Guess> = guesses.filter(|guess| guess.likelihood >= ALIKE + AT_HOME).collect();
    let best = likely.iter().map(|guess| guess.likelihood).max_by(f64::total_cmp);
    // A key that is equally likely in several tables is shown with all of them.
    let best: Vec<&Guess> = likely.iter().filter(|guess| Some(guess.likelihood) == best).collect();
    match best.first() {
        Some(guess) if guess.is_at_home => format!("unknown key {name:?}; did you mean {:?}?", guess.key),
        Some(guess) => {
            let same = || best.iter().filter(|other| other.key == guess.key);
            let headings = same().map(|other| other.heading).collect::<Vec<_>>().join(" or ");
            let inner = same().filter_map(|other| inner_table(&tables, other));
            let inner = inner.map(|table| table.heading.as_str()).collect::<Vec<_>>().join(" or ");
            match (is_table, guess.key == name) {
                (true, _) => format!("unknown table {name:?} here; did you mean {inner}?"),
                (false, true) => format!("unknown key {name:?} here; it belongs in {headings}"),
                (false, false) => format!("unknown key {name:?}; did you mean {:?} of {headings}?", guess.key),
            }
        }
        None => format!("unknown key {name:?}; there are {}", home.keys.join(", ")),
    }
}

/// The key that was probably meant, if one of them is alike.
pub(super) fn nearest(written: &str, keys: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    let alike = keys.map(|key| (key, likeness(written, key))).filter(|(_, likeness)| *likeness >= ALIKE);
    alike.max_by(|(_, one), (_, other)| one.total_cmp(other)).map(|(key, _)| key)
}

/// From 0 to 1.
fn likeness(written: &str, key: &str) -> f64 {
    if OTHERS_WORDS.contains(&(written, key)) { 1.0 } else { strsim::jaro_winkler(written, key) }
}

/// The guessed key's own table, if it is one.
fn inner_table<'a>(tables: &'a [Table], guess: &Guess<'_>) -> Option<&'a Table> {
    let parent = tables.iter().find(|table| table.heading == guess.heading)?;
    let is_inner = |table: &&Table| {
        table.path.split_last().is_some_and(|(key, path)| *key == guess.key && path == parent.path.as_slice())
    };
    tables.iter().find(is_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, is_table: bool, expected: &str) {
        let path: Vec<&str> = path.split('.').collect();
        assert_eq!(unknown_key(&path, is_table), expected, "{path:?}");
    }

    #[test]
    fn a_misspelling_is_looked_up_in_its_own_table_first() {
        check("listen_on", false, "unknown key \"listen_on\"; did you mean \"listen\"?");
        check("model.engine.max_quued", false, "unknown key \"max_quued\"; did you mean \"max_queued\"?");
        check("model.nam", false, "unknown key \"nam\"; did you mean \"name\"?");
    }

    #[test]
    fn a_key_in_the_wrong_table_is_reported_with_the_right_one() {
        let engines = "[model.engine] or [models.engine]";
        check("max_queued", false, &format!("unknown key \"max_queued\" here; it belongs in {engines}"));
        check("max_quued", false, &format!("unknown key \"max_quued\"; did you mean \"max_queued\" of {engines}?"));
        check("model.slots", false, &format!("unknown key \"slots\" here; it belongs in {engines}"));
        check("engine", true, &format!("unknown table \"engine\" here; did you mean {engines}?"));
        check("sampling", true, "unknown table \"sampling\" here; did you mean [model.sampling] or [models.sampling]?");
        check("model.requests_per_minute", false, "unknown key \"requests_per_minute\" here; it belongs in [[keys]]");
        check("model.listen", false, "unknown key \"listen\" here; it belongs in the top-level table");
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
    fn a_key_without_a_likely_match_gets_the_list() {
        check("tracing.zzz", false, "unknown key \"zzz\"; there are otlp_endpoint");
    }
}
