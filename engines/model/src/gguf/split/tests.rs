//! Split models, complete and not.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use tiny_gguf::Architecture;
use tiny_gguf::file::{Gguf as WrittenGguf, Value as WrittenValue};

use super::super::*;

const STEM: &str = "m";

struct Model {
    folder: TempDir,
    whole: PathBuf,
    parts: Vec<PathBuf>,
}

fn model() -> Model {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole.gguf");
    tiny_gguf::write(&whole, Architecture::Llama, 1);
    let parts = tiny_gguf::split::write(&WrittenGguf::read(&whole), folder.path(), STEM, 3);
    Model { folder, whole, parts }
}

fn refusal(path: &Path) -> String {
    let error = Gguf::open(path).expect_err("it is refused").to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

fn change(path: &Path, change: impl FnOnce(&mut WrittenGguf)) {
    let mut part = WrittenGguf::read(path);
    change(&mut part);
    part.write(path);
}

fn set(path: &Path, key: &str, value: WrittenValue) {
    change(path, |part| part.metadata.iter_mut().find(|(known, _)| known == key).unwrap().1 = value);
}

#[test]
fn a_split_model_is_the_same_model_as_its_parts_joined() {
    let Model { folder: _folder, whole, parts } = model();
    let [split, whole] = [&parts[0], &whole].map(|path| Gguf::open(path).unwrap());
    let sizes: Vec<u64> = parts.iter().map(|part| fs::metadata(part).unwrap().len()).collect();
    assert_eq!(split.files.n_bytes(), sizes.iter().sum::<u64>());
    assert!(split.files.all().iter().map(|file| &file.path).eq(&parts));
    let names = |gguf: &Gguf| gguf.tensors.iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&split), names(&whole));
    assert_eq!(split.fingerprint(&[]).unwrap(), whole.fingerprint(&[]).unwrap());
}

#[test]
fn models_that_share_their_first_part_have_other_weights() {
    let Model { folder, whole, .. } = model();
    let twins = tiny_gguf::split::write_twins(folder.path(), &whole);
    assert_eq!(fs::read(&twins[0]).unwrap(), fs::read(&twins[1]).unwrap());
    let [a, b] = twins.map(|path| Gguf::open(path).unwrap().weights_hash().unwrap());
    assert_ne!(a, b);
    assert_eq!(a, Gguf::open(whole).unwrap().weights_hash().unwrap());
}

#[test]
fn a_missing_or_cut_part_is_named() {
    let Model { folder: _folder, parts, .. } = model();
    let last = parts[2].display().to_string();
    let bytes = fs::read(&parts[2]).unwrap();
    fs::write(&parts[2], &bytes[..bytes.len() / 2]).unwrap();
    assert!(refusal(&parts[0]).contains(&format!("{last} is cut short")));
    fs::write(&parts[2], "no model").unwrap();
    assert!(refusal(&parts[0]).contains(&format!("{last} is not a GGUF")));
    fs::remove_file(&parts[2]).unwrap();
    let expected = format!("part 3 of 3 of the split model is missing: there is no file at {last}");
    assert_eq!(refusal(&parts[0]), expected);
}

#[test]
fn the_first_part_names_the_model() {
    let Model { folder, parts, .. } = model();
    assert!(refusal(&parts[1]).contains("is part 2 of 3 of a split model: name its first part"));
    for wrong in ["model.gguf", "m-00001-of-00004.gguf", "m-00002-of-00003.gguf"] {
        let path = folder.path().join("other").join(wrong);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(&parts[0], &path).unwrap();
        let error = refusal(&path);
        assert!(error.contains("is part 1 of 3") && error.contains("must end with -00001-of-00003.gguf"), "{error}");
    }
}

#[test]
fn a_part_of_another_model_is_named_with_what_contradicts() {
    let check = |damage: &dyn Fn(&Model), expected: &str| {
        let model = model();
        damage(&model);
        let error = refusal(&model.parts[0]);
        let second = format!("{} is not part 2 of 3 of this model: ", model.parts[1].display());
        assert!(error.starts_with(&second) && error.contains(expected), "{error}");
    };
    let other = |model: &Model, architecture| {
        let path = model.folder.path().join("other.gguf");
        tiny_gguf::write(&path, architecture, 2);
        WrittenGguf::read(&path)
    };
    check(&|model| fs::copy(&model.whole, &model.parts[1]).map(drop).unwrap(), "it is not a part of a split model");
    check(&|model| fs::copy(&model.parts[2], &model.parts[1]).map(drop).unwrap(), "it is part 3");
    check(&|model| set(&model.parts[1], "split.count", WrittenValue::U16(4)), "its model has 4 parts");
    check(
        &|model| {
            let parts = tiny_gguf::split::write(&other(model, Architecture::Qwen2), model.folder.path(), "x", 3);
            fs::copy(&parts[1], &model.parts[1]).unwrap();
        },
        "tensors, and that of the first part has",
    );
    check(
        &|model| {
            let first = WrittenGguf::read(&model.parts[0]).tensors[0].clone();
            change(&model.parts[1], |part| part.tensors[0] = first);
        },
        "which part 1 has",
    );
    check(
        &|model| {
            change(&model.parts[1], |part| {
                let norm = part.tensors.iter_mut().find(|(name, _)| name.ends_with("attn_norm.weight"));
                let (_, tensor) = norm.expect("a norm is in the second part");
                (tensor.dims, tensor.values) = (vec![96], vec![1.0; 96]);
            });
        },
        "attn_norm.weight\" has 96 values, and the model's have 64",
    );
}

#[test]
fn tensors_that_no_part_has_are_counted_by_part() {
    let Model { folder: _folder, parts, .. } = model();
    let n = parts.iter().map(|part| WrittenGguf::read(part).tensors.len()).collect::<Vec<_>>();
    change(&parts[1], |part| drop(part.tensors.pop()));
    let error = refusal(&parts[0]);
    let counts = format!("(part 1: {}, part 2: {}, part 3: {})", n[0], n[1] - 1, n[2]);
    assert!(
        error.contains(&counts) && error.contains(&format!("the model has {}", n.iter().sum::<usize>())),
        "{error}"
    );
}

#[test]
fn parts_one_after_another_in_one_file_are_no_model() {
    let Model { folder, parts, .. } = model();
    let all: Vec<u8> = parts.iter().flat_map(|part| fs::read(part).unwrap()).collect();
    for name in ["joined.gguf", "m-00001-of-00003.gguf"] {
        let path = folder.path().join(name);
        fs::write(&path, &all).unwrap();
        let error = refusal(&path);
        assert!(error.contains("one after another") && error.contains("llama-gguf-split --merge"), "{error}");
    }
}

#[test]
fn a_part_that_says_it_is_not_split_is_no_model() {
    for count in [0, 1] {
        let Model { folder: _folder, parts, .. } = model();
        set(&parts[0], "split.count", WrittenValue::U16(count));
        assert!(refusal(&parts[0]).contains("is named as part of 3, but its key `split.count`"));
    }
}

#[test]
fn an_absurd_number_of_parts_is_refused() {
    let Model { folder, parts, .. } = model();
    set(&parts[0], "split.count", WrittenValue::U16(u16::MAX));
    let path = folder.path().join("m-00001-of-65535.gguf");
    fs::rename(&parts[0], &path).unwrap();
    assert!(refusal(&path).contains("65535 parts, and at most 4096"));
}

#[test]
fn a_split_projector_is_refused_since_llama_cpp_reads_its_first_part_alone() {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole.gguf");
    tiny_gguf::projector::write(&whole, tiny_gguf::projector::TinyProjector::Mlp, 64, 1);
    let parts = tiny_gguf::split::write(&WrittenGguf::read(&whole), folder.path(), "mmproj", 2);
    let error = Gguf::open_projector(&parts[0]).unwrap_err();
    assert!(matches!(error, GgufError::Parts(PartsError::MustBeOne { .. })), "{error}");
    assert!(Gguf::companions(CompanionFiles { projector: Some(&parts[0]), ..Default::default() }).is_err());
}
