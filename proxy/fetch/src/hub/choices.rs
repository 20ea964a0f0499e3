//! The models among which an operator can choose in a repository.

use super::{choose_named, gguf_models, is_projector, list, paths};
use crate::error::ModelError;
use crate::model_choice::ModelChoice;
use crate::options::PullOptions;
use crate::spec::{HubModel, ends_in_gguf};

/// The GGUF models of a repository that `model` can mean, with their sizes. Errors: there is none, or a part of the named one is
/// missing.
pub(crate) async fn choices(model: &HubModel, options: &PullOptions) -> Result<Vec<ModelChoice>, ModelError> {
    let repo_id = model.repo_id();
    let (_, listing) = list(&repo_id, options).await?;
    let mut models = gguf_models(&listing.siblings);
    models.retain(|found| !is_projector(&found.path));
    if let Some(selector) = &model.selector {
        models = match ends_in_gguf(selector) {
            true => vec![choose_named(model, selector, models)?],
            false => {
                let files = paths(&models);
                models.retain(|found| super::has_quantization(&found.path, selector));
                if models.is_empty() {
                    let (repo, file) = (repo_id, selector.clone());
                    return Err(ModelError::NoSuchRepoFile { repo, file, files });
                }
                models
            }
        };
    }
    let is_whole = |found: &super::RepoModel<'_>| found.missing.is_none();
    let whole: Vec<ModelChoice> = models
        .iter()
        .filter(|found| is_whole(found))
        .map(|found| {
            let n_bytes = found.files.iter().try_fold(0_u64, |sum, file| sum.checked_add(file.size?));
            ModelChoice::of_file(format!("{repo_id}:{}", found.path), &found.path, n_bytes)
        })
        .collect();
    if whole.is_empty() { Err(ModelError::NoGguf { repo: repo_id }) } else { Ok(whole) }
}
