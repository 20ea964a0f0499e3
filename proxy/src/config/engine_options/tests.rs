//! Each option's way from the command line to the child, and its range.

use baton_engines::engine_options::{DeclaredOption, EngineKind, EngineOptions, SimAbort, SimWork, ValueForm};
use baton_model::options::CacheType;
use clap::Parser;

use super::*;

#[derive(Parser)]
struct EngineFlagsAlone {
    #[command(flatten)]
    engine: EngineFlags,
}

/// A flag with one of its values.
fn sample(option: &DeclaredOption) -> [String; 2] {
    fn of(form: &ValueForm, option: &DeclaredOption) -> String {
        match form {
            ValueForm::WholeNumber => option.range.as_ref().map_or(6.0, |range| range.start() + 1.0).to_string(),
            // Not every fraction is a sum of a few powers of two.
            ValueForm::Number => option.range.as_ref().map_or(0.1, |range| range.start() + 0.1).to_string(),
            ValueForm::Switch => "false".to_owned(),
            ValueForm::Words(words) => words().last().unwrap().word.to_owned(),
            ValueForm::Text => match option.key {
                "lora_scaled" => "a b.gguf:0.5",
                "sim_abort" => "prefill:a:b c",
                "sim_machine" => {
                    r#"{"name":"a b","prefill_tps":1.1,"decode_tps":2,"decode_sharing_cost":0,"kv_bytes_per_token":4,
                        "link_bytes_per_second":1e9,"link_round_trip_ms":0.3}"#
                }
                "override_tensor" => r"blk\.1\.ffn=CPU",
                "kv_store" => "disk=a b/c",
                "lend_layers" => "auto",
                _ => "a b",
            }
            .to_owned(),
            ValueForm::Path => "a b/c".to_owned(),
            ValueForm::List(item) => format!("{0},{0}", of(item, option)),
        }
    }
    [option.flag(), of(&option.form, option)]
}

fn parsed(args: impl IntoIterator<Item = String>) -> WrittenOptions {
    EngineFlagsAlone::parse_from(std::iter::once("baton".to_owned()).chain(args)).engine.0
}

#[test]
fn every_option_reaches_the_child_in_one_json_value() {
    let check = |options: &WrittenOptions| {
        let [flag, json] = to_args(options).unwrap();
        assert_eq!(flag, "--engine-options");
        assert_eq!(of_json(json.to_str().unwrap()).as_ref(), Ok(options));
    };
    check(&WrittenOptions::default());
    for option in DECLARED {
        let options = parsed(sample(option));
        assert_eq!(options.set().map(|set| set.key).collect::<Vec<_>>(), [option.key]);
        check(&options);
    }
    let all = DECLARED.iter().filter(|option| option.conflicts_with.is_none());
    let options = parsed(all.clone().flat_map(sample));
    assert_eq!(options.set().count(), all.count());
    check(&options);
    assert!(of_json(r#"{"slot":1}"#).unwrap_err().contains("slot"));
}

#[test]
fn everybody_may_see_each_option_but_files_addresses_and_those_for_tests() {
    let shown = |option: &DeclaredOption, with_locations| {
        let options = parsed(sample(option)).shown(with_locations);
        options.set().map(|set| set.key).collect::<Vec<_>>()
    };
    let (mut hidden, mut of_operators) = (Vec::new(), Vec::new());
    for option in DECLARED {
        match (shown(option, false), shown(option, true)) {
            (none, all) if none.is_empty() && all == [option.key] => of_operators.push(option.key),
            (none, all) if none.is_empty() && all.is_empty() => hidden.push(option.key),
            both => assert_eq!(both, (vec![option.key], vec![option.key])),
        }
    }
    assert_eq!(hidden, ["sim_abort", "sim_machine"]);
    assert_eq!(
        of_operators,
        ["lora", "lora_scaled", "workers", "draft", "kv_store", "chat_template_file", "mmproj", "mlx_python"]
    );
}

#[test]
fn a_flag_wins_over_the_json_value() {
    let both = |written: WrittenOptions| written.or(of_json(r#"{"slots":3,"threads":2}"#).unwrap());
    let options = both(parsed(["--slots".to_owned(), "1".to_owned()]));
    assert_eq!((options.slots, options.threads), (Some(1), Some(2)));
}

#[test]
fn a_path_that_json_cannot_hold_is_refused() {
    use std::os::unix::ffi::OsStrExt;
    let path = Some(std::ffi::OsStr::from_bytes(b"/\xff.gguf").into());
    assert!(to_args(&WrittenOptions { lora: path, ..WrittenOptions::default() }).is_err());
}

#[test]
fn the_options_of_a_models_identity_and_no_others_change_it() {
    let identity = |options: WrittenOptions| {
        let EngineOptions { cache_types, rope, lora, .. } = options.into();
        (cache_types, rope, lora)
    };
    let unchanged = identity(WrittenOptions::default());
    for option in DECLARED {
        let changed = identity(parsed(sample(option)));
        assert_eq!(changed != unchanged, option.is_of_identity, "{}", option.key);
    }
}

#[test]
fn an_option_of_another_engine_is_named_with_the_engine_that_has_it() {
    let problem = |engine: &str, option: [&str; 2]| {
        let args = ["--engine", engine, option[0], option[1]].map(str::to_owned);
        problems(&parsed(args)).into_iter().map(|(key, message)| format!("{key} {message}")).collect::<Vec<_>>()
    };
    let of_llama = "gpu_layers is not an option of the engine candle, but of llama";
    assert_eq!(problem("candle", ["--gpu-layers", "3"]), [of_llama]);
    assert_eq!(
        problem("llama", ["--sim-prefill-tps", "0"]),
        ["sim_prefill_tps is not an option of the engine llama, but of sim"]
    );
    assert_eq!(
        problem("mlx", ["--tensor-split", "3"]),
        ["tensor_split is not an option of the engine mlx, but of llama"]
    );
    assert_eq!(problem("sim", ["--workers", "local"]), ["workers is not an option of the engine sim, but of llama"]);
    assert_eq!(problem("sim", ["--gpu-layers", "3"]), [""; 0], "a configuration can be tried with it");
    for kind in EngineKind::ALL {
        for option in DECLARED.iter().filter(|option| option.key != "engine" && !option.engines.contains(&kind)) {
            let [flag, value] = sample(option);
            let found = problem(kind.as_str(), [&flag, &value]);
            assert!(found[0].contains("is not an option of the engine") && !found[0].contains("mean"), "{found:?}");
        }
    }
}

#[test]
fn text_in_the_place_of_a_number_is_named_in_plain_words() {
    for (flag, expected) in [("--slots", "must be a whole number"), ("--sim-decode-tps", "must be a number")] {
        let error = EngineFlagsAlone::try_parse_from(["baton", flag, "x"]).err().unwrap().to_string();
        assert!(error.contains(expected) && error.contains(flag), "{error}");
    }
}

#[test]
fn a_mistyped_fault_of_the_simulator_is_refused() {
    let parse = |value| EngineFlagsAlone::try_parse_from(["baton", "--sim-abort", value]);
    let of = EngineOptions::from(parse("decode:a:b").unwrap().engine.0).sim_abort;
    assert_eq!(of, Some(SimAbort { during: SimWork::Decode, text: "a:b".into() }));
    for (value, expected) in [("decod:a", "unknown work"), ("decode", "WORK:TEXT"), ("decode:", "WORK:TEXT")] {
        let error = parse(value).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn values_out_of_range_are_named() {
    let check = |args: &[&str], expected: Option<&str>| {
        let parsed = problems(&EngineFlagsAlone::parse_from([&["baton"], args].concat()).engine);
        assert_eq!(parsed.first().map(|(key, _)| *key), expected, "{args:?}");
    };
    check(&[], None);
    check(&["--slots", "128", "--ctx-size", "64", "--sim-decode-tps", "0.5", "--engine", "sim"], None);
    check(&["--slots", "0"], Some("slots"));
    check(&["--slots", "129", "--engine", "sim"], Some("slots"));
    check(&["--ctx-size", "63"], Some("ctx_size"));
    check(&["--kv-cells", "4000000000"], Some("kv_cells"));
    check(&["--ubatch", "0"], Some("ubatch"));
    check(&["--threads", "513"], Some("threads"));
    check(&["--prefill-budget", "0"], Some("prefill_budget"));
    check(&["--max-queued", "0"], Some("max_queued"));
    check(&["--sim-prefill-tps", "NaN"], Some("sim_prefill_tps"));
    check(&["--sim-prefill-tps=-1"], Some("sim_prefill_tps"));
    check(&["--sim-decode-tps", "inf"], Some("sim_decode_tps"));
    check(&["--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "2048"], None);
    check(&["--rope-scale", "-1"], Some("rope_scale"));
    check(&["--rope-freq-base", "0"], Some("rope_freq_base"));
    check(&["--rope-freq-scale", "NaN"], Some("rope_freq_scale"));
    check(&["--rope-freq-scale", "0.5", "--rope-scale", "2"], Some("rope_freq_scale"));
    check(&["--rope-scaling", "none", "--rope-scale", "2"], Some("rope_scaling"));
    check(&["--yarn-orig-ctx", "1"], Some("yarn_orig_ctx"));
    check(&["--yarn-ext-factor", "-1.0"], Some("yarn_ext_factor"));
    check(&["--yarn-attn-factor", "0"], Some("yarn_attn_factor"));
    check(&["--yarn-beta-slow", "0"], Some("yarn_beta_slow"));
    check(&["--yarn-beta-fast", "1e9"], Some("yarn_beta_fast"));
    check(&["--lora-scaled", "a.gguf:0.5"], None);
    check(&["--lora-scaled", "a.gguf"], Some("lora_scaled"));
    check(&["--split-mode", "none", "--n-cpu-moe", "3", "--override-tensor", "a=CPU,b=CPU"], None);
    check(&["--n-cpu-moe", "513"], Some("n_cpu_moe"));
    check(&["--override-tensor", "a=CPU,b=CUDA0"], Some("override_tensor"));
    check(&["--override-tensor", &["a=CPU"; 65].join(",")], Some("override_tensor"));
    check(&["--tensor-split", "3,1"], Some("tensor_split"));
    check(&["--flash-attn", "on"], None);
    check(&["--flash-attn", "off"], Some("flash_attn"));
}

#[test]
fn options_without_a_value_are_read_as_llama_server_reads_them() {
    let options = |args: &[&str]| EngineFlagsAlone::parse_from([&["baton"], args].concat()).engine;
    let written = options(&["--mlock", "--no-mmap", "--cache-type-k", "q8_0"]);
    assert_eq!((written.mlock, written.cache_type_k), (Some(true), Some(CacheType::Q8_0)));
    assert_eq!(EngineOptions::from(written.0).mmap, Some(false));
    assert_eq!(options(&["--mmap", "--slots", "2"]).mmap, Some(true));
    assert!(EngineFlagsAlone::try_parse_from(["baton", "--mmap", "--no-mmap"]).is_err());
    let error = EngineFlagsAlone::try_parse_from(["baton", "--cache-type-v", "q3"]).err().unwrap().to_string();
    assert!(error.contains("--cache-type-v") && error.contains("iq4_nl"), "{error}");
}
