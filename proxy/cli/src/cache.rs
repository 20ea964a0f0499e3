//! `baton cache`: the KV that engines keep on disk. Endpoints and nodes may use the folder meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use baton_engines::engine_options::StoreSecret;
use baton_proxy::config::transport_args::{TransportArgs, found_pairing};
use baton_proxy::config::{ConfigFile, ServeConfig};
use baton_proxy::http::{AccessConfig, access};
use baton_proxy::serve::{CommandFailure, store_secret};
use baton_schemas::CacheScope;
use baton_schemas::counted::counted;
use baton_store::{Cleared, Inventory, StoreKey, StoredModel, StoredScope, Verified};
use clap::{Args, Subcommand};
use serde::Serialize;

use super::columns::{seconds_ago, size, table};
use super::{config_file, terminal};

/// Options of `baton cache`.
#[derive(Args)]
pub(super) struct CacheArgs {
    #[command(subcommand)]
    command: Option<CacheCommand>,
    /// The configuration whose kv_store names the folders
    #[arg(long, short, value_name = "FILE", global = true, conflicts_with = "folder")]
    config: Option<PathBuf>,
    /// The folder of a store
    #[arg(long, value_name = "FOLDER", global = true)]
    folder: Option<PathBuf>,
    /// Print JSON: a line for each folder
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum CacheCommand {
    /// List sizes, ages and hits by model and scope, and the bytes that were written. This is the default.
    List,
    /// Read every byte, and remove what is damaged.
    Verify,
    /// Remove KV. Engines that run forget it, too, within seconds.
    Clear {
        /// Only the KV of this model, by its name or ID in the list
        #[arg(long, value_name = "MODEL")]
        model: Option<String>,
        /// Only the KV of this scope: as in the list, or a name of [[keys]]
        #[arg(long, value_name = "SCOPE")]
        scope: Option<String>,
    },
}

/// What the command works on.
struct Stores {
    folders: BTreeSet<PathBuf>,
    key: StoreKey,
    /// The names of keys, by their scopes.
    names: BTreeMap<u64, String>,
}

/// The report on a folder, for programs.
#[derive(Serialize)]
struct OfFolder<'a, R> {
    folder: &'a Path,
    #[serde(flatten)]
    report: &'a R,
}

/// Works on one folder after the other. Errors: there is none, or one cannot be used; the others were worked on.
pub(super) fn run(args: &CacheArgs) -> Result<(), CommandFailure> {
    stores(args)?.work(args)
}

fn show(args: &CacheArgs, report: &impl Serialize, text: &str) -> Result<(), CommandFailure> {
    match args.json {
        true => terminal::print_line(serde_json::to_string(report)?)?,
        false => _ = terminal::print(text)?,
    }
    Ok(())
}

fn stores(args: &CacheArgs) -> Result<Stores, CommandFailure> {
    let key = |transport: &TransportArgs| -> Result<StoreKey, CommandFailure> {
        let secret = store_secret::found(transport)?.map(|StoreSecret(secret)| secret);
        // Without a secret nothing can be read, but all can be removed.
        Ok(secret.map_or_else(
            || StoreKey::derive(&rand::random::<[u8; 32]>()),
            |secret| StoreKey::derive(secret.as_bytes()),
        ))
    };
    if let Some(folder) = &args.folder {
        let key = key(&TransportArgs::default().or_paired())?;
        return Ok(Stores { folders: BTreeSet::from([folder.clone()]), key, names: BTreeMap::new() });
    }
    let Some(file) = &args.config else {
        return Err(CommandFailure("name a store: --folder FOLDER, or --config FILE".to_owned()));
    };
    let file = ConfigFile::read(file)?.with_pairing(found_pairing());
    let config = file.check(Vec::new()).map_err(config_file::print_mistakes)?;
    let folders = config.store_folders();
    if folders.is_empty() {
        return Err(CommandFailure("the configuration keeps no KV on disk: kv_store has no disk".to_owned()));
    }
    Ok(Stores { folders, key: key(&config.startup.transport)?, names: names(&config)? })
}

/// The names of a configuration's keys, by their scopes.
fn names(config: &ServeConfig) -> Result<BTreeMap<u64, String>, CommandFailure> {
    // `scope_key` would make a secret, which is for the endpoint's own user to do.
    if store_secret::found(&config.startup.transport)?.is_none() {
        return Ok(BTreeMap::new());
    }
    let scope_key = store_secret::scope_key(config)?;
    let access = access::shared(&AccessConfig { scope_key, ..config.access.clone() });
    Ok(access.load().keys.scopes().into_iter().map(|(scope, name)| (scope.0, name)).collect())
}

impl Stores {
    fn work(&self, args: &CacheArgs) -> Result<(), CommandFailure> {
        let outcomes = self.folders.iter().map(|folder| self.work_on(folder, args));
        let failures: Vec<String> = outcomes.filter_map(Result::err).map(|CommandFailure(why)| why).collect();
        if failures.is_empty() { Ok(()) } else { Err(CommandFailure(failures.join("; "))) }
    }

    fn work_on(&self, folder: &Path, args: &CacheArgs) -> Result<(), CommandFailure> {
        let shown = folder.display();
        match &args.command {
            None | Some(CacheCommand::List) => {
                let inventory = baton_store::list(folder, &self.key)?;
                show(args, &inventory, &self.list(&inventory))
            }
            Some(CacheCommand::Verify) => {
                let report = baton_store::verify(folder, &self.key)?;
                show(args, &OfFolder { folder, report: &report }, &format!("{shown}: {}\n", verification(&report)))?;
                match report.unread.len() as u64 {
                    0 => Ok(()),
                    n => Err(CommandFailure(format!("{shown}: {} cannot be read", counted(n, "file")))),
                }
            }
            Some(CacheCommand::Clear { model, scope }) => {
                let scope = scope.as_deref().map(|scope| self.scope(scope)).transpose()?;
                let scopes = scope.as_ref().map(std::slice::from_ref);
                let cleared = baton_store::clear(folder, &self.key, model.as_deref(), scopes)?;
                let words = match cleared {
                    Cleared { n_files: 0, .. } => "nothing to remove".to_owned(),
                    Cleared { n_files, n_bytes } => format!("removed {}, {}", counted(n_files, "file"), size(n_bytes)),
                };
                show(args, &OfFolder { folder, report: &cleared }, &format!("{shown}: {words}\n"))
            }
        }
    }

    fn scope(&self, text: &str) -> Result<CacheScope, CommandFailure> {
        let of_name = self.names.iter().find(|(_, name)| *name == text).map(|(scope, _)| Ok(CacheScope(*scope)));
        of_name
            .unwrap_or_else(|| text.parse())
            .map_err(|problem| CommandFailure(format!("--scope {problem}, or the name of a key in the configuration")))
    }

    fn list(&self, inventory: &Inventory) -> String {
        let Inventory { folder, n_bytes, written, models, n_unreadable, unreadable_bytes } = inventory;
        let mut text = format!("{}: {}", folder.display(), size(*n_bytes));
        let today = written.iter().find(|day| day.days_ago == 0).map_or(0, |day| day.n_bytes);
        let week: u64 = written.iter().filter(|day| day.days_ago < 7).map(|day| day.n_bytes).sum();
        _ = writeln!(text, "; written today {}, in 7 days {}", size(today), size(week));
        if !models.is_empty() {
            let head = ["MODEL", "ID", "SCOPE", "BLOCKS", "TOKENS", "SIZE", "LAST USED", "OLDEST", "HITS"];
            let rows = models.iter().flat_map(|model| model.scopes.iter().map(move |scope| (model, scope)));
            text += &table(&head, rows.map(|(model, scope)| self.row(model, scope)));
        }
        if *n_unreadable > 0 {
            let files = counted(*n_unreadable, "file");
            _ = writeln!(text, "  {files}, {}, cannot be read: damaged, or of another key", size(*unreadable_bytes));
        }
        text
    }

    fn row(&self, model: &StoredModel, scope: &StoredScope) -> Vec<String> {
        let name = self.names.get(&scope.scope.0).cloned().unwrap_or_else(|| scope.scope.to_string());
        vec![
            model.model.clone().unwrap_or_else(|| "-".to_owned()),
            model.id.get(..8).unwrap_or(&model.id).to_owned(),
            name,
            scope.n_blocks.to_string(),
            scope.n_tokens.to_string(),
            size(scope.n_bytes),
            seconds_ago(scope.last_used_s),
            seconds_ago(scope.oldest_s),
            scope.n_hits.to_string(),
        ]
    }
}

fn verification(verified: &Verified) -> String {
    let Verified { n_right, removed, unread, n_of_other_keys } = verified;
    let mut text = format!("{} right", counted(*n_right, "block"));
    if !removed.is_empty() {
        _ = write!(text, ", {} removed that were damaged", counted(removed.len() as u64, "file"));
    }
    if !unread.is_empty() {
        _ = write!(text, ", {} that cannot be read", counted(unread.len() as u64, "file"));
    }
    if *n_of_other_keys > 0 {
        _ = write!(text, ", {} of other keys", counted(*n_of_other_keys, "file"));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_folder_that_cannot_be_used_keeps_the_command_from_no_other() {
        let home = tempfile::tempdir().unwrap();
        let key = StoreKey::derive(b"key");
        let [missing, made] = ["a", "b"].map(|name| home.path().join(name));
        baton_store::keep_scopes(&made, &key, "endpoint", &[]).unwrap();
        let block = made.join("model").join(format!("{:032x}.kv", 0));
        fs::create_dir(block.parent().unwrap()).unwrap();
        fs::write(&block, "KV").unwrap();
        let stores = Stores { folders: BTreeSet::from([missing.clone(), made]), key, names: BTreeMap::new() };
        let clear = Some(CacheCommand::Clear { model: None, scope: None });
        let CommandFailure(why) =
            stores.work(&CacheArgs { command: clear, config: None, folder: None, json: true }).unwrap_err();
        assert!(why.contains(&*missing.to_string_lossy()) && why.contains("has no KV"), "{why}");
        assert!(!block.exists());
    }
}
