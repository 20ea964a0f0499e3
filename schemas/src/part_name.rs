//! The names of the files that a model is split into: `NAME-00002-of-00003.gguf`, as llama.cpp's `llama-gguf-split` writes
//! them, and the same with `.safetensors`, as Transformers does.

use std::path::{Path, PathBuf};

/// A part's name, taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartName<'n> {
    /// The common beginning of all parts' names, with folders if the name has some.
    pub stem: &'n str,
    /// The first part is 1.
    pub number: u32,
    /// How many parts the model has.
    pub n_parts: u32,
    /// Without its dot.
    pub ending: &'n str,
}

/// Digits of each number.
const N_DIGITS: usize = 5;

impl<'n> PartName<'n> {
    /// `None`: no part has such a name.
    pub fn parse(name: &'n str) -> Option<PartName<'n>> {
        let (rest, ending) = name.rsplit_once('.')?;
        let (rest, n_parts) = number_at_end(rest)?;
        let (rest, number) = number_at_end(rest.strip_suffix("-of-")?)?;
        let stem = rest.strip_suffix('-')?;
        (1..=n_parts).contains(&number).then_some(PartName { stem, number, n_parts, ending })
    }

    /// The name of the model's part of this number.
    pub fn sibling(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.{}", self.stem, self.n_parts, self.ending)
    }

    /// The name of the next part, and of the first one after the last. If each part's is there, all are.
    pub fn following(&self) -> String {
        self.sibling(self.number % self.n_parts + 1)
    }

    /// The names of all parts, in order.
    pub fn all(self) -> impl Iterator<Item = String> {
        (1..=self.n_parts).map(move |number| self.sibling(number))
    }
}

fn number_at_end(text: &str) -> Option<(&str, u32)> {
    let (rest, digits) = text.split_at_checked(text.len().checked_sub(N_DIGITS)?)?;
    let all_digits = digits.bytes().all(|byte| byte.is_ascii_digit());
    Some((rest, digits.parse().ok().filter(|_| all_digits)?))
}

/// The paths of all parts of the model that this file is a part of, in order; only its own, if its name is no part's. Does
/// not look whether they exist.
pub fn parts_beside(path: &Path) -> Vec<PathBuf> {
    match path.file_name().and_then(|name| PartName::parse(name.to_str()?)) {
        Some(name) => name.all().map(|part| path.with_file_name(part)).collect(),
        None => vec![path.to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parts_name_gives_those_of_the_others() {
        let name = PartName::parse("q/a-Q8_0-00002-of-00003.gguf").unwrap();
        assert_eq!(name, PartName { stem: "q/a-Q8_0", number: 2, n_parts: 3, ending: "gguf" });
        let all: Vec<String> = name.all().collect();
        assert_eq!(all[0], "q/a-Q8_0-00001-of-00003.gguf");
        assert_eq!((all.len(), &*all[1]), (3, "q/a-Q8_0-00002-of-00003.gguf"));
        assert_eq!(name.following(), all[2]);
        assert_eq!(PartName::parse(&all[2]).unwrap().following(), all[0]);
        let beside = parts_beside(Path::new("/m/model-00001-of-00002.safetensors"));
        assert_eq!(beside[1], Path::new("/m/model-00002-of-00002.safetensors"));
        assert_eq!(parts_beside(Path::new("/m/a.gguf")), [Path::new("/m/a.gguf")]);
    }

    #[test]
    fn other_names_are_no_parts() {
        for name in [
            "a.gguf",
            "a-00001-of-00002",
            "a-0001-of-0002.gguf",
            "a-00000-of-00002.gguf",
            "a-00003-of-00002.gguf",
            "a-+0001-of-00002.gguf",
            "a00001-of-00002.gguf",
            "a-00001of-00002.gguf",
            "é-of-00002.gguf",
            "-of-00002.gguf",
            "a-00001-of-0000é.gguf",
        ] {
            assert_eq!(PartName::parse(name), None, "{name}");
        }
    }
}
