//! Labels of series.

/// Labels of one series. Their names are constants.
pub(super) type Labels = Vec<(&'static str, String)>;
