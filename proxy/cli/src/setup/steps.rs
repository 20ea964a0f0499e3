//! What a setup does, decided before any of it is done, so that it can be shown.

use std::fmt;
use std::path::{Path, PathBuf};

use baton_pairing::ClusterFolder;
use baton_proxy::serve::CommandFailure;

use super::answers::Answers;
use super::args::{BootChoice, SetupPairing, SetupRole};
use super::boot::{BootCommand, BootService};
use super::lingering;
use super::place::SetupPlace;
use super::record::{Remnant, SetupRecord, hash, write_file};

/// A setup.
pub(super) struct SetupSteps {
    pair: SetupPairing,
    files: Vec<NewFile>,
    /// Stop an older setup's service that this one does not have.
    stop: Vec<BootCommand>,
    start: Vec<BootCommand>,
    /// Turn lingering on, which the service needs.
    lingers: bool,
    /// What the service runs, or what its owner types.
    command: Vec<String>,
    /// The service, if there is one.
    service: Option<BootService>,
    role: SetupRole,
    /// It uses other servers on this machine, too.
    adopts: bool,
}

/// A file to write. One that somebody else wrote is kept.
struct NewFile {
    path: PathBuf,
    text: String,
    keeps: bool,
}

impl SetupSteps {
    /// The steps to these answers. Errors: they cannot be done on this machine.
    pub(super) fn new(
        answers: &Answers,
        place: &SetupPlace,
        record: &SetupRecord,
    ) -> Result<SetupSteps, CommandFailure> {
        let Answers { role, pair, service, .. } = answers;
        check_pairing(*role, pair, &place.cluster)?;
        let service = match (service, &place.boot) {
            (BootChoice::On, None) => {
                return Err(CommandFailure(
                    "neither systemd nor launchd is here to start it at boot: --service off".into(),
                ));
            }
            (BootChoice::On, Some(boot)) => Some(boot.clone()),
            (BootChoice::Off, _) => None,
        };
        let model = absolute(&answers.model);
        let adopts = *role == SetupRole::Endpoint && answers.adopt == BootChoice::On;
        let config = place.config.join("baton.toml");
        let mut command = vec![place.program.display().to_string()];
        let mut files = Vec::new();
        let file = |path: PathBuf, text: String| NewFile { keeps: !record.may_replace(&path), path, text };
        match role {
            SetupRole::Endpoint => {
                let searches = !matches!(pair, SetupPairing::No) || place.cluster.exists();
                files.push(file(config.clone(), config_text(&model, searches, adopts)));
                command.extend(["serve".to_owned(), "--config".to_owned(), config.display().to_string()]);
            }
            SetupRole::Prefill | SetupRole::Decode => {
                let role = if *role == SetupRole::Prefill { "prefill" } else { "decode" };
                command.extend(["node", "--role", role, "--model", &model, "--listen", NODE_LISTEN].map(str::to_owned));
            }
            SetupRole::Worker => {
                command.extend(["node", "--role", "worker", "--listen", NODE_LISTEN].map(str::to_owned))
            }
        }
        if let Some(boot) = &service {
            let reloads = *role == SetupRole::Endpoint;
            files.push(file(boot.file().to_owned(), boot.text(&command, reloads)));
        }
        if let Some(kept) =
            files.iter().find(|file| file.keeps && service.as_ref().is_some_and(|boot| boot.file() == file.path))
        {
            let path = kept.path.display();
            return Err(CommandFailure(format!(
                "{path} is not by `baton setup`: remove it first, or use --service off"
            )));
        }
        let (start, stop) = match &service {
            Some(boot) => (boot.start(), Vec::new()),
            None => (Vec::new(), record.stop_commands()),
        };
        let lingers = service.as_ref().is_some_and(BootService::needs_lingering) && !lingering::is_on();
        Ok(SetupSteps { pair: pair.clone(), files, stop, start, lingers, command, service, role: *role, adopts })
    }

    /// Notes the folders that will be made.
    pub(super) fn note_folders(&self, record: &mut SetupRecord, place: &SetupPlace) {
        let written = self.files.iter().filter(|file| !file.keeps).map(|file| &*file.path);
        let cluster = (self.pair != SetupPairing::No).then(|| place.cluster.path());
        record.note_missing_folders(written.chain([SetupRecord::path(&place.config).as_path()]).chain(cluster));
    }

    /// Does everything but the pairing, which is done before. Returns what could not be done.
    pub(super) fn carry_out(
        &self,
        mut record: SetupRecord,
        place: &SetupPlace,
    ) -> Result<Option<Remnant>, CommandFailure> {
        let mut left = None;
        match &self.service {
            Some(boot) => {
                record.stop = boot.stop();
                record.note_missing_logs(boot);
            }
            None => left = record.stop_service()?,
        }
        record.start_by_hand = self.service.is_none().then(|| shell_words(&self.command));
        record.lingers |= self.lingers;
        let written = || self.files.iter().filter(|file| !file.keeps);
        record.files.extend(written().map(|file| (file.path.clone(), hash(file.text.as_bytes()))));
        record.write(&place.config)?;
        for file in written() {
            write_file(&file.path, &file.text)?;
        }
        self.start.iter().try_for_each(BootCommand::run)?;
        if self.lingers
            && let Err(failure) = lingering::on().run()
        {
            record.lingers = false;
            record.write(&place.config)?;
            left = Some(format!("It starts only when you log in: {}", failure.0));
        }
        Ok(left)
    }

    /// What its owner does next.
    pub(super) fn next(&self) -> String {
        let ready = match (&self.service, self.role) {
            (Some(boot), _) => format!("It starts now and at every boot. Watch it: {}", boot.watch()),
            (None, _) => format!("Start it: {}", shell_words(&self.command)),
        };
        let use_it = match self.role {
            SetupRole::Endpoint => "\nThen: baton chat",
            _ => "\nThe endpoint finds it by itself: `baton status` there shows it",
        };
        format!("{ready}{use_it}\nUndo:  baton setup --remove")
    }
}

/// Where a node listens: other machines must reach it.
const NODE_LISTEN: &str = "0.0.0.0:9000";

/// Errors: a machine that others use would have no key.
fn check_pairing(role: SetupRole, pair: &SetupPairing, cluster: &ClusterFolder) -> Result<(), CommandFailure> {
    match (role, pair) {
        (SetupRole::Endpoint, _) | (_, SetupPairing::Join(_)) => Ok(()),
        _ if cluster.exists() => Ok(()),
        _ => Err(CommandFailure(
            "a node needs the cluster's key: --pair CODE, which `baton pair` shows on the endpoint's machine".into(),
        )),
    }
}

/// A model that is a file here, by its whole path: a service starts in another folder. Links are kept: a hub's cache links a
/// model's name to a file without it, and parts are found by their names.
fn absolute(model: &str) -> String {
    let path = Path::new(model);
    let whole = path.exists().then(|| std::path::absolute(path).ok()).flatten();
    whole.map_or_else(|| model.to_owned(), |path| path.display().to_string())
}

fn config_text(model: &str, searches: bool, adopts: bool) -> String {
    // TOML's basic strings have JSON's escapes.
    let model = serde_json::Value::from(model);
    format!(
        "# Written by `baton setup`. docs/configuration.md lists every key; a running endpoint applies a change within 2 s.\n\
         # For other machines: listen = \"0.0.0.0:8080\", and api_keys.\n\
         listen = \"127.0.0.1:8080\"\n\
         discover = {searches}\n\
         # Use other servers on this machine, such as Ollama, as upstreams (docs/upstreams.md).\n\
         adopt = {adopts}\n\n[model]\nsource = {model}\n"
    )
}

/// A command line that a shell takes as it is.
fn shell_words(command: &[String]) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-:+=@".contains(c);
    let word = |arg: &String| match arg.chars().all(is_plain) {
        true => arg.clone(),
        false => format!("'{}'", arg.replace('\'', r"'\''")),
    };
    command.iter().map(word).collect::<Vec<_>>().join(" ")
}

impl fmt::Display for SetupSteps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.pair {
            SetupPairing::No => {}
            SetupPairing::Show => writeln!(f, "  pair    show a code until another machine has joined")?,
            SetupPairing::Join(_) => writeln!(f, "  pair    join the machine that shows the code")?,
        }
        for command in &self.stop {
            writeln!(f, "  run     {}", shell_words(&command.args))?;
        }
        for file in &self.files {
            let word = if file.keeps { "keep" } else { "write" };
            writeln!(f, "  {word:<6}  {}", file.path.display())?;
        }
        if self.adopts {
            writeln!(f, "  use     the models of other servers on this machine")?;
        }
        for command in self.start.iter().chain(self.lingers.then(lingering::on).iter()) {
            writeln!(f, "  run     {}", shell_words(&command.args))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_with_any_model_name_is_read_as_it_was_given() {
        for model in ["smollm2", "/home/a b/\"m\"\\.gguf"] {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), config_text(model, true, true)).unwrap();
            let read = baton_proxy::config::ConfigFile::read(file.path()).unwrap();
            assert_eq!(read.raw.model.source.as_deref(), Some(model));
            assert_eq!((read.raw.discover, read.raw.adopt), (Some(true), Some(true)));
        }
    }

    #[test]
    fn a_command_line_can_be_pasted() {
        let command = ["/a/baton", "a b", "it's"].map(str::to_owned);
        assert_eq!(shell_words(&command), r"/a/baton 'a b' 'it'\''s'");
    }
}
