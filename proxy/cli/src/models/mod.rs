//! `baton models`: which machine has which model, and orders to a running endpoint that change it.

mod ask;
mod auto;
mod follow;
mod table;

use std::convert::Infallible;
use std::str::FromStr;

use baton_proxy::http::baton::models::LOCAL;
use baton_proxy::serve::{CommandFailure, model_files};
use baton_schemas::machine_models::ClusterOrder;
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use self::ask::{list, order, set_loaded};
use self::follow::follow;
use super::endpoint::EndpointArgs;
use super::question::{confirmed, is_person_there};
use super::terminal;

/// Options of `baton models`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct ModelsArgs {
    #[command(subcommand)]
    command: Option<ModelsCommand>,
    #[command(flatten)]
    endpoint: EndpointArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand)]
enum ModelsCommand {
    /// Copy a model from one machine to another, over the network between them. Ctrl-C leaves it running.
    Copy {
        /// The model's name, as `baton models` lists it
        model: String,
        /// The machine that has it
        #[arg(long, value_name = "MACHINE")]
        from: String,
        /// The machine that gets it
        #[arg(long, value_name = "MACHINE")]
        to: String,
        #[command(flatten)]
        endpoint: EndpointArgs,
    },
    /// Fetch a model to a machine, as `baton pull` does to this one. Ctrl-C leaves it running.
    Pull {
        /// A catalogue name, or OWNER/REPO[:FILE] on the Hugging Face hub
        model: String,
        /// The machine that gets it. `auto` proposes one, and a quantization, by memory and measured speed
        #[arg(long, value_name = "MACHINE|auto", default_value = "local")]
        on: PullTarget,
        /// The name under which the endpoint serves it, if it is fetched to the endpoint's own machine
        #[arg(long)]
        name: Option<String>,
        /// With `--on auto`: do what is proposed without asking
        #[arg(long, short)]
        yes: bool,
        #[command(flatten)]
        endpoint: EndpointArgs,
    },
    /// Delete a model that no process uses.
    Delete {
        /// The model's name, as `baton models` lists it
        model: String,
        /// The machine that has it
        #[arg(long, value_name = "MACHINE")]
        on: String,
        #[command(flatten)]
        endpoint: EndpointArgs,
    },
    /// End the transfer to a machine. What has arrived is kept for the next one.
    Cancel {
        /// The machine that receives
        #[arg(long, value_name = "MACHINE")]
        on: String,
        #[command(flatten)]
        endpoint: EndpointArgs,
    },
    /// Load a model that the endpoint serves on demand.
    Load {
        /// The model's name, as requests use it
        model: String,
        /// Keep it loaded until it is unloaded
        #[arg(long)]
        pin: bool,
        #[command(flatten)]
        endpoint: EndpointArgs,
    },
    /// Unload a model that the endpoint serves on demand, as soon as nothing uses it.
    Unload {
        /// The model's name, as requests use it
        model: String,
        #[command(flatten)]
        endpoint: EndpointArgs,
    },
}

/// The machine that gets a model.
#[derive(Debug, Clone)]
enum PullTarget {
    /// The one that is proposed.
    Auto,
    Machine(String),
}

impl FromStr for PullTarget {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<PullTarget, Infallible> {
        Ok(if text.eq_ignore_ascii_case("auto") { PullTarget::Auto } else { PullTarget::Machine(text.to_owned()) })
    }
}

/// Proposes a quantization and a machine, asks, and pulls. Errors: nothing fits, or nobody says yes.
async fn pull_where_it_fits(
    endpoint: &EndpointArgs,
    model: &str,
    name: Option<String>,
    yes: bool,
) -> Result<(), CommandFailure> {
    if !yes && !is_person_there() {
        return Err(CommandFailure("nobody can be asked here: give --yes, or a machine with --on".into()));
    }
    let choices = baton_fetch::choices(model, &model_files::pull_options()?).await?;
    let mut machines = auto::machines(&list(endpoint).await?, &endpoint.state().await?);
    if name.is_some() {
        machines.retain(|machine| machine.name == LOCAL);
    }
    let proposal = auto::propose(&choices, &machines).map_err(CommandFailure)?;
    terminal::print(&proposal)?;
    if !yes && !confirmed("Pull it?")? {
        return Err(CommandFailure("nothing was pulled".into()));
    }
    let on = proposal.machine.name;
    let pull = ClusterOrder::Pull { model: proposal.choice.name, on: on.clone(), name: name.clone() };
    let taken = order(endpoint, &pull).await?;
    follow(endpoint, &on, name.as_deref(), taken).await
}

/// Lists, or gives an order and follows it to its end. Errors: the endpoint or a machine refuses, or the transfer fails.
pub(super) async fn run(args: ModelsArgs) -> Result<(), CommandFailure> {
    match args.command {
        None => {
            let models = list(&args.endpoint).await?;
            let text = if args.json { serde_json::to_string(&models)? + "\n" } else { table::render(&models) };
            terminal::print(text)?;
            Ok(())
        }
        Some(ModelsCommand::Copy { model, from, to, endpoint }) => {
            let taken = order(&endpoint, &ClusterOrder::Copy { model, from, to: to.clone() }).await?;
            follow(&endpoint, &to, None, taken).await
        }
        Some(ModelsCommand::Pull { model, on: PullTarget::Auto, name, yes, endpoint }) => {
            pull_where_it_fits(&endpoint, &model, name, yes).await
        }
        Some(ModelsCommand::Pull { model, on: PullTarget::Machine(on), name, yes: _, endpoint }) => {
            let taken = order(&endpoint, &ClusterOrder::Pull { model, on: on.clone(), name: name.clone() }).await?;
            follow(&endpoint, &on, name.as_deref(), taken).await
        }
        Some(ModelsCommand::Delete { model, on, endpoint }) => {
            order(&endpoint, &ClusterOrder::Delete { model: model.clone(), on: on.clone() }).await?;
            Ok(terminal::print_line(format_args!("{model} is deleted on {on}"))?)
        }
        Some(ModelsCommand::Cancel { on, endpoint }) => {
            order(&endpoint, &ClusterOrder::Cancel { on: on.clone() }).await?;
            Ok(terminal::print_line(format_args!("the transfer to {on} is cancelled; what has arrived is kept"))?)
        }
        Some(ModelsCommand::Load { model, pin, endpoint }) => {
            let keep_alive = if pin { json!(-1) } else { Value::Null };
            set_loaded(&endpoint, &model, &keep_alive).await?;
            Ok(terminal::print_line(format_args!("{model} is loaded"))?)
        }
        Some(ModelsCommand::Unload { model, endpoint }) => {
            set_loaded(&endpoint, &model, &json!(0)).await?;
            Ok(terminal::print_line(format_args!("{model} is unloaded as soon as nothing uses it"))?)
        }
    }
}
