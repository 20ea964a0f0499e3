//! The models that are measured: files and names as everywhere, and shapes.

use std::path::{Path, PathBuf};

use baton_fetch::{self as models, ModelSpec, PullOptions};
use baton_proxy::serve::CommandFailure;

use super::made_up;
use super::shapes::{self, SHAPES, Shape};

/// A model that is measured.
#[derive(Debug, Clone)]
pub(crate) enum BackendModel {
    /// A file, or a name that can be pulled.
    Real(String),
    /// Made here.
    MadeUp(&'static Shape),
}

impl BackendModel {
    /// Reads what an operator wrote. A file that exists wins over a shape. Errors: there is no such model.
    pub(crate) fn parse(name: &str) -> Result<BackendModel, CommandFailure> {
        if !Path::new(name).is_file()
            && let Some(shape) = shapes::find(name)
        {
            return Ok(BackendModel::MadeUp(shape));
        }
        match ModelSpec::parse(name) {
            Ok(_) => Ok(BackendModel::Real(name.to_owned())),
            Err(error) => {
                let known = SHAPES.map(|shape| shape.name).join(", ");
                Err(CommandFailure(format!("{error}. Shapes with made-up weights: {known}")))
            }
        }
    }

    /// For the report: without folders.
    pub(crate) fn name(&self) -> String {
        match self {
            BackendModel::Real(name) => {
                Path::new(name).file_name().map_or_else(|| name.clone(), |file| file.to_string_lossy().into_owned())
            }
            BackendModel::MadeUp(shape) => shape.name.to_owned(),
        }
    }

    /// What the weights are, unless the name says it.
    pub(crate) fn about(&self) -> Option<&'static str> {
        match self {
            BackendModel::Real(_) => None,
            BackendModel::MadeUp(shape) => Some(shape.about),
        }
    }

    /// The model's file, which is pulled or made if it is missing.
    pub(crate) async fn file(&self, options: &PullOptions) -> Result<PathBuf, CommandFailure> {
        match self {
            BackendModel::Real(name) => Ok(models::pull(name, options).await?),
            BackendModel::MadeUp(shape) => made_up::make(shape, &options.cache_dir, options.progress.clone()).await,
        }
    }

    /// Deletes a made-up model's file.
    pub(crate) async fn delete(&self, options: &PullOptions) -> Result<(), CommandFailure> {
        match self {
            BackendModel::Real(_) => Ok(()),
            BackendModel::MadeUp(shape) => {
                Ok(made_up::file(shape, &options.cache_dir)?.remove(&*options.progress).await?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_catalogue_names_and_files_are_told_apart() {
        let parse = |name: &str| BackendModel::parse(name).unwrap();
        assert!(matches!(parse("DENSE-8B"), BackendModel::MadeUp(shape) if shape.name == "dense-8b"));
        assert!(matches!(parse("smollm2"), BackendModel::Real(_)));
        let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
        let model = parse(file.path().to_str().unwrap());
        assert_eq!(model.name(), file.path().file_name().unwrap().to_str().unwrap());
        let CommandFailure(error) = BackendModel::parse("dense-9b").unwrap_err();
        assert!(
            error.contains("unknown model \"dense-9b\"") && error.contains("dense-8b, dense-1b, mtp-1b, moe-30b-a3b"),
            "{error}"
        );
    }
}
