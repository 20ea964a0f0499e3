//! The table of `docs/configuration.md`, which is made from the declarations. `BATON_WRITE_PAGES=1` writes it again.

use std::path::Path;

use baton_engines::engine_options::{DECLARED, DeclaredOption, EngineKind, ShownDefault};

const BEGIN: &str =
    "<!-- written by `BATON_WRITE_PAGES=1 cargo test --release -p baton-proxy engine_options::page`: begin -->\n";
const END: &str = "<!-- end -->\n";

fn row(option: &DeclaredOption) -> String {
    let default = match option.default {
        ShownDefault::Nothing => "none".to_owned(),
        _ => option.default.to_string(),
    };
    let range = option.range.as_ref().map(|range| format!("{} to {}", number(*range.start()), number(*range.end())));
    let kinds = option.engines.iter().filter(|kind| **kind != EngineKind::Sim || option.engines.len() == 1);
    let engines = match option.engines.len() == EngineKind::ALL.len() {
        true => "all".to_owned(),
        false => kinds.map(|kind| kind.as_str()).collect::<Vec<_>>().join(", "),
    };
    let meaning = if option.page.is_empty() { begun_small(option.help) } else { option.page.to_owned() };
    let range = range.unwrap_or_default();
    format!("| `{}` | {default} | {range} | {engines} | {meaning} |\n", option.key)
}

/// A text that goes on in a table's cell. Names keep their capitals.
fn begun_small(text: &str) -> String {
    let (first, rest) = text.split_at(1);
    match rest.split(' ').next().is_some_and(|rest| rest.contains(char::is_uppercase)) {
        true => text.to_owned(),
        false => first.to_lowercase() + rest,
    }
}

/// With commas between thousands.
fn number(number: f64) -> String {
    if number >= 1e9 {
        return format!("{number:e}");
    }
    if number.fract() != 0.0 {
        return number.to_string();
    }
    let digits = number.to_string();
    let mut written = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            written.push(',');
        }
        written.push(digit);
    }
    written
}

fn table() -> String {
    let rows = DECLARED.iter().filter(|option| !option.is_flag_only()).map(row);
    let identity = DECLARED.iter().filter(|option| option.is_of_identity).map(|option| format!("`{}`", option.key));
    let identity = identity.collect::<Vec<_>>().join(", ");
    let head = "| key | default | from … to | engines | meaning |\n|---|---|---|---|---|\n".to_owned();
    head + &rows.collect::<String>()
        + &format!(
            "\n{identity} are part of a model's identity (of an adapter its content and scale): nodes that differ in them \
             exchange no KV (`other_cache_types` or `other_weights`), and no stream continues on the other.\n"
        )
}

#[test]
fn the_page_of_the_configuration_lists_the_declared_options() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/configuration.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    let made = format!("{before}{BEGIN}{}{END}{after}", table());
    if std::env::var_os("BATON_WRITE_PAGES").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    assert!(
        page == made,
        "docs/configuration.md differs from the declared options; BATON_WRITE_PAGES=1 writes it again"
    );
}
