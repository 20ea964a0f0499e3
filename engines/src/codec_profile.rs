//! The codec's profile of a model: a file beside the model's.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_schemas::kv::{CodecProfile, Fingerprint, KvLayout, MAX_PROFILE_BYTES, ProfileError};

/// What follows the model's own name.
const SUFFIX: &str = ".kv-profile.json";

/// Why a profile is not used.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error(transparent)]
    Read(#[from] io::Error),
    #[error("it is longer than {MAX_PROFILE_BYTES} bytes")]
    TooLong,
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("it was made for other weights")]
    OtherWeights,
    #[error("lossy codecs do not apply to a quantized cache")]
    Quantized,
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

/// Where a model's profile is.
pub fn path(model: &Path) -> PathBuf {
    let mut path = model.as_os_str().to_owned();
    path.push(SUFFIX);
    path.into()
}

/// The profile beside a model, if there is one. One that does not fit is not used, which the log says.
pub fn beside(model: &Path, fingerprint: Fingerprint, layout: &KvLayout) -> Option<Arc<CodecProfile>> {
    let path = path(model);
    match read(&path, fingerprint, layout) {
        Ok(profile) => Some(Arc::new(profile)),
        Err(Unusable::Read(error)) if error.kind() == io::ErrorKind::NotFound => None,
        Err(reason) => {
            tracing::warn!(path = %path.display(), %reason, "the codec's profile is not used");
            None
        }
    }
}

fn read(path: &Path, fingerprint: Fingerprint, layout: &KvLayout) -> Result<CodecProfile, Unusable> {
    let mut text = Vec::new();
    File::open(path)?.take(MAX_PROFILE_BYTES + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_PROFILE_BYTES {
        return Err(Unusable::TooLong);
    }
    let profile: CodecProfile = serde_json::from_slice(&text)?;
    if profile.weights != fingerprint.weights {
        return Err(Unusable::OtherWeights);
    }
    if layout.is_quantized() {
        return Err(Unusable::Quantized);
    }
    profile.check(layout)?;
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use baton_schemas::kv::{Codec, CodecLoss, Dtype, LayerShape, RopePairing, Rows, Section, TensorProfile};

    use super::*;

    #[test]
    fn a_profile_is_used_for_its_own_model_only() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model.gguf");
        let rows = Rows { dtype: Dtype::F16, n_values: 2 };
        let layers = vec![LayerShape { k: rows, v: None }];
        let layout = KvLayout {
            rope: RopePairing::None,
            sections: vec![Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers }],
            states: Vec::new(),
        };
        let ours = Fingerprint { vocabulary: [1; 32], weights: [2; 32] };
        assert_eq!(beside(&model, ours, &layout), None);
        let profile = CodecProfile {
            weights: [2; 32],
            tensors: vec![TensorProfile { step: 0.5, channel_steps: vec![120, 140] }],
            losses: vec![CodecLoss { codec: Codec::Kvq, mean_kl: 0.003, ratio: 4.0 }],
        };
        let write =
            |profile: &CodecProfile| std::fs::write(path(&model), serde_json::to_vec(profile).unwrap()).unwrap();
        write(&profile);
        assert_eq!(beside(&model, ours, &layout).as_deref(), Some(&profile));
        assert_eq!(beside(&model, Fingerprint { weights: [3; 32], ..ours }, &layout), None);
        for (step, n_channels) in [(0.5, 1), (0.5, 3), (0.0, 2), (-1.0, 2), (f32::MAX * 2.0, 2)] {
            let tensors = vec![TensorProfile { step, channel_steps: vec![128; n_channels] }];
            write(&CodecProfile { tensors, ..profile.clone() });
            assert_eq!(beside(&model, ours, &layout), None, "{step} {n_channels}");
        }
        write(&CodecProfile { tensors: vec![], ..profile });
        assert_eq!(beside(&model, ours, &layout), None);
        std::fs::write(path(&model), vec![b' '; MAX_PROFILE_BYTES as usize + 1]).unwrap();
        assert_eq!(beside(&model, ours, &layout), None);
    }
}
