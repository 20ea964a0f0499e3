//! `baton pair`, and `--pair` of other commands: puts machines into one cluster, with a short code. Parses and prints;
//! [`baton_pairing`] does it.

mod find;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use baton_link::mdns::Announced;
use baton_link::wake_on_lan::own_card;
use baton_pairing::{
    About, CODE_LIFETIME, ClusterFolder, DEFAULT_PORT, EndReason, JoinedMachine, Joiner, MAX_FAILED_ATTEMPTS,
    MachineName, PairingCode, PairingError, PairingEvent, PairingSession, join,
};
use baton_proxy::serve::signals::OnHangup;
use baton_proxy::serve::{CommandFailure, signals};
use baton_schemas::counted::counted;
use baton_schemas::node::KEY_VARIABLE;
use clap::Args;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::lan_address::lan_address;
use super::terminal;

/// Options of `baton pair`.
#[derive(Args)]
pub(super) struct PairArgs {
    /// The code that the first machine shows. Without one, this machine shows a code
    #[arg(conflicts_with_all = ["listen", "expect"])]
    code: Option<PairingCode>,
    /// The first machine's address, instead of searching the local network for it
    #[arg(long, value_name = "HOST[:PORT]", requires = "code", value_parser = first_machine)]
    at: Option<String>,
    /// Where to show a code
    #[arg(long, value_name = "HOST:PORT", default_value_t = default_listen())]
    listen: String,
    /// End after this many machines have joined [default: when the code expires]
    #[arg(long, value_name = "MACHINES", value_parser = clap::value_parser!(u32).range(1..=64))]
    expect: Option<u32>,
    /// This machine's name in the cluster [default: its host name]
    #[arg(long, value_parser = machine_name)]
    name: Option<MachineName>,
    /// Leave the cluster that this machine is in for the new one
    #[arg(long)]
    replace: bool,
    /// Show what this machine has, without secrets
    #[arg(long, conflicts_with_all = ["code", "replace", "expect", "forget"])]
    status: bool,
    /// Remove this machine's key and certificates
    #[arg(long, conflicts_with_all = ["code", "replace", "expect"])]
    forget: bool,
}

fn machine_name(text: &str) -> Result<MachineName, String> {
    MachineName::parse(text).ok_or_else(|| "must be 1 to 63 letters, digits and . _ -".to_owned())
}

/// An address with the port that codes are shown at, unless it names another.
pub(super) fn first_machine(text: &str) -> Result<String, String> {
    let has_port = text.rsplit_once(':').is_some_and(|(host, port)| {
        let is_whole = !host.is_empty() && (!host.contains(':') || host.ends_with(']'));
        is_whole && port.parse::<u16>().is_ok_and(|port| port != 0)
    });
    let is_ipv6 = text.parse::<std::net::Ipv6Addr>().is_ok();
    let is_host = !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c == '/');
    match (has_port, is_ipv6) {
        (true, _) if is_host => Ok(text.to_owned()),
        (_, true) => Ok(format!("[{text}]:{DEFAULT_PORT}")),
        _ if is_host && (!text.contains(':') || text.ends_with(']')) => Ok(format!("{text}:{DEFAULT_PORT}")),
        _ => Err("must be HOST or HOST:PORT, like spark.local".to_owned()),
    }
}

/// Shows a code, joins, or tells or removes what this machine has.
pub(super) async fn run(args: PairArgs) -> Result<(), CommandFailure> {
    let folder = ClusterFolder::of_user()?;
    if args.status {
        return print_status(&folder);
    }
    if args.forget {
        return forget(&folder);
    }
    // Ctrl-C drops the future: runs end, and nothing half-written is left.
    let stop = CancellationToken::new();
    signals::stop_on_signal(stop.clone(), OnHangup::Stops);
    let name = args.name.clone().unwrap_or_else(MachineName::of_this_machine);
    match args.code {
        Some(code) => {
            let joiner = Joiner { code, name, folder, replaces: args.replace, mac_of: |ip| own_card(ip)?.parse().ok() };
            let about = tokio::select! {
                joined = join_cluster(&joiner, args.at.as_deref()) => joined?,
                () = stop.cancelled() => return Err(CommandFailure("stopped; this machine was not paired".into())),
            };
            print_joined(&about)
        }
        None => {
            let session = PairingSession::new(folder, name, args.replace)?;
            let shown = ShownCode::open(session, &args.listen, JoinWith::Pair).await?;
            shown.until_its_end(args.expect, stop.cancelled()).await.result()
        }
    }
}

/// The part of a pairing that `--pair` does before a command begins.
#[derive(Debug, Clone)]
pub(super) enum PairFirst {
    /// Shows a code, until a machine has joined.
    Admit,
    /// Joins the cluster of the machine that shows this code, which is searched for unless its address is given.
    Join { code: PairingCode, at: Option<String> },
}

/// Puts this machine into a cluster, unless it is in one: so the same command starts it again. Errors: it was not paired, or a
/// cluster key in the environment would win over the pairing.
pub(super) async fn pair_first(first: PairFirst) -> Result<(), CommandFailure> {
    if is_key_in_environment() {
        return Err(CommandFailure(format!(
            "{KEY_VARIABLE} is set here and would win over the pairing: unset it, or leave out --pair"
        )));
    }
    let folder = ClusterFolder::of_user()?;
    // SIGHUP is for the command that follows.
    let stopped = || CommandFailure("stopped; this machine was not paired".into());
    let about = folder.about()?;
    let of = |about: &About| about.admitted_by.as_ref().map_or(String::new(), |first| format!(" of {first}"));
    let name = MachineName::of_this_machine();
    match (first, about) {
        (PairFirst::Join { code, .. }, Some(about)) => {
            terminal::note(format_args!(
                "This machine is in cluster {}{} already, so the code was not used. To join the machine that shows it: baton \
                 pair {code} --replace",
                about.cluster,
                of(&about)
            ));
            Ok(())
        }
        (PairFirst::Join { code, at }, None) => {
            let joiner = Joiner { code, name, folder, replaces: false, mac_of: |ip| own_card(ip)?.parse().ok() };
            tokio::select! {
                joined = join_cluster(&joiner, at.as_deref()) => print_joined(&joined?),
                () = signals::first(OnHangup::Rereads) => Err(stopped()),
            }
        }
        (PairFirst::Admit, Some(about)) if about.admitted_by.is_some() => {
            let cluster = &about.cluster;
            terminal::note(format_args!(
                "This machine is in cluster {cluster}{} already; that one admits more",
                of(&about)
            ));
            Ok(())
        }
        (PairFirst::Admit, about) => {
            let session = PairingSession::new(folder, name, false)?;
            let is_paired = about.is_some();
            let shown = match ShownCode::open(session, &default_listen(), JoinWith::Node { is_paired }).await {
                Ok(shown) => shown,
                Err(CommandFailure(reason)) if is_paired => {
                    terminal::note(format_args!("baton: no code is shown for further machines: {reason}"));
                    return Ok(());
                }
                Err(failure) => return Err(failure),
            };
            let joined = Arc::clone(&shown.joined);
            // Machines join until the code ends, also while the endpoint serves.
            let mut showing = Box::pin(shown.until_its_end(None, signals::first(OnHangup::Rereads)));
            if !is_paired {
                tokio::select! {
                    () = joined.notified() => {}
                    end = &mut showing => return end.result(),
                }
            }
            tokio::spawn(async move { showing.await.note() });
            Ok(())
        }
    }
}

fn default_listen() -> String {
    format!("0.0.0.0:{DEFAULT_PORT}")
}

async fn join_cluster(joiner: &Joiner, at: Option<&str>) -> Result<About, CommandFailure> {
    match at {
        Some(address) => Ok(join(joiner, address).await?),
        None => find::join_found(joiner).await,
    }
}

/// The command that is shown for the other machines.
#[derive(Debug, Clone, Copy)]
enum JoinWith {
    Pair,
    /// The endpoint starts with the first machine, or now if this one is paired.
    Node {
        is_paired: bool,
    },
}

/// A code that others may use.
struct ShownCode {
    session: PairingSession,
    listener: TcpListener,
    announced: Option<Announced>,
    /// Notified when a machine joins.
    joined: Arc<Notify>,
}

impl ShownCode {
    /// Listens, announces this machine and prints the code.
    async fn open(session: PairingSession, listen: &str, with: JoinWith) -> Result<ShownCode, CommandFailure> {
        let listener = TcpListener::bind(listen).await.map_err(|error| match error.kind() {
            ErrorKind::AddrInUse => CommandFailure(format!(
                "{listen} is in use: is a code shown on this machine already? See `baton pair --listen`"
            )),
            _ => CommandFailure(format!("cannot listen on {listen}: {error}. See `baton pair --listen`")),
        })?;
        let listening = listener.local_addr()?;
        let announced = find::announce(&session, listening);
        print_code(&session, listening, with)?;
        Ok(ShownCode { session, listener, announced, joined: Arc::default() })
    }

    /// Admits machines until the code ends, until `expect` have joined, or until `stop` is done.
    async fn until_its_end(self, expect: Option<u32>, stop: impl Future<Output = ()>) -> EndedCode {
        let ShownCode { session, listener, announced, joined } = self;
        let reason = tokio::select! {
            end = session.admit(listener, expect.map(|n| n as usize), event_printer(joined)) => Some(end.reason),
            () = stop => None,
        };
        if let Some(announced) = announced {
            announced.withdraw().await;
        }
        EndedCode { session, reason }
    }
}

/// A code that is no longer shown.
struct EndedCode {
    session: PairingSession,
    /// `None`: the command was stopped.
    reason: Option<EndReason>,
}

impl EndedCode {
    /// Prints who joined. Errors: nobody did, or the code became void.
    fn result(self) -> Result<(), CommandFailure> {
        let n_joined = self.session.n_joined();
        let machines = counted(n_joined, "machine");
        match self.reason {
            Some(EndReason::Void) => Err(CommandFailure(format!(
                "{MAX_FAILED_ATTEMPTS} attempts failed, so the code is void: somebody mistyped it, or guesses. {machines} \
                 joined. The same command shows a new code"
            ))),
            _ if n_joined == 0 => {
                let why = if self.reason.is_some() {
                    "the code has expired; the same command shows a new one"
                } else {
                    "stopped"
                };
                Err(CommandFailure(format!("no machine has said that it joined: {why}")))
            }
            _ => {
                let cluster = &self.session.about().cluster;
                terminal::print_line(format_args!("{machines} joined cluster {cluster}. {USED}"))?;
                warn_of_the_variable();
                Ok(())
            }
        }
    }

    /// Tells the owner, while the endpoint serves, that the code is of no use any more.
    fn note(self) {
        let why = match self.reason {
            None => return,
            Some(EndReason::Void) => format!("became void after {MAX_FAILED_ATTEMPTS} wrong attempts"),
            Some(EndReason::Expired | EndReason::Complete) => "has expired".to_owned(),
        };
        terminal::note(format_args!("baton: the pairing code {why}; `baton pair` shows a new one"));
    }
}

/// What the pairing does from now on.
const USED: &str = "`baton node` and `baton serve` use its key and certificates from now on.";

fn print_code(session: &PairingSession, listening: SocketAddr, with: JoinWith) -> Result<(), CommandFailure> {
    let code = session.code();
    let ip = if listening.ip().is_unspecified() { lan_address(listening) } else { Some(listening.ip()) };
    let at = ip.map(|ip| match listening.port() {
        DEFAULT_PORT => ip.to_string(),
        port => SocketAddr::new(ip, port).to_string(),
    });
    let at = at.unwrap_or_else(|| "HOST".to_owned());
    let minutes = CODE_LIFETIME.as_secs() / 60;
    let good_for = format!("The code is good for {minutes} minutes and {MAX_FAILED_ATTEMPTS} wrong attempts.");
    let text = match with {
        JoinWith::Pair => format!(
            "On each other machine:\n\n  baton pair {code}\n\nIf it does not find this machine: baton pair {code} --at {at}\n{good_for} This waits for them; Ctrl-C ends it.\n"
        ),
        JoinWith::Node { is_paired } => {
            let starts =
                if is_paired { "" } else { "This waits: the endpoint starts when the first machine has joined.\n" };
            format!(
                "On each other machine:\n\n  baton node --pair {code} --role prefill --model MODEL --listen 0.0.0.0:9000\n\n\
                 If it does not find this machine, add: --at {at}\n{good_for}\n{starts}"
            )
        }
    };
    Ok(terminal::print_line(text)?)
}

/// Prints who joined, and failures that cost an attempt. Others can be caused without end by anyone who reaches the port, and must
/// not move the code off the screen.
fn event_printer(joined: Arc<Notify>) -> impl Fn(PairingEvent) + Send + Sync + 'static {
    let printed_left = AtomicU32::new(MAX_FAILED_ATTEMPTS);
    move |event| match event {
        PairingEvent::Joined { machine, address } => {
            joined.notify_one();
            let JoinedMachine { name, mac } = machine;
            let card = mac.map(|mac| format!(" (network card {mac})")).unwrap_or_default();
            terminal::announce(format!("{name} joined, from {}{card}", address.ip()));
        }
        PairingEvent::Failed { address, error, n_left } => {
            if n_left >= printed_left.fetch_min(n_left, Ordering::Relaxed) {
                return tracing::debug!(%address, %error, "a connection did not pair, and spent no attempt");
            }
            let error = match error {
                // As the joiner reads it, it speaks of "there".
                PairingError::Refused(refusal) => format!("refused: {refusal}"),
                error => error.to_string(),
            };
            let attempts = counted(n_left as usize, "attempt");
            terminal::note(format_args!("baton pair: {}: {error} ({attempts} left)", address.ip()));
        }
    }
}

fn print_joined(about: &About) -> Result<(), CommandFailure> {
    let first = about.admitted_by.as_ref().map_or(String::new(), |first| format!(" of {first}"));
    terminal::print_line(format_args!("This machine is in cluster {}{first}. {USED}", about.cluster))?;
    warn_of_the_variable();
    Ok(())
}

fn is_key_in_environment() -> bool {
    std::env::var_os(KEY_VARIABLE).is_some_and(|key| !key.is_empty())
}

/// Says that a key in the environment wins.
fn warn_of_the_variable() {
    if is_key_in_environment() {
        terminal::note(format_args!("baton pair: {KEY_VARIABLE} is set here and wins over the pairing: unset it"));
    }
}

fn print_status(folder: &ClusterFolder) -> Result<(), CommandFailure> {
    let Some(member) = folder.read()? else {
        let path = folder.path().display();
        return Ok(terminal::print_line(format_args!(
            "This machine is in no cluster: there is no {path}. `baton pair` here shows a code, `baton pair CODE` joins"
        ))?);
    };
    let About { cluster, machine, admitted_by, since } = &member.about;
    let role = match admitted_by {
        Some(first) => format!("joined {first}, which admits machines"),
        None => "the first: `baton pair` here admits more".to_owned(),
    };
    terminal::print_line(format_args!(
        "cluster   {cluster}\nmachine   {machine}\nrole      {role}\nsince     {since}\nfolder    {}",
        folder.path().display()
    ))?;
    for (name, mac) in folder.machines()? {
        terminal::print_line(format_args!("joined    {name}, network card {mac}"))?;
    }
    warn_of_the_variable();
    Ok(())
}

fn forget(folder: &ClusterFolder) -> Result<(), CommandFailure> {
    let line = match folder.forget()? {
        Some(about) if about.admitted_by.is_none() => format!(
            "This machine has left cluster {}. It was its first machine, so nobody can join that cluster any more.",
            about.cluster
        ),
        Some(about) => format!("This machine has left cluster {}. The others still have the same key.", about.cluster),
        None => "This machine is in no cluster.".to_owned(),
    };
    Ok(terminal::print_line(line)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_port_gets_the_usual_one() {
        for (text, expected) in [
            ("spark.local", "spark.local:9010"),
            ("spark.local:1234", "spark.local:1234"),
            ("192.168.0.7", "192.168.0.7:9010"),
            ("fd00::7", "[fd00::7]:9010"),
            ("[fd00::7]", "[fd00::7]:9010"),
            ("[fd00::7]:1234", "[fd00::7]:1234"),
        ] {
            assert_eq!(first_machine(text).as_deref(), Ok(expected));
        }
        for text in ["", "spark.local:", "spark.local:99999", "spark.local:0", "http://spark.local", "a b", ":9010"] {
            assert!(first_machine(text).is_err(), "{text}");
        }
    }
}
