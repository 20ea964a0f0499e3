//! The declarations. To add an option, add it here and use it where the engine or the node needs it: as a field of
//! [`EngineOptions`], or of [`WrittenOptions`] if it is for the node.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use baton_model::limits::{self, DEFAULT_MAX_QUEUED, DEFAULT_SLOTS, DEFAULT_UBATCH};
use baton_model::options::{
    CacheType, CacheTypes, CpuTensors, FlashAttention, LentLayers, LoraFile, RopeOptions, RopeScaling, Speculation,
    SplitMode, WorkerEndpoint,
};
use baton_schemas::kv::Codec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::declared::{Declaration, HelpGroup, HelpLength, OptionField, ShownDefault, engine_options, whole};
use super::kind::EngineKind;
use super::kv_store::{KvStoreOptions, StoreSecret};
use super::sim::{ABORT_VARIABLE, SimAbort, SimMachine};
use super::value::OptionValue;
use ShownDefault::{Number, Words};

// The simulator takes other engines' options, so that a configuration can be tried with it; but it has no layers for workers.
const LLAMA: &[EngineKind] = &[EngineKind::Llama, EngineKind::Sim];
const LLAMA_ALONE: &[EngineKind] = &[EngineKind::Llama];
const VERIFIERS: &[EngineKind] = &[EngineKind::Llama, EngineKind::Candle, EngineKind::Sim];
const MLX: &[EngineKind] = &[EngineKind::Mlx, EngineKind::Sim];
const SIM: &[EngineKind] = &[EngineKind::Sim];

/// A larger factor is mistyped: it would stretch a context of 8,192 tokens to 8 million.
const ROPE_SCALES: Option<RangeInclusive<f64>> = Some(0.001..=1000.0);

/// YaRN's factors but the first. 0 would divide by zero.
const YARN_FACTORS: Option<RangeInclusive<f64>> = Some(0.001..=1000.0);

/// Tokens per second that a simulator can be set to; a reply of one token an hour is a mistyped rate.
const SIM_RATES: Option<RangeInclusive<f64>> = Some(0.001..=1e9);

/// A declared option of an engine.
pub type DeclaredOption = Declaration<WrittenOptions>;

engine_options! {
    keys {
        /// Which engine runs the model
        engine: EngineKind {
            default: Words("llama, in a build that has it"),
            page: "`llama`; [`candle`](candle.md), in a build with that feature; [`mlx`](mlx.md), for folders of safetensors; \
                   or `sim` for the simulator, which takes most options of the others",
        }
        /// Sequences decoded together
        slots => n_slots: u32 { group: HelpGroup::Common, default: Number(DEFAULT_SLOTS), range: whole(&limits::SLOTS), }
        /// Tokens one request may hold
        ctx_size => n_ctx: u32 {
            group: HelpGroup::Common,
            value_name: "TOKENS",
            default: Words("the model's, as far as the memory allows, up to 131072"),
            range: whole(&limits::CONTEXT),
            page: "tokens that one request may hold, prompt and reply together, as far as [the memory](engine.md#memory) \
                   allows. Coding agents need 32,768 or more",
        }
        /// Tokens the KV cache holds for all slots together
        kv_cells => n_cells: u32 {
            group: HelpGroup::Kv,
            value_name: "TOKENS",
            default: Words("4096 a slot"),
            range: whole(&limits::CONTEXT),
            page: "tokens that the KV cache holds for all slots together; by default at least `ctx_size`",
        }
        /// Tokens of one physical compute batch
        ubatch => n_ubatch: u32 {
            value_name: "TOKENS",
            default: Number(DEFAULT_UBATCH),
            range: whole(&limits::UBATCH),
            page: "tokens of one physical compute batch; by default 256 with [workers](workers.md), and 64 if one of them \
                   computes on its processor. On a CPU without workers, prompts are computed in [shorter steps](engine.md) unless it is \
                   configured",
        }
        /// Compute threads
        threads => n_threads: u32 {
            default: Words("one per core"),
            range: whole(&limits::THREADS),
            page: "compute threads. With `candle`, one per physical core by default",
        }
        /// Layers on the GPU
        gpu_layers => n_gpu_layers: u32 { default: Words("all"), engines: LLAMA, }
        /// The one device that computes, by its name in `baton doctor`, or cpu
        device => device: String {
            value_name: "NAME",
            default: Words("every GPU there is"),
            page: "the one device that computes, by its name in `baton doctor`, or `cpu`",
        }
        /// Map the model's file into memory; false reads it whole, for a slow or a network disk
        mmap => mmap: bool {
            default: Words("true"),
            negation: Some("no-mmap"),
            engines: LLAMA,
            page: "map the model's file into memory; `false` (`--no-mmap`) reads it whole, for a slow or a network disk",
        }
        /// Lock the weights in memory, so that they are not swapped out
        mlock => mlock: bool {
            default: Words("false"),
            engines: LLAMA,
            page: "lock the weights in memory, so that they are not swapped out. If fewer are locked, because of the \
                   system's limit or because llama.cpp rearranges some, the log says so (on Linux, for models on the \
                   processor)",
        }
        /// The type of the KV cache's K. Quantized types take less memory
        cache_type_k: CacheType {
            group: HelpGroup::Kv,
            default: Words("f16"),
            engines: LLAMA,
            is_of_identity: true,
            page: "the type of the KV cache's K: `f32`, `f16`, `bf16`, `q8_0`, `q5_1`, `q5_0`, `q4_1`, `q4_0`, `iq4_nl`. \
                   KV is handed over between [equal types](handoff.md#which-pairs-fit)",
        }
        /// The type of the KV cache's V
        cache_type_v: CacheType { group: HelpGroup::Kv, default: Words("f16"), engines: LLAMA, is_of_identity: true, }
        /// How positions are scaled for a context longer than the model was trained for: none, linear, yarn
        rope_scaling: RopeScaling {
            group: HelpGroup::Rope,
            default: Words("the model's"),
            engines: LLAMA,
            is_of_identity: true,
            page: "`none`, `linear` or `yarn`, for contexts longer than the model was trained for; set `ctx_size`, too",
        }
        /// The factor by which the context grows
        rope_scale: f64 {
            group: HelpGroup::Rope,
            value_name: "FACTOR",
            range: ROPE_SCALES,
            engines: LLAMA,
            is_of_identity: true,
            page: "the factor by which the context grows; by default the model's, as of all YaRN options below",
        }
        /// RoPE's base frequency
        // Models have 10,000 to 10 million; some scale contexts by it.
        rope_freq_base: f64 {
            group: HelpGroup::Rope,
            default: Words("the model's"),
            range: Some(1.0..=1e12),
            engines: LLAMA,
            is_of_identity: true,
        }
        /// The inverse of --rope-scale
        rope_freq_scale: f64 {
            group: HelpGroup::Rope,
            range: ROPE_SCALES,
            engines: LLAMA,
            is_of_identity: true,
            shown_in: HelpLength::Long,
            page: "the inverse of `rope_scale`",
        }
        /// YaRN: the context that the model was trained for
        yarn_orig_ctx: u32 {
            group: HelpGroup::Rope,
            value_name: "TOKENS",
            default: Words("the model's"),
            range: whole(&limits::CONTEXT),
            engines: LLAMA,
            is_of_identity: true,
            shown_in: HelpLength::Long,
        }
        /// YaRN: the extrapolation mix
        yarn_ext_factor: f64 {
            group: HelpGroup::Rope,
            range: Some(0.0..=1.0),
            engines: LLAMA,
            is_of_identity: true,
            shown_in: HelpLength::Long,
        }
        /// YaRN: the scale of attention
        yarn_attn_factor: f64 {
            group: HelpGroup::Rope,
            range: YARN_FACTORS,
            engines: LLAMA,
            is_of_identity: true,
            shown_in: HelpLength::Long,
        }
        /// YaRN: the high correction dimension
        yarn_beta_slow: f64 {
            group: HelpGroup::Rope,
            range: YARN_FACTORS,
            engines: LLAMA,
            is_of_identity: true,
            shown_in: HelpLength::Long,
        }
        /// YaRN: the low correction dimension
        yarn_beta_fast: f64 {
            group: HelpGroup::Rope,
            range: YARN_FACTORS,
            engines: LLAMA,
            is_of_identity: true,
            shown_in: HelpLength::Long,
        }
        /// A LoRA adapter, GGUF, applied to the model
        lora: PathBuf {
            engines: LLAMA,
            is_of_identity: true,
            conflicts_with: Some("lora_scaled"),
            page: "the GGUF file of a LoRA adapter, applied to the model. One adapter can be applied",
        }
        /// A LoRA adapter and its scale
        lora_scaled: String {
            value_name: "FILE:SCALE",
            engines: LLAMA,
            is_location: true,
            is_of_identity: true,
            page: "the same with a scale: `\"adapter.gguf:0.5\"`",
        }
        /// How the model is split among GPUs: none, layer, row
        split_mode => split_mode: SplitMode {
            default: Words("layer"),
            engines: LLAMA,
            page: "how the model is split among GPUs: `none`, `layer` or `row`",
        }
        /// Compute the model's layers together with these workers: nodes with the role worker, or `local` for a process of
        /// this machine
        workers: Vec<String> {
            value_name: "HOST:PORT",
            engines: LLAMA_ALONE,
            is_location: true,
            page: "machines that compute layers, too: `HOST:PORT` or URL of a node with the role worker, or `local` \
                   ([workers.md](workers.md))",
        }
        /// With workers: a share of the layers for each worker, and a last one for this machine's GPUs if it has any, e.g.
        /// 3,1
        tensor_split: String {
            value_name: "SHARES",
            engines: LLAMA_ALONE,
            page: "with workers: the shares of the layers, such as `\"3,1\"`, each 0.001 to 1,000; by default by free memory",
        }
        /// With one worker: it computes only the first layers of prompts, so many or auto. A second engine here computes the
        /// other layers, and the endpoint's own engine generates alone
        lend_layers: LentLayers {
            engines: LLAMA_ALONE,
            range: whole(&limits::LAYERS),
            page: "with one worker: the number of the model's first layers that it computes, of prompts alone, or `\"auto\"`. A second \
                   engine on this machine computes the others ([workers.md](workers.md#a-part-of-the-layers))",
        }
        /// Keep the experts of all layers with the processor
        cpu_moe: bool { engines: LLAMA, }
        /// Keep the experts of the first N layers with the processor
        n_cpu_moe: u32 { range: whole(&limits::LAYERS), engines: LLAMA, }
        /// Keep the tensors with the processor whose names a regular expression finds; CPU is the only buffer type
        override_tensor: Vec<String> {
            value_name: "PATTERN=CPU",
            engines: LLAMA,
            page: "a list of `\"PATTERN=CPU\"`: tensors whose names match the regular expression stay on the CPU. A pattern \
                   that matches none is an error",
        }
        /// Flash attention, which is always on: on or auto
        flash_attn: FlashAttention {
            engines: LLAMA,
            shown_in: HelpLength::Long,
            page: "`on` or `auto`. [It cannot be off](results/engines.md#beside-llama-server)",
        }
        /// Prompt tokens per step while streams run
        prefill_budget => prefill_budget: u32 {
            value_name: "TOKENS",
            default: Words("what 100 ms allow"),
            range: whole(&limits::UBATCH),
            page: "prompt tokens per step while streams run, up to `ubatch`; by default [more](engine.md) where prompts gain more than \
                   streams lose",
        }
        /// A smaller model with the same vocabulary, GGUF, which guesses tokens ahead
        draft: PathBuf {
            engines: LLAMA,
            page: "the GGUF file of a smaller model with the same vocabulary, which [guesses tokens](engine.md#speculation), too; \
                   one with states drafts as a [node](engine.md#draft-nodes) alone. It needs memory for its weights, and for as many cells of KV as the model has",
        }
        /// Guess tokens from the prompt and the reply, and verify them together: off or auto; for a model with states, and for a
        /// model's own head, only if auto is written down
        speculation => speculation: Speculation {
            default: Words("auto"),
            engines: VERIFIERS,
            page: "`auto`: steps also verify tokens that are guessed from the prompt and the reply, where [measured costs \
                   promise to be faster](engine.md#speculation), but for requests with a `seed`; for models with states, which keep up \
                   to 8 more of each sequence for it, and for a model's own head, only if it is written down. `off`: never",
        }
        /// Requests that may wait in the engine for a slot; others wait in the endpoint
        max_queued => max_queued: u32 { default: Number(DEFAULT_MAX_QUEUED), range: whole(&limits::QUEUED), }
        /// Take KV of other weights of the same base model if it differs by at most this much (relative L2, e.g. 0.1)
        // Distances beyond 1 are those of unrelated values; a RoPE order mistake scores 1.4.
        max_canary_distance: f64 {
            group: HelpGroup::Kv,
            value_name: "DISTANCE",
            range: Some(0.0..=1.0),
            page: "take KV of other weights of the same base model up to this relative L2 distance of rows and states; by default \
                   only of equal weights",
        }
        /// How KV may travel; each link gets the fastest of these by its measured rates. All but none and planes_zstd are lossy
        kv_codecs: Vec<Codec> {
            group: HelpGroup::Kv,
            default: Words("none,planes_zstd"),
            page: "codecs for KV on the wire; each link uses the fastest. `q8_0`, `kvq`, `kvq_fast`, and for states `state_f16` and \
                   `state_int8`, are lossy",
        }
        /// Use a lossy codec only if `baton calibrate-codec` measured at most this mean KL divergence of it, nats (e.g. 0.005)
        max_kv_kl: f64 { group: HelpGroup::Kv, value_name: "KL", range: Some(0.0..=10.0), }
        /// Where KV goes that leaves the cache: memory=SIZE (0: nowhere), and for a disk disk=FOLDER, codec=CODEC,
        /// disk_budget=SIZE, disk_writes=SIZE a day
        kv_store => kv_store: KvStoreOptions {
            group: HelpGroup::Kv,
            default: Words("as much memory as the cache has, at most a quarter of what is free"),
            is_location: true,
            page: "a table: [where KV goes](#modelenginekv_store) that leaves the cache",
        }
        /// A Jinja chat template instead of the model's own
        chat_template_file: PathBuf {}
        /// The GGUF file of the model's projector, for images
        mmproj => projector: PathBuf { engines: LLAMA, }
        /// The Python that has mlx-lm, for the mlx engine
        mlx_python => mlx_python: PathBuf {
            value_name: "PATH",
            default: Words("what `baton mlx install` installs"),
            engines: MLX,
            is_program: true,
        }
        /// Simulator: prompt tokens per second
        sim_prefill_tps => sim_prefill_tps: f64 {
            group: HelpGroup::Simulator,
            value_name: "RATE",
            range: SIM_RATES,
            engines: SIM,
            shown_in: HelpLength::Long,
        }
        /// Simulator: tokens per second of one stream
        sim_decode_tps => sim_decode_tps: f64 {
            group: HelpGroup::Simulator,
            value_name: "RATE",
            range: SIM_RATES,
            engines: SIM,
            shown_in: HelpLength::Long,
        }
        /// Simulator: the share by which each further stream makes a decode step longer
        sim_decode_sharing => sim_decode_sharing: f64 {
            group: HelpGroup::Simulator,
            value_name: "SHARE",
            range: Some(0.0..=1000.0),
            engines: SIM,
            shown_in: HelpLength::Long,
        }
    }
    flags {
        /// Simulator: abort during this work on a text that contains TEXT, for tests
        sim_abort => sim_abort: SimAbort { group: HelpGroup::Simulator, engines: SIM, env: Some(ABORT_VARIABLE), }
        /// Simulator: a machine whose speeds and link it has, for `baton demo --simulate`
        sim_machine => sim_machine: SimMachine { group: HelpGroup::Simulator, engines: SIM, }
    }
}
