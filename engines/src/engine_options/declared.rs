//! A declaration, and the macro that makes structs and a table of all declarations.

use std::ffi::OsStr;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;

use super::kind::EngineKind;
use super::value::ValueForm;

/// One option, as it is declared in the [table](super::table). `Written` has all written options.
pub struct Declaration<Written> {
    /// Its key in the configuration file. The flag has hyphens for underscores.
    pub key: &'static str,
    /// Its help, without the default.
    pub help: &'static str,
    /// Markdown that stands for the help in `docs/configuration.md`, if that says more. Empty: the help.
    pub page: &'static str,
    /// The name of its value in the help.
    pub value_name: &'static str,
    /// The form of its value.
    pub form: ValueForm,
    /// What an engine does without it.
    pub default: ShownDefault,
    /// The least and the greatest number. `None`: whatever the type holds, or no number.
    pub range: Option<RangeInclusive<f64>>,
    /// The engines that have it. For all others it is a mistake. The simulator takes most options of other
    /// engines, so that a configuration can be tried with it.
    pub engines: &'static [EngineKind],
    /// It changes KV or logits: nodes that differ in it exchange no KV.
    pub is_of_identity: bool,
    /// It names a program, which may be found by `PATH`, and not a file beside the configuration.
    pub is_program: bool,
    /// Its text names files or machines, which only operators see. An option of paths does anyway.
    pub is_location: bool,
    /// Which help shows its flag.
    pub shown_in: HelpLength,
    /// The group of the help in which its flag stands.
    pub group: HelpGroup,
    /// A flag that sets a switch to false.
    pub negation: Option<&'static str>,
    /// A flag that cannot be given, too.
    pub conflicts_with: Option<&'static str>,
    /// The variable that stands for its flag.
    pub env: Option<&'static str>,
    /// What the macro knows of its field.
    pub field: OptionField<Written>,
}

/// The access to an option's field.
pub struct OptionField<Written> {
    /// Checks a flag's value. Errors: what is wrong, for people.
    pub check: fn(&OsStr) -> Result<(), String>,
    /// Sets it to a flag's values: one, or some of a list. Errors: as for `check`.
    pub read: fn(&mut Written, &[&OsStr]) -> Result<(), String>,
    /// Returns true if it has a value. An empty list is none.
    pub is_set: fn(&Written) -> bool,
    /// Its value, if it is a number.
    pub number: fn(&Written) -> Option<f64>,
    /// Takes a relative path from this folder.
    pub resolve: fn(&mut Written, &Path),
    /// Takes its value away.
    pub clear: fn(&mut Written),
}

impl<Written> Declaration<Written> {
    /// What a declaration has if it does not say otherwise.
    pub(super) const UNSAID: Self = Declaration {
        key: "",
        help: "",
        page: "",
        value_name: "",
        form: ValueForm::Text,
        default: ShownDefault::Nothing,
        range: None,
        engines: &EngineKind::ALL,
        is_of_identity: false,
        is_program: false,
        is_location: false,
        shown_in: HelpLength::Short,
        group: HelpGroup::Engine,
        negation: None,
        conflicts_with: None,
        env: None,
        field: OptionField {
            check: |_| Ok(()),
            read: |_, _| Ok(()),
            is_set: |_| false,
            number: |_| None,
            resolve: |_, _| {},
            clear: |_| {},
        },
    };

    /// Its flag, `--NAME`.
    pub fn flag(&self) -> String {
        format!("--{}", self.key.replace('_', "-"))
    }

    /// Returns true if its value names files or machines.
    pub fn shows_locations(&self) -> bool {
        self.is_location || matches!(self.form, ValueForm::Path)
    }

    /// Returns true if it is no key of the configuration file, but a flag for tests and other commands.
    pub fn is_flag_only(&self) -> bool {
        self.shown_in == HelpLength::Neither
    }
}

/// The default that help and documentation show.
pub enum ShownDefault {
    /// There is none: without the option nothing happens.
    Nothing,
    Number(u32),
    Words(&'static str),
}

impl fmt::Display for ShownDefault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShownDefault::Nothing => Ok(()),
            ShownDefault::Number(number) => number.fmt(f),
            ShownDefault::Words(words) => f.write_str(words),
        }
    }
}

/// Which help shows a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HelpLength {
    /// `-h` and `--help`.
    Short,
    /// `--help`.
    Long,
    Neither,
}

/// A group of flags in the help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HelpGroup {
    /// Stands first, without a heading.
    Common,
    Engine,
    Kv,
    Rope,
    Simulator,
}

impl HelpGroup {
    /// The heading; `None` for the flags that stand first.
    pub fn heading(self) -> Option<&'static str> {
        match self {
            HelpGroup::Common => None,
            HelpGroup::Engine => Some("How the model runs"),
            HelpGroup::Kv => Some("KV cache and handoffs"),
            HelpGroup::Rope => Some("Longer contexts"),
            HelpGroup::Simulator => Some("Simulator"),
        }
    }
}

/// The range of a whole number.
pub(super) const fn whole(range: &RangeInclusive<u32>) -> Option<RangeInclusive<f64>> {
    Some(RangeInclusive::new(*range.start() as f64, *range.end() as f64))
}

/// Declares options: doc comments are the help, `KEY: TYPE` or `KEY => FIELD: TYPE` with the field of [`EngineOptions`] that
/// receives the value, and then fields of [`Declaration`] that differ from [`Declaration::UNSAID`]. The options under `keys` are keys
/// of the configuration file and flags, those under `flags` only flags.
///
/// An option without a field of its own reaches the engine together with others ([`combined`](super::combined)), or is for
/// the node around the engine.
macro_rules! engine_options {
    (keys {$(
        $(#[doc = $help:literal])+
        $key:ident $(=> $field:ident)?: $type:ty { $($declared:tt)* }
    )*} flags {$(
        $(#[doc = $flag_help:literal])+
        $flag:ident $(=> $flag_field:ident)?: $flag_type:ty { $($flag_declared:tt)* }
    )*}) => {
        /// The options as they are written. Anything absent has the engine's own default.
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct WrittenOptions {
            $(
                $(#[doc = $help])+
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $key: Option<$type>,
            )*
            $(
                $(#[doc = $flag_help])+
                #[serde(skip_serializing_if = "Option::is_none")]
                #[schemars(skip)]
                pub $flag: Option<$flag_type>,
            )*
        }

        impl WrittenOptions {
            /// These options, and those of `other` that are not among them.
            pub fn or(self, other: WrittenOptions) -> WrittenOptions {
                WrittenOptions {
                    $($key: self.$key.or(other.$key),)*
                    $($flag: self.$flag.or(other.$flag),)*
                }
            }
        }

        /// The options of an engine that starts, and what was found for them. `None` stands for the engine's own default.
        #[derive(Debug, Clone, Default)]
        pub struct EngineOptions {
            pub kind: EngineKind,
            /// The model's file, if the engine needs one.
            pub model: Option<PathBuf>,
            pub name: Option<String>,
            /// The types of K and V in the cache.
            pub cache_types: CacheTypes,
            /// Changes of the position embedding.
            pub rope: RopeOptions,
            /// The adapter that changes the weights.
            pub lora: Option<LoraFile>,
            /// Tensors that stay with the processor.
            pub cpu_tensors: CpuTensors,
            /// The source text of a chat template that replaces the model's own.
            pub chat_template: Option<String>,
            /// The program whose hidden command `render` renders chat templates in a process of its own. `None`: this process
            /// renders, and a template may take all its memory.
            pub template_program: Option<PathBuf>,
            /// Workers that compute layers, too.
            pub workers: Vec<WorkerEndpoint>,
            /// A smaller model that guesses tokens.
            pub draft: Option<PathBuf>,
            /// `None`: nothing is kept on disk.
            pub store_secret: Option<StoreSecret>,
            $($(
                #[doc = concat!("[`WrittenOptions::", stringify!($key), "`]")]
                pub $field: Option<$type>,
            )?)*
            $($(
                #[doc = concat!("[`WrittenOptions::", stringify!($flag), "`]")]
                pub $flag_field: Option<$flag_type>,
            )?)*
        }

        impl From<WrittenOptions> for EngineOptions {
            /// What was found (`model`, `name`, `chat_template`, `template_program`, `workers`, `store_secret`) is for the caller to add.
            fn from(written: WrittenOptions) -> EngineOptions {
                EngineOptions {
                    kind: written.kind(),
                    cache_types: written.cache_types(),
                    rope: written.rope(),
                    lora: written.lora_file(),
                    cpu_tensors: written.cpu_tensors(),
                    draft: written.draft_file(),
                    model: None,
                    name: None,
                    chat_template: None,
                    template_program: None,
                    workers: Vec::new(),
                    store_secret: None,
                    $($($field: written.$key,)?)*
                    $($($flag_field: written.$flag,)?)*
                }
            }
        }

        /// Every option, in the order of the help.
        pub static DECLARED: &[DeclaredOption] = &[
            $(engine_options!(@declared $key: $type, concat!($($help),+), HelpLength::Short, { $($declared)* }),)*
            $(engine_options!(@declared $flag: $flag_type, concat!($($flag_help),+), HelpLength::Neither, { $($flag_declared)* }),)*
        ];
    };
    (@declared $key:ident: $type:ty, $help:expr, $shown_in:expr, { $($declared:tt)* }) => {
        Declaration {
            $($declared)*
            ..Declaration {
                key: stringify!($key),
                help: $help.trim_ascii(),
                value_name: <$type as OptionValue>::NAME,
                form: <$type as OptionValue>::FORM,
                shown_in: $shown_in,
                field: OptionField {
                    check: |text| <$type as OptionValue>::read(&[text]).map(drop),
                    read: |options, texts| {
                        options.$key = Some(OptionValue::read(texts)?);
                        Ok(())
                    },
                    is_set: |options| options.$key.as_ref().is_some_and(|value| !OptionValue::is_empty(value)),
                    number: |options| options.$key.as_ref().and_then(OptionValue::number),
                    resolve: |options, folder| options.$key.iter_mut().for_each(|value| value.resolve(folder)),
                    clear: |options| options.$key = None,
                },
                ..Declaration::UNSAID
            }
        }
    };
}
pub(super) use engine_options;
