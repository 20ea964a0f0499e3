//! Machines that run different versions of Baton, and which to update first.

use std::collections::BTreeMap;

use super::models::ModelState;

/// Machines that are named; of more, only the number.
const N_NAMED: usize = 8;

/// Says which nodes run another version than this endpoint, and what to update first. `None` if all run the same, as far as they say.
///
/// Nodes go before the endpoint: while one restarts, others serve, but while the endpoint restarts, nobody is served.
pub(super) fn difference(own: &str, models: &[ModelState]) -> Option<String> {
    // A node may have several models and tasks.
    let nodes: BTreeMap<&str, &str> = models
        .iter()
        .flat_map(|model| &model.nodes)
        .filter(|node| !node.version.is_empty())
        .map(|node| (node.name.as_str(), node.version.as_str()))
        .collect();
    let others: Vec<(&str, &str)> = nodes.iter().map(|(name, version)| (*name, *version)).collect();
    if others.iter().all(|(_, version)| *version == own) {
        return None;
    }
    let newest = others.iter().map(|(_, version)| numbers(version)).chain([numbers(own)]).max()?;
    let is_behind = |version: &str| numbers(version) < newest;
    let behind: Vec<&str> = others.iter().filter(|(_, version)| is_behind(version)).map(|(name, _)| *name).collect();
    let different = others.iter().filter(|(_, version)| *version != own);
    let different: Vec<String> = different.map(|(name, version)| format!("{name} {version}")).collect();
    let first = match (behind.as_slice(), is_behind(own)) {
        ([], true) => "update the endpoint".to_owned(),
        ([], false) => return None,
        (nodes, true) => format!("update {} first, then the endpoint", named(nodes)),
        (nodes, false) => format!("update {}", named(nodes)),
    };
    Some(format!("versions differ: the endpoint runs {own}, {}; {first}", named(&different)))
}

fn named<T: AsRef<str>>(names: &[T]) -> String {
    let shown: Vec<&str> = names.iter().take(N_NAMED).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(N_NAMED) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Major, minor and patch number. What is not a number counts as 0: a node may say anything.
fn numbers(version: &str) -> [u64; 3] {
    let mut parts = version.split(['.', '-', '+']).map(|part| part.parse().unwrap_or(0));
    [(); 3].map(|()| parts.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::super::nodes::NodeReport;
    use super::*;

    fn difference_of(own: &str, nodes: &[(&str, &str)]) -> Option<String> {
        let report = |(name, version): &(&str, &str)| NodeReport {
            name: (*name).into(),
            version: (*version).into(),
            ..NodeReport::default()
        };
        let model = ModelState { nodes: nodes.iter().map(report).collect(), ..ModelState::default() };
        difference(own, &[model.clone(), model])
    }

    #[test]
    fn what_is_behind_is_updated_first_and_nodes_before_the_endpoint() {
        assert_eq!(difference_of("0.2.0", &[("mac", "0.2.0"), ("old", "")]), None);
        let said = |own, nodes: &[_]| difference_of(own, nodes).unwrap();
        assert_eq!(
            said("0.10.0", &[("mac", "0.10.0"), ("spark", "0.9.1")]),
            "versions differ: the endpoint runs 0.10.0, spark 0.9.1; update spark"
        );
        assert_eq!(
            said("0.1.0", &[("spark", "0.2.0")]),
            "versions differ: the endpoint runs 0.1.0, spark 0.2.0; update the endpoint"
        );
        assert_eq!(
            said("0.1.0", &[("a", "0.1.0"), ("b", "0.2.0"), ("c", "0.1.5")]),
            "versions differ: the endpoint runs 0.1.0, b 0.2.0, c 0.1.5; update a, c first, then the endpoint"
        );
    }

    #[test]
    fn a_version_of_any_form_and_many_nodes_make_one_short_line() {
        let names: Vec<String> = (0..100).map(|n| format!("n{n:03}")).collect();
        let nodes: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "99999999999999999999.x")).collect();
        let text = difference_of("0.1.0", &nodes).unwrap();
        assert!(text.len() < 800 && text.contains("and 92 more"), "{text}");
    }
}
