//! `baton setup`: makes this machine an endpoint or a node of one, at every boot if wanted.
//!
//! It shows what it will do and asks before it does it; with `--yes`, scripts give flags instead. It may be repeated, and remembers
//! what it has made (`record.rs`), so that `--remove` undoes that and nothing else.

mod answers;
mod args;
mod boot;
mod lingering;
mod place;
mod record;
mod steps;

use baton_link::transport::Transport;
use baton_proxy::config::DEFAULT_MODEL;
use baton_proxy::serve::{CommandFailure, look_for_servers};

use self::answers::{Answers, SetupMachine};
pub(super) use self::args::SetupArgs;
use self::args::{BootChoice, SetupPairing, SetupRole};
use self::place::SetupPlace;
use self::record::SetupRecord;
use self::steps::SetupSteps;
use super::discover::servers::usable;
use super::pair::{PairFirst, pair_first};
use super::question::{confirmed, is_person_there};
use super::terminal;

/// Asks, shows, and does it; or undoes it.
pub(super) async fn run(args: SetupArgs) -> Result<(), CommandFailure> {
    let place = SetupPlace::of_user()?;
    let mut record = SetupRecord::read(&place.config)?;
    if !args.yes && !is_person_there() {
        return Err(CommandFailure("nobody can be asked here: give flags and --yes (baton setup --help)".into()));
    }
    if args.remove {
        return remove(&place, record, args.yes);
    }
    let given = Answers {
        role: args.role.unwrap_or(SetupRole::Endpoint),
        model: args.model.clone().unwrap_or_else(|| DEFAULT_MODEL.to_owned()),
        pair: args.pair.clone().unwrap_or(SetupPairing::No),
        service: args.service.unwrap_or(BootChoice::Off),
        adopt: args.adopt.unwrap_or(BootChoice::Off),
    };
    let answers = match args.yes {
        true => given,
        false => {
            let seen = look_for_servers(Vec::new(), &Transport::default()).await?;
            let machine = SetupMachine {
                is_paired: place.cluster.exists(),
                has_services: place.boot.is_some(),
                servers: usable(&seen),
            };
            answers::ask(&args, given, &machine)?
        }
    };
    let steps = SetupSteps::new(&answers, &place, &record)?;
    terminal::print_line(format_args!("\nbaton setup will\n{steps}"))?;
    if !args.yes && !confirmed("Do this?")? {
        return Err(CommandFailure("nothing was changed".into()));
    }
    let had_pairing = place.cluster.exists();
    steps.note_folders(&mut record, &place);
    match &answers.pair {
        SetupPairing::No => {}
        SetupPairing::Show => pair_first(PairFirst::Admit).await?,
        SetupPairing::Join(code) => pair_first(PairFirst::Join { code: code.clone(), at: None }).await?,
    }
    if !had_pairing && let Some(made) = place.cluster.about()? {
        record.pairing = Some(made);
        // A step that fails later leaves a pairing that `--remove` knows.
        record.write(&place.config)?;
    }
    let left = steps.carry_out(record, &place)?;
    terminal::print_line(steps.next())?;
    Ok(left.iter().try_for_each(terminal::print_line)?)
}

/// The command that starts what a setup without a service has made; `None` without such a setup, or if its record cannot be read.
pub(super) fn command_without_service() -> Option<String> {
    let place = SetupPlace::of_user().ok()?;
    SetupRecord::read(&place.config).ok()?.start_by_hand
}

fn remove(place: &SetupPlace, record: SetupRecord, yes: bool) -> Result<(), CommandFailure> {
    if record.is_empty() {
        return Ok(terminal::print_line("`baton setup` has made nothing on this machine.")?);
    }
    terminal::print_line(format_args!("baton setup --remove will\n{record}"))?;
    if !yes && !confirmed("Do this?")? {
        return Err(CommandFailure("nothing was changed".into()));
    }
    record.undo(place)?.iter().try_for_each(terminal::print_line)?;
    Ok(terminal::print_line("Removed. Models, KV on disk and the usage of keys stay in their folders.")?)
}
