//! A LoRA adapter, which changes a model's weights when it is loaded.

use std::ops::RangeInclusive;
use std::path::PathBuf;

/// An adapter's file, and how strongly it is applied.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraFile {
    pub path: PathBuf,
    /// 1 applies it as it was trained.
    pub scale: f32,
}

/// Adapters are trained for 1; a scale beyond this is mistyped.
const SCALES: RangeInclusive<f32> = -100.0..=100.0;

impl LoraFile {
    /// An adapter as it was trained.
    pub fn unscaled(path: PathBuf) -> LoraFile {
        LoraFile { path, scale: 1.0 }
    }

    /// Reads `FILE:SCALE`. Errors: what is wrong, to follow the option's name.
    pub fn parse_scaled(text: &str) -> Result<LoraFile, String> {
        let form = || format!("must be FILE:SCALE, e.g. adapter.gguf:0.5, not {text:?}");
        let (path, scale) = text.rsplit_once(':').filter(|(path, _)| !path.is_empty()).ok_or_else(form)?;
        let scale: f32 = scale.trim().parse().map_err(|_| form())?;
        if !SCALES.contains(&scale) {
            return Err(format!("must have a scale between {} and {}, not {scale}", SCALES.start(), SCALES.end()));
        }
        Ok(LoraFile { path: path.into(), scale })
    }

    /// The form that [`LoraFile::parse_scaled`] reads. A path that is no UTF-8 is changed.
    pub fn to_scaled(&self) -> String {
        format!("{}:{}", self.path.display(), self.scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_follows_the_last_colon() {
        let parsed = LoraFile::parse_scaled("a:b.gguf:0.25").unwrap();
        assert_eq!(parsed, LoraFile { path: "a:b.gguf".into(), scale: 0.25 });
        assert_eq!(LoraFile::parse_scaled(&parsed.to_scaled()).unwrap(), parsed);
        for wrong in ["a.gguf", ":1", "a.gguf:", "a.gguf:x"] {
            assert!(LoraFile::parse_scaled(wrong).unwrap_err().contains("FILE:SCALE"), "{wrong}");
        }
        for wrong in ["a.gguf:101", "a.gguf:inf", "a.gguf:NaN"] {
            assert!(LoraFile::parse_scaled(wrong).unwrap_err().contains("between -100 and 100"), "{wrong}");
        }
    }
}
