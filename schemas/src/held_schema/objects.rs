//! Properties of objects, as engines hold them: how many there are, and patterns of their names.

use serde_json::{Map, Value};

use super::Holding;
use super::ecma::of_ecma;

impl Holding<'_> {
    pub(super) fn objects(&mut self, fields: &mut Map<String, Value>) {
        self.patterns(fields);
        let n_required = fields.get("required").and_then(Value::as_array).map_or(0, Vec::len);
        let n_named = fields.get("properties").and_then(Value::as_object).map_or(0, Map::len);
        // Engines count properties only where none is optional, or where one more than the required ones decides.
        let is_closed = fields.get("additionalProperties") == Some(&Value::Bool(false));
        let more = |key| fields.get(key).and_then(Value::as_u64).map(|n| n.saturating_sub(n_required as u64));
        let (least, most) = (more("minProperties").unwrap_or(0), more("maxProperties"));
        let one_decides =
            is_closed && !fields.contains_key("patternProperties") && least <= 1 && most.is_none_or(|n| n == 1);
        if n_named > n_required && !one_decides && (least > 0 || most.is_some()) {
            for key in ["minProperties", "maxProperties"] {
                if fields.remove(key).is_some() {
                    self.leave_out(key);
                }
            }
        }
    }

    /// Translates the patterns of names. Engines need to know that no name has two of them, so only the first one of several
    /// stays, and so do others that begin with another letter.
    fn patterns(&mut self, fields: &mut Map<String, Value>) {
        let Some(Value::Object(patterns)) = fields.remove("patternProperties") else { return };
        let (mut kept, mut begins, mut all_held) = (Map::new(), Vec::new(), true);
        for (pattern, inner) in patterns {
            let begin =
                pattern.strip_prefix('^').and_then(|rest| rest.chars().next()).filter(char::is_ascii_alphanumeric);
            let is_apart = kept.is_empty() || begin.is_some() && !begins.contains(&begin) && !begins.contains(&None);
            match of_ecma(&pattern).filter(|_| is_apart) {
                Some(pattern) => {
                    kept.insert(pattern, inner);
                    begins.push(begin);
                }
                None => all_held = false,
            }
        }
        if !all_held {
            self.leave_out("patternProperties");
            // Otherwise the names of the patterns that are left out would be forbidden.
            fields.insert("additionalProperties".to_owned(), true.into());
        }
        if !kept.is_empty() {
            fields.insert("patternProperties".to_owned(), kept.into());
        }
    }
}
