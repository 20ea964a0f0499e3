//! The types of options' values, and how each is read from a flag.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use baton_model::options::{CacheType, FlashAttention, LentLayers, PlannedLayers, RopeScaling, Speculation, SplitMode};
use baton_schemas::kv::Codec;

use super::kind::EngineKind;
use super::sim::{SimAbort, SimMachine};

/// The form of an option's value.
pub enum ValueForm {
    WholeNumber,
    Number,
    /// True, false, or a flag without a value, which is true.
    Switch,
    /// One of some words.
    Words(fn() -> Vec<PossibleWord>),
    Text,
    Path,
    /// Several, with commas between them.
    List(&'static ValueForm),
}

/// A word that an option may have for a value.
pub struct PossibleWord {
    pub word: &'static str,
    /// For the long help.
    pub about: Option<&'static str>,
}

/// A type of values.
pub(super) trait OptionValue: Sized {
    /// How it is written.
    const FORM: ValueForm;
    /// What the help calls it.
    const NAME: &'static str;

    /// Reads the values of a flag, at least one. Errors: what is wrong, for people.
    fn read(texts: &[&OsStr]) -> Result<Self, String>;

    /// The number that a range limits.
    fn number(&self) -> Option<f64> {
        None
    }

    /// Returns true if it is as good as none.
    fn is_empty(&self) -> bool {
        false
    }

    /// Takes a relative path from this folder.
    fn resolve(&mut self, _folder: &Path) {}
}

fn text<'a>(texts: &[&'a OsStr]) -> Result<&'a str, String> {
    texts.last().and_then(|text| text.to_str()).ok_or_else(|| "must be text in UTF-8".to_owned())
}

impl OptionValue for u32 {
    const FORM: ValueForm = ValueForm::WholeNumber;
    const NAME: &'static str = "N";

    fn read(texts: &[&OsStr]) -> Result<Self, String> {
        // Rust's parser says "invalid digit found in string".
        text(texts)?.parse().map_err(|_| format!("must be a whole number from 0 to {}", u32::MAX))
    }

    fn number(&self) -> Option<f64> {
        Some((*self).into())
    }
}

impl OptionValue for f64 {
    const FORM: ValueForm = ValueForm::Number;
    const NAME: &'static str = "N";

    fn read(texts: &[&OsStr]) -> Result<Self, String> {
        text(texts)?.parse().map_err(|_| "must be a number".to_owned())
    }

    fn number(&self) -> Option<f64> {
        Some(*self)
    }
}

impl OptionValue for bool {
    const FORM: ValueForm = ValueForm::Switch;
    const NAME: &'static str = "BOOL";

    fn read(texts: &[&OsStr]) -> Result<Self, String> {
        text(texts)?.parse().map_err(|_| "must be true or false".to_owned())
    }
}

impl OptionValue for String {
    const FORM: ValueForm = ValueForm::Text;
    const NAME: &'static str = "TEXT";

    fn read(texts: &[&OsStr]) -> Result<Self, String> {
        text(texts).map(str::to_owned)
    }
}

impl OptionValue for PathBuf {
    const FORM: ValueForm = ValueForm::Path;
    const NAME: &'static str = "FILE";

    fn read(texts: &[&OsStr]) -> Result<Self, String> {
        texts.last().map(PathBuf::from).ok_or_else(|| "must be a path".to_owned())
    }

    fn resolve(&mut self, folder: &Path) {
        *self = folder.join(&*self);
    }
}

impl<T: OptionValue> OptionValue for Vec<T> {
    const FORM: ValueForm = ValueForm::List(&T::FORM);
    const NAME: &'static str = T::NAME;

    fn read(texts: &[&OsStr]) -> Result<Self, String> {
        texts.iter().map(|text| T::read(&[text])).collect()
    }

    fn is_empty(&self) -> bool {
        self.is_empty()
    }
}

impl OptionValue for SimAbort {
    const FORM: ValueForm = ValueForm::Text;
    const NAME: &'static str = "WORK:TEXT";

    fn read(texts: &[&OsStr]) -> Result<Self, String> {
        SimAbort::parse(text(texts)?)
    }
}

impl OptionValue for SimMachine {
    const FORM: ValueForm = ValueForm::Text;
    const NAME: &'static str = "JSON";

    fn read(texts: &[&OsStr]) -> Result<Self, String> {
        SimMachine::parse(text(texts)?)
    }
}

impl OptionValue for LentLayers {
    const FORM: ValueForm = ValueForm::Text;
    const NAME: &'static str = "N|auto";

    fn read(texts: &[&OsStr]) -> Result<Self, String> {
        let auto = PlannedLayers::Auto;
        match text(texts)? {
            text if text == auto.as_str() => Ok(LentLayers::Planned(auto)),
            text => text.parse().map(LentLayers::First).map_err(|_| "must be a number of layers, or auto".to_owned()),
        }
    }

    fn number(&self) -> Option<f64> {
        match self {
            LentLayers::First(n) => Some((*n).into()),
            LentLayers::Planned(PlannedLayers::Auto) => None,
        }
    }
}

/// An enum whose variants are an option's words. `$about` describes them for the long help.
macro_rules! words {
    ($($type:ty, $name:literal, $about:expr;)*) => {$(
        impl OptionValue for $type {
            const FORM: ValueForm = ValueForm::Words(|| {
                let about: Option<fn($type) -> &'static str> = $about;
                <$type>::ALL.map(|one| PossibleWord { word: one.as_str(), about: about.map(|about| about(one)) }).into()
            });
            const NAME: &'static str = $name;

            fn read(texts: &[&OsStr]) -> Result<Self, String> {
                let text = text(texts)?;
                <$type>::ALL.into_iter().find(|one| one.as_str() == text).ok_or_else(|| "unknown value".to_owned())
            }
        }
    )*};
}

words! {
    EngineKind, "KIND", Some(EngineKind::about);
    CacheType, "TYPE", None;
    RopeScaling, "METHOD", None;
    SplitMode, "MODE", None;
    FlashAttention, "WHEN", None;
    Speculation, "WHEN", None;
    Codec, "CODECS", Some(Codec::about);
}
