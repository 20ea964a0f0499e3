//! How many of a model's layers a worker computes of prompts, while this machine computes the others.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The first layers of a model that a worker computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "must be a number of layers, or \"auto\"")]
pub enum LentLayers {
    /// So many. 0: none.
    First(u32),
    /// As many as pay.
    Planned(PlannedLayers),
}

impl LentLayers {
    /// Returns true for a number that is larger than that of the model's layers.
    pub fn exceed(self, n_layers: u32) -> bool {
        matches!(self, LentLayers::First(n) if n > n_layers)
    }
}

/// The chooser of the number of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum PlannedLayers {
    /// The worker's memory, then measured rates.
    Auto,
}

impl PlannedLayers {
    /// The word in options and configuration files.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The shares of the worker and of this machine by which llama.cpp gives the first `n_lent` of `n_layers` layers to the worker,
/// at least one. It counts the output as one more layer, and gives a layer to the first device whose sum of shares exceeds the
/// layer's place: the border lies between two places, so that free memory that changes a little moves no layer.
pub fn lent_shares(n_lent: u32, n_layers: u32) -> [f64; 2] {
    let of_worker = f64::from(n_lent) - 0.5;
    [of_worker, f64::from(n_layers) + 1.0 - of_worker]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_number_or_auto() {
        let read = |json: &str| serde_json::from_str::<LentLayers>(json).map_err(|error| error.to_string());
        assert_eq!(read("12"), Ok(LentLayers::First(12)));
        assert_eq!(read("\"auto\""), Ok(LentLayers::Planned(PlannedLayers::Auto)));
        for wrong in ["\"many\"", "-1", "1.5", "true"] {
            let error = read(wrong).unwrap_err();
            assert!(error.contains("a number of layers, or \"auto\""), "{error}");
        }
        assert_eq!(serde_json::to_string(&LentLayers::Planned(PlannedLayers::Auto)).unwrap(), "\"auto\"");
    }
}
