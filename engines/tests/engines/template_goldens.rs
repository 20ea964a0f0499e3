//! Every template in `fixtures/templates` renders byte for byte like Python's Jinja2.
//!
//! `expected.py` in that folder wrote the expected texts with Jinja2 in the configuration of transformers.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use baton_model::template::{ChatTemplate, SpecialTokens, TemplateError};

/// Noon in London on 21 November 2024, as in `expected.py`.
const NOW: Duration = Duration::from_secs(1_732_190_400);

#[test]
fn templates_render_as_the_reference_does() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates");
    let mut inputs: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    inputs.sort();
    assert!(inputs.len() > 30, "the fixtures are missing: {}", folder.display());

    let wrong: Vec<String> = inputs.iter().filter_map(|input| difference(input)).collect();
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), inputs.len(), wrong.join("\n"));
}

/// The differing lines of one case (`NAME.CASE.json`), or `None` if there are none.
fn difference(input: &Path) -> Option<String> {
    let case = input.file_stem().unwrap().to_str().unwrap();
    let name = case.split('.').next().unwrap();
    let expected = match fs::read_to_string(input.with_file_name(format!("{case}.rejected"))) {
        Ok(message) => Err(TemplateError::Rejected(message)),
        Err(_) => Ok(fs::read_to_string(input.with_file_name(format!("{case}.txt"))).unwrap()),
    };
    let rendered = render(&fs::read_to_string(input.with_file_name(format!("{name}.jinja"))).unwrap(), input);
    match (&expected, &rendered) {
        _ if expected == rendered => None,
        (Ok(expected), Ok(rendered)) => Some(format!("{case}:\n{}", differing_lines(expected, rendered))),
        _ => Some(format!("{case}:\n  expected {expected:?}\n  rendered {rendered:?}")),
    }
}

fn render(template: &str, input: &Path) -> Result<String, TemplateError> {
    let special = SpecialTokens { bos: "<s>".into(), eos: "</s>".into(), ..SpecialTokens::default() };
    let conversation = serde_json::from_str(&fs::read_to_string(input).unwrap()).unwrap();
    ChatTemplate::compile(template, special)?.render(&conversation, SystemTime::UNIX_EPOCH + NOW)
}

fn differing_lines(expected: &str, rendered: &str) -> String {
    let n_lines = expected.split('\n').count().max(rendered.split('\n').count());
    let pad = |text: &str| text.split('\n').map(String::from).chain(vec![String::new(); n_lines]).collect::<Vec<_>>();
    let pairs =
        pad(expected).into_iter().zip(pad(rendered)).take(n_lines).filter(|(expected, rendered)| expected != rendered);
    pairs
        .map(|(expected, rendered)| format!("  expected {expected:?}\n  rendered {rendered:?}"))
        .collect::<Vec<_>>()
        .join("\n")
}
