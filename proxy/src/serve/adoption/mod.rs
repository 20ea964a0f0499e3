//! Finds other servers (Ollama, LM Studio, llama-server, vLLM, mlx_lm.server, another Baton) and uses them as upstreams.
//!
//! Only this machine's loopback address, paired machines and machines that the operator names are asked, at the ports that such
//! servers have by default. Another Baton is used only for the models of its own engines, so that no request goes in a circle.

mod places;
mod probe;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use baton_link::transport::Transport;
use baton_upstream::{ModelAlias, UpstreamSettings};
use futures::StreamExt;
use futures::stream;
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

pub use self::places::ServerPlace;
use self::places::places;
use self::probe::Prober;
pub use self::probe::{FoundModel, ProbeOutcome, ServerFound, ServerProgram};
use super::failure::CommandFailure;
use super::request_service::RequestService;
use crate::config::{AdoptionConfig, UpstreamAlias, plain_upstream};
use crate::log_target::NOTICE;
use crate::targets::nodes::Node;

/// The pause between two rounds.
const INTERVAL: Duration = Duration::from_secs(15);

/// Rounds without an answer after which a server is no longer an upstream. Until then it is one that is silent.
const MAX_MISSED: u32 = 20;

/// Places that are asked at once.
const MAX_AT_ONCE: usize = 16;

/// The most servers that are adopted.
const MAX_ADOPTED: usize = 64;

/// The start waits at most this long for the first round.
const FIRST_ROUND: Duration = Duration::from_secs(5);

/// The search of a running endpoint.
pub(super) struct Adoption {
    service: Arc<RequestService>,
    transport: Transport,
    prober: Prober,
    /// Ports of this endpoint on loopback.
    own_ports: Vec<u16>,
    config: ArcSwap<AdoptionConfig>,
    has_changed: Notify,
}

/// How long one server may take to describe its models to a person who waits.
const DESCRIBE: Duration = Duration::from_secs(5);

/// A server that was found.
struct AdoptedServer {
    name: String,
    found: ServerFound,
    /// Rounds in a row in which it did not answer.
    n_missed: u32,
}

impl Adoption {
    /// Looks until the process ends, while the configuration wants it. The result is ready after the first round.
    pub(super) async fn start(
        service: Arc<RequestService>,
        config: AdoptionConfig,
        transport: Transport,
        own_ports: Vec<u16>,
    ) -> Result<Arc<Adoption>, CommandFailure> {
        let is_on = config.is_on();
        let adoption = Arc::new(Adoption {
            service,
            prober: Prober::new(&transport)?,
            transport,
            own_ports,
            config: ArcSwap::from_pointee(config),
            has_changed: Notify::new(),
        });
        let (looked, has_looked) = oneshot::channel();
        let looking = Arc::clone(&adoption);
        tokio::spawn(async move {
            let mut known = BTreeMap::new();
            looking.round(&mut known).await;
            // Nobody may wait for it.
            let _ = looked.send(());
            loop {
                let _ = timeout(INTERVAL, looking.has_changed.notified()).await;
                looking.round(&mut known).await;
            }
        });
        if is_on {
            // Servers that answer later are used later.
            let _ = timeout(FIRST_ROUND, has_looked).await;
        }
        Ok(adoption)
    }

    /// Follows a changed configuration.
    pub(super) fn reconfigure(&self, config: AdoptionConfig) {
        if **self.config.load() != config {
            self.config.store(Arc::new(config));
            self.has_changed.notify_one();
        }
    }

    async fn round(&self, known: &mut BTreeMap<String, AdoptedServer>) {
        let config = self.config.load_full();
        let configured = self.configured();
        let asked = self.places(&config);
        known.retain(|url, _| asked.iter().any(|place| place.url == *url));
        let asked: Vec<ServerPlace> = asked.into_iter().filter(|place| !is_configured(place, &configured)).collect();
        known.retain(|url, _| asked.iter().any(|place| place.url == *url));
        let answers = stream::iter(asked).map(|place| async move {
            let outcome = self.prober.ask(&place.url).await;
            (place, outcome)
        });
        // In their order: an alias means the server at the usual port, and not the one that answers first.
        let answers: Vec<_> = answers.buffered(MAX_AT_ONCE).collect().await;
        let mut taken: Vec<String> = configured.iter().map(|settings| settings.name.clone()).collect();
        taken.extend(known.values().map(|server| server.name.clone()));
        for (place, outcome) in answers {
            note(known, &mut taken, &place, outcome);
        }
        let hidden = given_names(&config, &configured);
        let serving = known.iter().filter(|(_, server)| server.serves_anything());
        let adopted: Vec<UpstreamSettings> =
            serving.map(|(url, server)| server.settings(url, &config, &hidden)).collect();
        self.use_as_upstreams(&adopted);
    }

    fn places(&self, config: &AdoptionConfig) -> Vec<ServerPlace> {
        let paired = if config.adopts { self.service.targets.pool.remote_nodes() } else { Vec::new() };
        let all = places(config, paired.iter().flat_map(|node| hosts_of(node)), &self.own_ports);
        all.into_iter().filter(|place| self.transport.check(&place.url).is_ok()).collect()
    }

    fn configured(&self) -> Vec<UpstreamSettings> {
        let pool = self.service.targets.upstreams.load();
        let all = pool.servers.iter().map(|server| server.client.settings());
        all.filter(|settings| !settings.is_adopted).cloned().collect()
    }

    /// Makes these the adopted upstreams, if others are.
    fn use_as_upstreams(&self, adopted: &[UpstreamSettings]) {
        let changed = self.service.targets.change_upstreams(|before| {
            let now = before.servers.iter().map(|server| server.client.settings());
            if now.filter(|settings| settings.is_adopted).eq(adopted) {
                return Ok(None);
            }
            before.with_adopted(adopted, &self.transport).map(Some)
        });
        if let Err(error) = changed {
            tracing::error!(error, "servers that were found cannot be used");
        }
    }
}

/// The machine of a node: of one that was found, where it has proven the cluster key. Anybody can announce other addresses.
fn hosts_of(node: &Node) -> Vec<String> {
    match &node.found {
        Some(found) => found.proven.addresses().iter().map(|address| address.ip().to_string()).collect(),
        None => node.url.iter().filter_map(|url| places::host_of(url)).collect(),
    }
}

/// Notes what one place has answered.
fn note(
    known: &mut BTreeMap<String, AdoptedServer>,
    taken: &mut Vec<String>,
    place: &ServerPlace,
    outcome: ProbeOutcome,
) {
    let ProbeOutcome::Server(found) = outcome else {
        let Some(server) = known.get_mut(&place.url) else { return };
        server.n_missed += 1;
        // Something else that answers there, such as this endpoint, is not the server.
        let is_other = !matches!(outcome, ProbeOutcome::Nobody | ProbeOutcome::Failing);
        if server.n_missed >= MAX_MISSED || is_other {
            tracing::info!(target: NOTICE, upstream = server.name, "a server that was found is gone");
            known.remove(&place.url);
        }
        return;
    };
    if let Some(server) = known.get_mut(&place.url)
        && server.found.program == found.program
    {
        (server.found, server.n_missed) = (found, 0);
        return;
    }
    known.remove(&place.url);
    if found.serves_anything() && known.len() < MAX_ADOPTED {
        let name = free_name(found.program, place, taken);
        let (program, n_models) = (found.program.as_str(), found.models.len());
        tracing::info!(target: NOTICE, upstream = name, url = place.url, program, n_models, "a server was found and is used");
        taken.push(name.clone());
        known.insert(place.url.clone(), AdoptedServer { name, found, n_missed: 0 });
    }
}

/// The program's name, with the machine's if it is another one; with the port if that name is taken.
fn free_name(program: ServerProgram, place: &ServerPlace, taken: &[String]) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let program = program.as_str();
    let short = match place.is_loopback {
        true => program.to_owned(),
        false => format!("{program}-{}", place.host.chars().take(40).map(plain).collect::<String>()),
    };
    let with_port = format!("{short}-{}", place.port);
    let numbered = (2..).map(|n| format!("{with_port}-{n}"));
    let mut names = [short, with_port.clone()].into_iter().chain(numbered);
    names.find(|name| !taken.contains(name)).unwrap_or_default()
}

/// Names that the configuration gives to models of certain upstreams. A server that was found gets no requests for them by listing
/// a model of that name.
fn given_names(config: &AdoptionConfig, configured: &[UpstreamSettings]) -> Vec<String> {
    let aliases = config.aliases.iter().map(|alias| &alias.name);
    let of_upstreams = configured.iter().flat_map(|settings| &settings.models).map(|model| &model.ours);
    let mut names: Vec<String> = aliases.chain(of_upstreams).cloned().collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn is_configured(place: &ServerPlace, configured: &[UpstreamSettings]) -> bool {
    configured.iter().any(|settings| places::is_same_server(&settings.url, &place.url))
}

impl ServerFound {
    /// Returns false for another Baton without models of its own. An upstream without names serves everything that it lists, and
    /// there these are models of its upstreams, perhaps this endpoint's.
    fn serves_anything(&self) -> bool {
        self.program != ServerProgram::Baton || !self.models.is_empty()
    }
}

impl AdoptedServer {
    fn serves_anything(&self) -> bool {
        self.found.serves_anything()
    }

    /// Its settings as an upstream. `hidden` are the names that it cannot take.
    fn settings(&self, url: &str, config: &AdoptionConfig, hidden: &[String]) -> UpstreamSettings {
        let own = |model: &FoundModel| ModelAlias { ours: model.name.clone(), theirs: model.name.clone() };
        let models = match self.found.program {
            // Its list has models of its own upstreams, too, which may be this endpoint's.
            ServerProgram::Baton => self.found.models.iter().map(own).collect(),
            _ => Vec::new(),
        };
        let aliases = UpstreamAlias::of_upstream(&config.aliases, &self.name);
        let plain = plain_upstream(self.name.clone(), self.found.program.kind(), url);
        UpstreamSettings { models, aliases, is_adopted: true, hidden: hidden.to_vec(), ..plain }
    }
}

/// The result of a look at one place.
pub struct ServerSeen {
    /// The place.
    pub place: ServerPlace,
    /// The result.
    pub outcome: ProbeOutcome,
}

/// Looks once at the known ports of this machine and of these others, and asks each server what its models can do. Places where
/// nobody answers are left out. Errors: a place may not be asked, as plain HTTP to another machine is not allowed.
pub async fn look_for_servers(hosts: Vec<String>, transport: &Transport) -> Result<Vec<ServerSeen>, CommandFailure> {
    let prober = Prober::new(transport)?;
    let config = AdoptionConfig { adopts: true, hosts, aliases: Vec::new() };
    let all = places(&config, std::iter::empty(), &[]);
    all.iter().try_for_each(|place| transport.check(&place.url))?;
    let prober = &prober;
    let answers = stream::iter(all).map(|place| async move {
        let mut outcome = prober.ask(&place.url).await;
        if let ProbeOutcome::Server(found) = &mut outcome {
            // What a slow server has not described by then stays without words.
            let _ = timeout(DESCRIBE, prober.describe(&place.url, found)).await;
        }
        ServerSeen { place, outcome }
    });
    let seen: Vec<ServerSeen> = answers.buffered(MAX_AT_ONCE).collect().await;
    Ok(seen.into_iter().filter(|seen| seen.outcome != ProbeOutcome::Nobody).collect())
}

#[cfg(test)]
mod tests;
