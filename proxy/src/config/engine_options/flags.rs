//! The options as flags of `baton serve` and `baton node`, and as one JSON value for the child of an endpoint.

use std::ffi::{OsStr, OsString};
use std::ops::{Deref, DerefMut};

use baton_engines::engine_options::{
    DECLARED, DeclaredOption, HelpLength, PossibleWord, ShownDefault, ValueForm, WrittenOptions,
};
use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches, value_parser};
use schemars::JsonSchema;
use serde::Deserialize;

/// The flag of `baton node` that takes all options as one JSON value.
pub const OPTIONS_FLAG: &str = "engine-options";

/// Options with a flag each.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct EngineFlags(pub WrittenOptions);

impl Deref for EngineFlags {
    type Target = WrittenOptions;

    fn deref(&self) -> &WrittenOptions {
        &self.0
    }
}

impl DerefMut for EngineFlags {
    fn deref_mut(&mut self) -> &mut WrittenOptions {
        &mut self.0
    }
}

impl Args for EngineFlags {
    fn augment_args(command: Command) -> Command {
        DECLARED.iter().flat_map(|option| [Some(flag(option)), negation(option)]).flatten().fold(command, Command::arg)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for EngineFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut flags = EngineFlags::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        for option in DECLARED {
            let is_negated = option.negation.is_some_and(|name| matches.get_flag(name));
            let values: Option<Vec<&OsStr>> = match is_negated {
                true => Some(vec![OsStr::new("false")]),
                false => matches.get_raw(option.key).map(Iterator::collect),
            };
            if let Some(values) = values {
                let refused = |message| Error::raw(ErrorKind::ValueValidation, format!("{}: {message}", option.flag()));
                (option.field.read)(&mut self.0, &values).map_err(refused)?;
            }
        }
        Ok(())
    }
}

/// An option's flag.
fn flag(option: &'static DeclaredOption) -> Arg {
    let help = match option.default {
        ShownDefault::Nothing => option.help.to_owned(),
        _ => format!("{} [default: {}]", option.help, option.default),
    };
    let arg = Arg::new(option.key).long(option.key.replace('_', "-")).value_name(option.value_name).help(help);
    let arg = arg.help_heading(option.group.heading());
    let arg = arg.hide_short_help(option.shown_in == HelpLength::Long).hide(option.is_flag_only());
    let arg = option.conflicts_with.into_iter().fold(arg, Arg::conflicts_with);
    let arg = option.env.into_iter().fold(arg, Arg::env);
    with_value(arg, &option.form, option)
}

/// The same with what its values may be.
fn with_value(arg: Arg, form: &'static ValueForm, option: &'static DeclaredOption) -> Arg {
    let checked = |text: &str| (option.field.check)(OsStr::new(text)).map(|()| text.to_owned());
    match form {
        ValueForm::WholeNumber | ValueForm::Text => arg.value_parser(checked),
        ValueForm::Number => arg.value_parser(checked).allow_negative_numbers(true),
        ValueForm::Switch => arg.value_parser(value_parser!(bool)).num_args(0..=1).default_missing_value("true"),
        ValueForm::Words(words) => arg.value_parser(PossibleValuesParser::new(words().into_iter().map(possible_value))),
        ValueForm::Path => arg.value_parser(value_parser!(std::path::PathBuf)),
        ValueForm::List(item) => with_value(arg, item, option).action(ArgAction::Append).value_delimiter(','),
    }
}

fn possible_value(PossibleWord { word, about }: PossibleWord) -> PossibleValue {
    about.into_iter().fold(PossibleValue::new(word), PossibleValue::help)
}

/// The flag that sets a switch to false, if it has one.
fn negation(option: &'static DeclaredOption) -> Option<Arg> {
    let name = option.negation?;
    let arg = Arg::new(name).long(name).action(ArgAction::SetTrue).conflicts_with(option.key);
    let arg = arg.help_heading(option.group.heading());
    Some(arg.help(format!("The same as {} false", option.flag())))
}

/// The options as arguments for a child: one flag with one JSON value. Errors: a path is not UTF-8.
pub fn to_args(options: &WrittenOptions) -> Result<[OsString; 2], serde_json::Error> {
    Ok([format!("--{OPTIONS_FLAG}").into(), serde_json::to_string(options)?.into()])
}

/// Reads the value of [`to_args`].
pub fn of_json(json: &str) -> Result<WrittenOptions, String> {
    serde_json::from_str(json).map_err(|error| error.to_string())
}
