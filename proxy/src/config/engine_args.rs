//! The options of an engine, as flags of `baton node` and `baton serve` and as keys of the configuration file.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use baton_engines::limits;
use baton_engines::registry::{EngineKind, EngineOptions};
use baton_engines::sim::{ABORT_VARIABLE, SimAbort};
use baton_schemas::kv::Codec;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use schemars::JsonSchema;
use serde::Deserialize;

/// Tokens per second that a simulator can be set to; a reply of one token an hour is a mistyped rate.
const SIM_RATES: RangeInclusive<f64> = 0.001..=1e9;

/// Distances beyond this are those of unrelated values; a RoPE order mistake scores 1.4.
const CANARY_DISTANCES: RangeInclusive<f64> = 0.0..=1.0;

/// Engine options. Anything absent has the engine's own default.
#[derive(Debug, Clone, Default, PartialEq, Args, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EngineArgs {
    /// Which engine runs the model [default: llama]
    #[arg(long, value_name = "KIND", value_parser = engine_kinds())]
    pub engine: Option<EngineKind>,
    /// Sequences decoded together [default: 4]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    pub slots: Option<u32>,
    /// Tokens one request may hold [default: the model's, as far as the memory allows, up to 131072]
    #[arg(long, value_name = "TOKENS", value_parser = whole_number)]
    pub ctx_size: Option<u32>,
    /// Tokens the KV cache holds for all slots together [default: 4096 a slot]
    #[arg(long, value_name = "TOKENS", value_parser = whole_number)]
    pub kv_cells: Option<u32>,
    /// Tokens of one physical compute batch [default: 512]
    #[arg(long, value_name = "TOKENS", value_parser = whole_number)]
    pub ubatch: Option<u32>,
    /// Compute threads [default: one per core]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    pub threads: Option<u32>,
    /// Layers on the GPU [default: all]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    pub gpu_layers: Option<u32>,
    /// The one device that computes, by its name in `baton doctor`, or cpu [default: every GPU there is]
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Map the model's file into memory; false reads it whole, for a slow or a network disk [default: true]
    #[arg(long, value_name = "BOOL")]
    pub mmap: Option<bool>,
    /// Prompt tokens per step while streams run [default: what 100 ms allow]
    #[arg(long, value_name = "TOKENS", value_parser = whole_number)]
    pub prefill_budget: Option<u32>,
    /// Requests that may wait for a slot [default: 256]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    pub max_queued: Option<u32>,
    /// Take KV of other weights of the same base model if it differs by at most this much (relative L2, e.g. 0.1)
    #[arg(long, value_name = "DISTANCE", value_parser = number)]
    pub max_canary_distance: Option<f64>,
    /// How KV may travel; each link gets the fastest of these by its measured rates. q8_0 is lossy [default: none,planes_zstd]
    #[arg(long, value_name = "CODECS", value_parser = codecs(), value_delimiter = ',')]
    pub kv_codecs: Option<Vec<Codec>>,
    /// A Jinja chat template instead of the model's own
    #[arg(long, value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// The GGUF file of the model's projector, for images
    #[arg(long, value_name = "FILE")]
    pub mmproj: Option<PathBuf>,
    /// Simulator: prompt tokens per second
    #[arg(long, value_name = "RATE", hide_short_help = true, value_parser = number)]
    pub sim_prefill_tps: Option<f64>,
    /// Simulator: tokens per second of one stream
    #[arg(long, value_name = "RATE", hide_short_help = true, value_parser = number)]
    pub sim_decode_tps: Option<f64>,
    /// Simulator: abort during this work on a text that contains TEXT, for tests
    #[arg(long, value_name = "WORK:TEXT", hide = true, env = ABORT_VARIABLE, value_parser = SimAbort::parse)]
    #[serde(skip)]
    pub sim_abort: Option<SimAbort>,
}

fn engine_kinds() -> impl TypedValueParser<Value = EngineKind> {
    let values = EngineKind::ALL.map(|kind| PossibleValue::new(kind.as_str()).help(kind.about()));
    let of_name = |name: String| EngineKind::ALL.into_iter().find(|kind| kind.as_str() == name);
    PossibleValuesParser::new(values).try_map(move |name| of_name(name).ok_or("unknown engine"))
}

fn codecs() -> impl TypedValueParser<Value = Codec> {
    let values = Codec::ALL.map(|codec| PossibleValue::new(codec.as_str()).help(codec.about()));
    let of_name = |name: String| Codec::ALL.into_iter().find(|codec| codec.as_str() == name);
    PossibleValuesParser::new(values).try_map(move |name| of_name(name).ok_or("unknown codec"))
}

/// clap's own messages are those of Rust's parser: "invalid digit found in string".
fn whole_number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("must be a whole number from 0 to {}", u32::MAX))
}

fn number(text: &str) -> Result<f64, &'static str> {
    text.parse().map_err(|_| "must be a number")
}

impl EngineArgs {
    /// Every option that is out of range: its key in the configuration file, and what is wrong with it.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let numbers = [
            ("slots", self.slots, limits::SLOTS),
            ("ctx_size", self.ctx_size, limits::CONTEXT),
            ("kv_cells", self.kv_cells, limits::CONTEXT),
            ("ubatch", self.ubatch, limits::UBATCH),
            ("threads", self.threads, limits::THREADS),
            ("prefill_budget", self.prefill_budget, limits::UBATCH),
            ("max_queued", self.max_queued, limits::QUEUED),
        ];
        let numbers = numbers.into_iter().filter_map(|(key, value, range)| {
            let wrong = value.filter(|value| !range.contains(value))?;
            Some((key, format!("must be between {} and {}, not {wrong}", range.start(), range.end())))
        });
        let distance = self.max_canary_distance.filter(|distance| !CANARY_DISTANCES.contains(distance));
        let distance = distance.map(|wrong| {
            let range = CANARY_DISTANCES;
            ("max_canary_distance", format!("must be between {} and {}, not {wrong}", range.start(), range.end()))
        });
        let rates = [("sim_prefill_tps", self.sim_prefill_tps), ("sim_decode_tps", self.sim_decode_tps)];
        let rates = {
            let wrong = |rate: f64| (!SIM_RATES.contains(&rate)).then_some(rate);
            rates.into_iter().filter_map(move |(key, rate)| {
                let message =
                    |rate| format!("must be between {} and {}, not {rate}", SIM_RATES.start(), SIM_RATES.end());
                Some((key, rate.and_then(wrong).map(message)?))
            })
        };
        let no_codec = self.kv_codecs.as_ref().filter(|codecs| codecs.is_empty());
        let no_codec = no_codec.map(|_| ("kv_codecs", "must name at least one codec".to_owned()));
        numbers.chain(distance).chain(rates).chain(no_codec).collect()
    }

    /// The options that are set, by their keys in the configuration file.
    pub fn keys(&self) -> Vec<String> {
        let flags = self.to_args().into_iter().step_by(2);
        flags.map(|flag| flag.to_string_lossy().trim_start_matches('-').replace('-', "_")).collect()
    }

    /// The same options as arguments for a child, each a flag and its value.
    pub fn to_args(&self) -> Vec<OsString> {
        let number = |n: Option<u32>| n.map(|n| n.to_string().into());
        let rate = |n: Option<f64>| n.map(|n| n.to_string().into());
        let codecs =
            self.kv_codecs.as_ref().map(|codecs| codecs.iter().map(|c| c.as_str()).collect::<Vec<_>>().join(","));
        let options: [(&str, Option<OsString>); 18] = [
            ("--engine", self.engine.map(|kind| kind.as_str().into())),
            ("--slots", number(self.slots)),
            ("--ctx-size", number(self.ctx_size)),
            ("--kv-cells", number(self.kv_cells)),
            ("--ubatch", number(self.ubatch)),
            ("--threads", number(self.threads)),
            ("--gpu-layers", number(self.gpu_layers)),
            ("--device", self.device.as_ref().map(Into::into)),
            ("--mmap", self.mmap.map(|mmap| mmap.to_string().into())),
            ("--prefill-budget", number(self.prefill_budget)),
            ("--max-queued", number(self.max_queued)),
            ("--max-canary-distance", rate(self.max_canary_distance)),
            ("--kv-codecs", codecs.map(Into::into)),
            ("--chat-template-file", self.chat_template_file.clone().map(Into::into)),
            ("--mmproj", self.mmproj.clone().map(Into::into)),
            ("--sim-prefill-tps", rate(self.sim_prefill_tps)),
            ("--sim-decode-tps", rate(self.sim_decode_tps)),
            ("--sim-abort", self.sim_abort.as_ref().map(|fault| fault.to_value().into())),
        ];
        options.into_iter().filter_map(|(name, value)| Some([name.into(), value?])).flatten().collect()
    }

    /// The engine's options. The caller finds the model's file and reads the chat template.
    pub fn into_options(
        self,
        model: Option<PathBuf>,
        name: Option<String>,
        chat_template: Option<String>,
    ) -> EngineOptions {
        let EngineArgs {
            engine,
            slots,
            ctx_size,
            kv_cells,
            ubatch,
            threads,
            gpu_layers,
            device,
            mmap,
            prefill_budget,
            max_queued,
            // For the client that fetches KV.
            max_canary_distance: _,
            kv_codecs: _,
            // `chat_template` is its text.
            chat_template_file: _,
            mmproj,
            sim_prefill_tps,
            sim_decode_tps,
            sim_abort,
        } = self;
        EngineOptions {
            kind: engine.unwrap_or_default(),
            model,
            name,
            n_slots: slots,
            n_ctx: ctx_size,
            n_cells: kv_cells,
            n_ubatch: ubatch,
            n_threads: threads,
            n_gpu_layers: gpu_layers,
            device,
            mmap,
            prefill_budget,
            max_queued,
            chat_template,
            projector: mmproj,
            sim_prefill_tps,
            sim_decode_tps,
            sim_abort,
        }
    }
}

/// What to tell an operator who names a model for an engine that runs none.
pub fn unused_model(is_named: bool, engine: &EngineArgs) -> Option<String> {
    let kind = engine.engine.filter(|kind| is_named && !kind.needs_file())?;
    Some(format!("the model that --model or source names is not used: the engine {} needs no file", kind.as_str()))
}

/// The flag of an option, by its key in the configuration file.
pub fn flag(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

#[cfg(test)]
mod tests {
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
            prefill_budget: Some(7),
            max_queued: Some(8),
            max_canary_distance: Some(0.25),
            kv_codecs: Some(vec![Codec::Q8_0, Codec::PlanesZstd, Codec::None]),
            chat_template_file: Some("a b.jinja".into()),
            mmproj: Some("c d.gguf".into()),
            sim_prefill_tps: Some(9.5),
            sim_decode_tps: Some(10.25),
            sim_abort: Some(SimAbort { during: SimWork::Prefill, text: "a:b c".into() }),
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
    }
}
