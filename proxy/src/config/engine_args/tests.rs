//! Each option's way from the command line to the child, and its range.

use baton_engines::sim::SimWork;
use clap::Parser;

use super::*;

#[derive(Parser)]
struct EngineFlags {
    #[command(flatten)]
    engine: EngineArgs,
}

#[test]
fn every_option_reaches_the_child() {
    let all = EngineArgs {
        engine: Some(EngineKind::Sim),
        slots: Some(1),
        ctx_size: Some(2),
        kv_cells: Some(3),
        ubatch: Some(4),
        threads: Some(5),
        gpu_layers: Some(6),
        device: Some("Vulkan0".into()),
        mmap: Some(false),
        no_mmap: None,
        mlock: Some(true),
        cache_type_k: Some(CacheType::Iq4Nl),
        cache_type_v: Some(CacheType::Bf16),
        rope_scaling: Some(RopeScaling::Yarn),
        rope_scale: Some(4.0),
        rope_freq_base: Some(1e6),
        rope_freq_scale: Some(0.25),
        yarn_orig_ctx: Some(2048),
        yarn_ext_factor: Some(0.5),
        yarn_attn_factor: Some(1.5),
        yarn_beta_slow: Some(2.0),
        yarn_beta_fast: Some(31.5),
        lora: Some("e f.gguf".into()),
        lora_scaled: None,
        split_mode: Some(SplitMode::Row),
        workers: Some(vec!["spark-2.local:9000".into(), "local".into()]),
        tensor_split: Some("3,1".into()),
        cpu_moe: Some(false),
        n_cpu_moe: Some(9),
        override_tensor: Some(vec![r"blk\.1\.ffn=CPU".into(), "exps=CPU".into()]),
        flash_attn: Some(FlashAttention::Auto),
        prefill_budget: Some(7),
        max_queued: Some(8),
        max_canary_distance: Some(0.25),
        max_kv_kl: Some(0.0125),
        kv_codecs: Some(vec![Codec::Q8_0, Codec::PlanesZstd, Codec::None]),
        chat_template_file: Some("a b.jinja".into()),
        mmproj: Some("c d.gguf".into()),
        mlx_python: Some("g h/python".into()),
        sim_prefill_tps: Some(9.5),
        sim_decode_tps: Some(10.25),
        sim_abort: Some(SimAbort { during: SimWork::Prefill, text: "a:b c".into() }),
        sim_machine: SimMachine::parse(
            r#"{"name":"a b","prefill_tps":1.5,"decode_tps":2,"decode_sharing_cost":0,"kv_bytes_per_token":4,
                "link_bytes_per_second":1e9,"link_round_trip_ms":0.3}"#,
        )
        .ok(),
    };
    let args = std::iter::once("baton".into()).chain(all.to_args());
    assert_eq!(EngineFlags::parse_from(args).engine, all);
    let args = std::iter::once("baton".into()).chain(EngineArgs::default().to_args());
    assert_eq!(EngineFlags::parse_from(args).engine, EngineArgs::default());
}

#[test]
fn text_in_the_place_of_a_number_is_named_in_plain_words() {
    for (flag, expected) in [("--slots", "must be a whole number"), ("--sim-decode-tps", "must be a number")] {
        let error = EngineFlags::try_parse_from(["baton", flag, "x"]).err().unwrap().to_string();
        assert!(error.contains(expected) && error.contains(flag), "{error}");
    }
}

#[test]
fn a_mistyped_fault_of_the_simulator_is_refused() {
    let parse = |value| EngineFlags::try_parse_from(["baton", "--sim-abort", value]);
    let of = parse("decode:a:b").unwrap().engine.into_options(None, None, None).sim_abort;
    assert_eq!(of, Some(SimAbort { during: SimWork::Decode, text: "a:b".into() }));
    for (value, expected) in [("decod:a", "unknown work"), ("decode", "WORK:TEXT"), ("decode:", "WORK:TEXT")] {
        let error = parse(value).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn values_out_of_range_are_named() {
    let check = |args: &[&str], expected: Option<&str>| {
        let parsed = EngineFlags::parse_from([&["baton"], args].concat()).engine.problems();
        assert_eq!(parsed.first().map(|(key, _)| *key), expected, "{args:?}");
    };
    check(&[], None);
    check(&["--slots", "128", "--ctx-size", "64", "--sim-decode-tps", "0.5"], None);
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
    let options = |args: &[&str]| EngineFlags::parse_from([&["baton"], args].concat()).engine;
    let written = options(&["--mlock", "--no-mmap", "--cache-type-k", "q8_0"]);
    assert_eq!((written.mlock, written.cache_type_k), (Some(true), Some(CacheType::Q8_0)));
    assert_eq!(written.to_args().len(), 6, "a flag and its value each: {:?}", written.to_args());
    assert_eq!(written.into_options(None, None, None).mmap, Some(false));
    assert_eq!(options(&["--mmap", "--slots", "2"]).mmap, Some(true));
    assert!(EngineFlags::try_parse_from(["baton", "--mmap", "--no-mmap"]).is_err());
    let error = EngineFlags::try_parse_from(["baton", "--cache-type-v", "q3"]).err().unwrap().to_string();
    assert!(error.contains("--cache-type-v") && error.contains("iq4_nl"), "{error}");
}

#[test]
fn a_quantized_cache_takes_no_part_in_handoffs() {
    let problem = |args: &[&str]| {
        let of = EngineFlags::parse_from([&["baton"], args].concat()).engine.handoff_problem();
        of.map(|(key, _)| key)
    };
    assert_eq!(problem(&["--cache-type-k", "bf16", "--cache-type-v", "f32"]), None);
    assert_eq!(problem(&["--cache-type-k", "q8_0"]), Some("cache_type_k"));
    assert_eq!(problem(&["--cache-type-v", "q4_0"]), Some("cache_type_v"));
}
