//! Derives a model's names from its file if none is configured.

use std::path::Path;

use baton_fetch::catalogue;

/// A model's public name and its aliases.
#[derive(Debug, Clone, Default)]
pub struct ModelNames {
    /// The name that lists show.
    pub name: String,
    /// Other names that requests may use.
    pub aliases: Vec<String>,
}

impl ModelNames {
    /// The catalogue's names for this source, or the stem of the file's name.
    pub fn of_file(source: &str, path: &Path) -> ModelNames {
        if let Some(model) = catalogue::find(source) {
            let aliases = model.aliases.iter().map(|&alias| alias.to_owned()).collect();
            return ModelNames { name: model.name.to_owned(), aliases };
        }
        // A folder's name has no ending, only numbers such as 1.7B.
        let stem = if path.is_dir() { path.file_name() } else { path.file_stem() };
        let stem = stem.map_or_else(|| source.to_owned(), |stem| stem.to_string_lossy().into_owned());
        ModelNames { name: stem, aliases: Vec::new() }
    }
}
