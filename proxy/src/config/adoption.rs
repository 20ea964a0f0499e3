//! `adopt`, `adopt_hosts` and `[aliases]`: other servers that are found, and common names for equal models.

use std::collections::BTreeMap;

use baton_link::transport::Transport;
use baton_upstream::ModelAlias;

use super::error::ConfigProblem;
use crate::model_name;

/// Machines that may be named.
const MAX_HOSTS: usize = 64;

/// Common names, and models that have one of them.
const MAX_ALIASES: usize = 256;

/// Machines to search for other servers, and common names of equal models.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdoptionConfig {
    /// Servers on this machine and on paired ones are used.
    pub adopts: bool,
    /// Machines that the operator names: `HOST` or `HOST:PORT`.
    pub hosts: Vec<String>,
    /// Names for models of upstreams, adopted ones or others.
    pub aliases: Vec<UpstreamAlias>,
}

impl AdoptionConfig {
    /// Returns true if servers are looked for.
    pub fn is_on(&self) -> bool {
        self.adopts || !self.hosts.is_empty()
    }
}

/// A name for a model of an upstream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamAlias {
    /// The name that clients use.
    pub name: String,
    /// The upstream's name.
    pub upstream: String,
    /// The upstream's own name for the model.
    pub model: String,
}

impl UpstreamAlias {
    /// The aliases of one upstream.
    pub fn of_upstream(aliases: &[UpstreamAlias], upstream: &str) -> Vec<ModelAlias> {
        let own = aliases.iter().filter(|alias| alias.upstream == upstream);
        own.map(|alias| ModelAlias { ours: alias.name.clone(), theirs: alias.model.clone() }).collect()
    }
}

/// A machine, and perhaps the one port that is asked there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdoptHost {
    /// A name or an address; of IPv6 without brackets.
    pub host: String,
    /// `None`: the known ports of all servers.
    pub port: Option<u16>,
}

impl AdoptHost {
    /// The URL of a port there, without a path.
    pub fn url(host: &str, port: u16) -> String {
        let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        format!("http://{bracketed}:{port}")
    }

    /// Reads `HOST`, `HOST:PORT`, `[ADDRESS]` or `[ADDRESS]:PORT`. `None`: it is none of them.
    pub fn parse(text: &str) -> Option<AdoptHost> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, after) = rest.split_once(']')?;
                host.parse::<std::net::Ipv6Addr>().ok()?;
                (host, if after.is_empty() { None } else { Some(after.strip_prefix(':')?) })
            }
            None => match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let port = match port {
            Some(port) => Some(port.parse::<u16>().ok().filter(|port| *port != 0)?),
            None => None,
        };
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_' | ':');
        let is_host = (1..=253).contains(&host.len()) && host.chars().all(is_name);
        is_host.then(|| AdoptHost { host: host.to_owned(), port })
    }
}

/// Everything that is wrong with these keys. `upstreams` are the names of the configured ones; found servers are reached over
/// `transport`.
pub(super) fn problems(
    hosts: &[String],
    aliases: &BTreeMap<String, Vec<String>>,
    upstreams: &[&str],
    transport: &Transport,
    is_on: bool,
) -> Vec<ConfigProblem> {
    let mut found = Vec::new();
    let mut problem = |key: &str, flag: &str, message: String| {
        found.push(ConfigProblem { key: key.to_owned(), flag: flag.to_owned(), message });
    };
    if hosts.len() > MAX_HOSTS {
        problem("adopt_hosts", "--adopt-host", format!("names more than {MAX_HOSTS} machines"));
    }
    for host in hosts {
        let Some(AdoptHost { host: name, port }) = AdoptHost::parse(host) else {
            problem("adopt_hosts", "--adopt-host", format!("must be HOST or HOST:PORT, not {host:?}"));
            continue;
        };
        // Servers that are looked for speak plain HTTP.
        if transport.check(&AdoptHost::url(&name, port.unwrap_or(80))).is_err() {
            let message = format!(
                "names {host:?}, another machine: prompts would go there unencrypted. Allow that with allow_plain_http = true \
                 (--allow-plain-http), or name a server with an https:// address in [[upstream]]"
            );
            problem("adopt_hosts", "--adopt-host", message);
        }
    }
    if aliases.len() > MAX_ALIASES || aliases.values().any(|models| models.len() > MAX_ALIASES) {
        problem("aliases", "aliases", format!("has more than {MAX_ALIASES} names, or models of one name"));
    }
    for (name, models) in aliases {
        if name.trim().is_empty() {
            problem("aliases", "aliases", "must not have an empty name".to_owned());
        }
        if models.is_empty() {
            problem("aliases", "aliases", format!("must name at least one model for {name:?}"));
        }
        let is_same = |other: &&String| *other < name && model_name::are_same(other, name);
        if let Some(other) = aliases.keys().find(is_same) {
            problem("aliases", "aliases", format!("has {other:?} and {name:?}, which mean the same to clients"));
        }
        for model in models {
            match parts(model) {
                None => problem("aliases", "aliases", format!("must name models as UPSTREAM/MODEL, not {model:?}")),
                // The names of adopted servers are known once they are found.
                Some((upstream, _)) if !is_on && !upstreams.contains(&upstream) => {
                    let message = format!("names {model:?}, and there is no upstream {upstream:?}");
                    problem("aliases", "aliases", message);
                }
                Some(_) => {}
            }
        }
    }
    found
}

/// The names of an upstream and of its model.
fn parts(model: &str) -> Option<(&str, &str)> {
    model.split_once('/').filter(|(upstream, model)| !upstream.is_empty() && !model.trim().is_empty())
}

/// The aliases, checked.
pub(super) fn aliases(written: &BTreeMap<String, Vec<String>>) -> Vec<UpstreamAlias> {
    let of_name = |(name, models): (&String, &Vec<String>)| {
        let alias = |(upstream, model): (&str, &str)| UpstreamAlias {
            name: name.clone(),
            upstream: upstream.to_owned(),
            model: model.to_owned(),
        };
        models.iter().filter_map(|model| parts(model)).map(alias).collect::<Vec<_>>()
    };
    written.iter().flat_map(of_name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_a_port_or_none() {
        let check = |text: &str, expected: Option<(&str, Option<u16>)>| {
            let expected = expected.map(|(host, port)| AdoptHost { host: host.to_owned(), port });
            assert_eq!(AdoptHost::parse(text), expected, "{text}");
        };
        check("spark", Some(("spark", None)));
        check("spark.local:1234", Some(("spark.local", Some(1234))));
        check("10.0.0.5:11434", Some(("10.0.0.5", Some(11434))));
        check("[fd00::5]", Some(("fd00::5", None)));
        check("[fd00::5]:8080", Some(("fd00::5", Some(8080))));
        for wrong in [
            "",
            "a b",
            "http://spark",
            "spark:0",
            "spark:70000",
            "spark:",
            "[spark]",
            "[fd00::5]8080",
            "fd00::5",
            "a/b",
        ] {
            check(wrong, None);
        }
    }

    #[test]
    fn another_machine_is_looked_at_only_where_plain_http_is_allowed() {
        let n_wrong = |host: &str, allows: bool| {
            let transport = Transport::new(None, allows).unwrap();
            problems(&[host.to_owned()], &BTreeMap::new(), &[], &transport, true).len()
        };
        for (host, expected) in
            [("127.0.0.1", 0), ("localhost:1234", 0), ("[::1]", 0), ("spark", 1), ("[fd00::5]:1", 1)]
        {
            assert_eq!((n_wrong(host, false), n_wrong(host, true)), (expected, 0), "{host}");
        }
        assert_eq!(n_wrong("a b", true), 1);
    }

    #[test]
    fn an_alias_names_models_of_upstreams() {
        let written = |models: &[&str]| {
            BTreeMap::from([("coder".to_owned(), models.iter().map(|&model| model.to_owned()).collect::<Vec<_>>())])
        };
        let n_wrong =
            |models: &[&str], is_on| problems(&[], &written(models), &["ollama"], &Transport::default(), is_on).len();
        assert_eq!(n_wrong(&["ollama/qwen3-coder:30b", "ollama/a/b"], false), 0);
        assert_eq!((n_wrong(&["spark/m"], false), n_wrong(&["spark/m"], true)), (1, 0));
        assert_eq!(n_wrong(&["m", "/m", "ollama/", "ollama/ "], true), 4);
        assert_eq!(n_wrong(&[], true), 1, "a name for nothing");
        let models = || vec!["ollama/m".to_owned()];
        let twice = BTreeMap::from([("coder".to_owned(), models()), ("Coder:latest".to_owned(), models())]);
        assert_eq!(problems(&[], &twice, &["ollama"], &Transport::default(), false).len(), 1);
        let alias = &aliases(&written(&["ollama/qwen/qwen3:30b"]))[0];
        assert_eq!((&*alias.name, &*alias.upstream, &*alias.model), ("coder", "ollama", "qwen/qwen3:30b"));
    }
}
