//! References within a schema, as engines hold them.

use serde_json::{Map, Value};

use super::Holding;
use super::circular::MAY_STAND_BESIDE;

impl Holding<'_> {
    /// Leaves out what stands beside a reference to a schema that contains it: engines hold such a reference only alone.
    pub(super) fn references(&mut self, fields: &mut Map<String, Value>) {
        if self.is_strict {
            return;
        }
        let Some(kept) = self.circular.place(fields) else { return };
        if let Some(Value::Array(all)) = fields.get_mut(kept).filter(|_| kept == "allOf")
            && let Some(idx) = all.iter().position(|one| self.circular.is_at(one))
            && all.len() > 1
        {
            *all = vec![all.swap_remove(idx)];
            self.name("allOf");
        }
        let beside: Vec<String> =
            fields.keys().filter(|key| *key != kept && !MAY_STAND_BESIDE.contains(&key.as_str())).cloned().collect();
        for key in beside {
            fields.remove(&key);
            self.name(&key);
        }
    }
}
