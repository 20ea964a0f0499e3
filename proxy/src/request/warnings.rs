//! Warnings of parts of a request that have no effect, for the header of its reply and the log.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use baton_schemas::constraint::Asker;
use baton_schemas::held_schema::Unheld;
use baton_schemas::request::BodyNotes;
use baton_schemas::tools::HostedTool;
use baton_upstream::StrictGap;

/// The most warnings of one request.
const MAX_WARNINGS: usize = 8;

/// The warnings of a request. Its prompts share them.
#[derive(Debug, Clone, Default)]
pub struct Warnings(Arc<Mutex<Vec<Warning>>>);

/// Something that a request does not get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Warning {
    /// Fields without effect.
    Ignored(BodyNotes),
    /// Tools that the model does not get.
    NotOffered(Vec<HostedTool>),
    /// Parts of a schema that sampling does not hold the text to.
    Unheld {
        /// The field, or the tool, that sets the schema.
        asker: String,
        /// The parts.
        parts: Vec<String>,
    },
    /// A schema that the upstream need not hold the text to.
    NotPromised {
        /// The field that sets the schema.
        field: String,
        /// Why the upstream does not get it as a strict one.
        gap: StrictGap,
    },
    /// Lossy KV is asked for beside a seed.
    LosslessKv,
}

impl Warning {
    /// Parts of a schema that are not held.
    pub fn unheld(asker: Asker<'_>, unheld: &Unheld) -> Warning {
        let asker = asker.tool.map_or(asker.field.to_owned(), |tool| format!("the schema of {tool}"));
        Warning::Unheld { asker, parts: unheld.parts.clone() }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::Ignored(BodyNotes { ignored, n_more_ignored }) => {
                write!(f, "fields without effect: {}", ignored.join(", "))?;
                if *n_more_ignored > 0 { write!(f, " and {n_more_ignored} more") } else { Ok(()) }
            }
            Warning::NotOffered(tools) => {
                let tools: Vec<&str> = tools.iter().map(|tool| tool.as_str()).collect();
                write!(f, "tools that run on the API owner's servers are not offered: {}", tools.join(", "))
            }
            Warning::NotPromised { field, gap } => {
                let why = gap.as_str();
                write!(f, "the upstream may not hold {field}, which is no schema of OpenAI's strict mode: {why}")
            }
            Warning::LosslessKv => f.write_str("a request with a seed gets lossless KV"),
            Warning::Unheld { asker, parts } => write!(f, "not held of {asker}: {}", parts.join(", ")),
        }
    }
}

impl Warnings {
    /// Adds a warning, once.
    pub fn add(&self, warning: Warning) {
        let mut warnings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if warnings.len() < MAX_WARNINGS && !warnings.contains(&warning) {
            tracing::info!(warning = %warning, "a part of a request has no effect");
            warnings.push(warning);
        }
    }

    /// Returns the text of the header, if there is a warning.
    pub fn text(&self) -> Option<String> {
        let warnings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let texts: Vec<String> = warnings.iter().map(Warning::to_string).collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_told_once() {
        let warnings = Warnings::default();
        assert_eq!(warnings.text(), None);
        let ignored = BodyNotes { ignored: vec!["a".to_owned(), "b".to_owned()], n_more_ignored: 3 };
        let unheld = Unheld { parts: vec!["not".to_owned(), "format path".to_owned()], refused: None };
        let asker = Asker { field: "tools", tool: Some("f") };
        for _ in 0..2 {
            warnings.add(Warning::Ignored(ignored.clone()));
            warnings.clone().add(Warning::unheld(asker, &unheld));
        }
        let text = "fields without effect: a, b and 3 more; not held of the schema of f: not, format path";
        assert_eq!(warnings.text().as_deref(), Some(text));
    }
}
