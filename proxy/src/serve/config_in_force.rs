//! The configuration in force, and what a reload of the file would change: a dry run for operators, which changes nothing.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::time::Instant;

use super::config_source::ConfigSource;
use super::failure::CommandFailure;
use super::on_demand_models;
use super::primary_model::PrimaryNames;
use crate::config::{ConfigError, ServeConfig, SettingsInForce};
use crate::observe::{PreviewBusy, ReloadPreview, SettingChange};

/// A preview is given again for so long: it opens models' files, and every open page asks each few seconds.
const FRESH: Duration = Duration::from_secs(1);

/// How long a question waits for those before it.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Mistakes of a preview, and characters of each.
const MAX_MISTAKES: usize = 100;
const MAX_MISTAKE_CHARS: usize = 500;

/// The ending of a file's name that is only looked at.
const CANDIDATE_SUFFIX: &str = ".new";

/// The configuration in force.
pub(super) struct ConfigInForce {
    source: ConfigSource,
    now: ArcSwap<InForce>,
    /// One preview is made at a time.
    turn: tokio::sync::Mutex<()>,
    latest: Mutex<Option<(Instant, ReloadPreview)>>,
}

struct InForce {
    /// With the old values of what waits for a restart.
    config: ServeConfig,
    settings: SettingsInForce,
}

impl ConfigInForce {
    /// That of the start.
    pub(super) fn of_start(source: ConfigSource, config: ServeConfig) -> ConfigInForce {
        let settings = SettingsInForce::of(&config);
        let now = ArcSwap::from_pointee(InForce { config, settings });
        ConfigInForce { source, now, turn: tokio::sync::Mutex::default(), latest: Mutex::default() }
    }

    /// A reload has applied a configuration, whose values of these keys wait for a restart.
    pub(super) fn reloaded(&self, config: &ServeConfig, waiting: &[&str]) {
        let settings = self.now.load().settings.after(config, waiting);
        self.now.store(Arc::new(InForce { config: config.clone(), settings }));
        self.forget_latest();
    }

    /// What a reload would change now. Errors: not in time.
    pub(super) async fn preview(&self) -> Result<ReloadPreview, PreviewBusy> {
        let _turn = tokio::time::timeout(MAX_WAIT, self.turn.lock()).await.map_err(|_| PreviewBusy)?;
        if let Some((made, latest)) = &*self.latest.lock().unwrap_or_else(PoisonError::into_inner)
            && made.elapsed() < FRESH
        {
            return Ok(latest.clone());
        }
        let preview = tokio::time::timeout(MAX_WAIT, self.read()).await.map_err(|_| PreviewBusy)?;
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), preview.clone()));
        Ok(preview)
    }

    fn forget_latest(&self) {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    async fn read(&self) -> ReloadPreview {
        let Some(in_use) = &self.source.path else { return ReloadPreview::default() };
        let candidate = candidate_of(in_use);
        let candidate = tokio::fs::try_exists(&candidate).await.unwrap_or(false).then_some(candidate);
        let path = Some(candidate.as_ref().unwrap_or(in_use).display().to_string());
        let now = self.now.load_full();
        let read = self.source.read_again(candidate, now.config.access.needs_key()).await;
        let new = match read {
            Ok(new) => new,
            Err(error) => return ReloadPreview { path, mistakes: mistakes(&error), ..ReloadPreview::default() },
        };
        match downloads(&new) {
            Ok(downloads) => {
                let changes = now.settings.changes(&new, &needs_restart(&now.config, &new));
                ReloadPreview {
                    path,
                    mistakes: Vec::new(),
                    changes,
                    is_truncated: now.settings.is_truncated(&new),
                    downloads,
                }
            }
            Err(CommandFailure(problem)) => {
                ReloadPreview { path, mistakes: vec![within_limit(&problem)], ..ReloadPreview::default() }
            }
        }
    }
}

/// The file that is compared with the one in use, beside it.
fn candidate_of(in_use: &Path) -> PathBuf {
    let mut name = in_use.as_os_str().to_owned();
    name.push(CANDIDATE_SUFFIX);
    name.into()
}

/// The other checks of a reload before it changes anything, and the models that it would download.
fn downloads(new: &ServeConfig) -> Result<Vec<String>, CommandFailure> {
    new.startup.transport.transport()?;
    PrimaryNames::of(new)?;
    Ok(on_demand_models::missing(new)?.into_iter().map(|model| model.source).collect())
}

fn mistakes(error: &ConfigError) -> Vec<String> {
    let lines = match error {
        ConfigError::Mistakes(mistakes) => mistakes.lines(),
        ConfigError::Unreadable { .. } | ConfigError::Later(_) => vec![error.to_string()],
    };
    lines.iter().take(MAX_MISTAKES).map(|line| within_limit(line)).collect()
}

fn within_limit(line: &str) -> String {
    line.chars().take(MAX_MISTAKE_CHARS).collect()
}

/// The changes that an endpoint with one configuration would make if it read another one. No flags are known.
pub fn changes_between(old: &ServeConfig, new: &ServeConfig) -> Vec<SettingChange> {
    SettingsInForce::of(old).changes(new, &needs_restart(old, new))
}

/// Returns true if another name can be applied. A name that a node has reported cannot be taken back.
pub(super) fn takes_name(old: &ServeConfig, new: &ServeConfig) -> bool {
    old.routing.has_own_engine || new.name.is_some() || old.name.is_none()
}

/// Returns true if other nodes can be applied. An own engine that was started without prefill nodes and discovery cannot take KV, and an
/// own engine is neither added nor removed.
pub(super) fn takes_routing(old: &ServeConfig, new: &ServeConfig) -> bool {
    let discovers = old.startup.discover;
    let (old, new) = (&old.routing, &new.routing);
    let can_pull = discovers || !old.prefill.is_empty() || new.prefill.is_empty() || !old.has_own_engine;
    old.has_own_engine == new.has_own_engine && can_pull
}

/// The keys whose new value waits for a restart.
pub(super) fn needs_restart(old: &ServeConfig, new: &ServeConfig) -> Vec<&'static str> {
    let mut keys = old.startup.changed_keys(&new.startup);
    if old.name != new.name && !takes_name(old, new) {
        keys.push("model.name");
    }
    if !takes_routing(old, new) {
        let of_routing = old.routing.changed_keys(&new.routing);
        keys.extend(of_routing.into_iter().filter(|key| !keys.contains(key)).collect::<Vec<_>>());
    }
    keys
}
