//! What macOS allows: the local network, memory for the GPU, sleep. Reads the output of the system's own commands; the
//! readings are pure, so that they are tested everywhere. Never run on a Mac by the authors.

#[cfg(target_os = "macos")]
use std::net::{SocketAddr, TcpStream};
#[cfg(target_os = "macos")]
use std::process::Command;
#[cfg(target_os = "macos")]
use std::time::Duration;

use super::system::{SystemFinding, Topic};

const GIB: u64 = 1 << 30;

/// "No route to host" on macOS: what a program gets in the local network that may not use it, and what a machine that is
/// off gives, too.
const EHOSTUNREACH: i32 = 65;

/// "Connection refused" on macOS: somebody is there.
const ECONNREFUSED: i32 = 61;

/// What connecting to a machine in the local network gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Connecting {
    /// It answered, be it by a refusal: packets go there and back.
    Answered,
    /// The system knows no way, or allows none.
    NoRoute,
    /// Nothing came back in time, or this machine has no network: it tells nothing.
    Silence,
}

impl Connecting {
    /// The meaning of a failed connect.
    fn failed(os_error: Option<i32>) -> Connecting {
        match os_error {
            Some(EHOSTUNREACH) => Connecting::NoRoute,
            Some(ECONNREFUSED) => Connecting::Answered,
            _ => Connecting::Silence,
        }
    }
}

/// Whether programs that are started as this one was may use the local network.
fn local_network(gateway: Option<Connecting>) -> SystemFinding {
    let allow = "System Settings › Privacy & Security › Local Network: switch baton on, or the terminal that starts it, then \
                 start it again";
    // macOS exempts what is started from Terminal or by ssh.
    let service =
        "A launchd agent is asked for separately, on its first use: look there if other machines are not found";
    match gateway {
        Some(Connecting::Answered) => SystemFinding::fine(Topic::LocalNetwork, format!("allowed from here. {service}")),
        Some(Connecting::NoRoute) => SystemFinding::advice(
            Topic::LocalNetwork,
            format!("the router cannot be reached (\"No route to host\"). If other programs reach it: {allow}"),
        ),
        Some(Connecting::Silence) => {
            SystemFinding::unknown(Topic::LocalNetwork, format!("the router did not answer. {service}"))
        }
        None => SystemFinding::unknown(Topic::LocalNetwork, "there is no router to try it with".to_owned()),
    }
}

/// The router in the output of `route -n get default`.
fn gateway(route: &str) -> Option<std::net::IpAddr> {
    let line = route.lines().find_map(|line| line.trim().strip_prefix("gateway:"))?;
    // A scope, as in fe80::1%en0, is no part of an address here.
    line.trim().split('%').next()?.parse().ok()
}

/// The memory that the GPU may wire: all of it must hold the model, its KV cache and compute buffers.
fn wired_limit(memory_bytes: Option<u64>, limit_mb: Option<u64>, model_bytes: u64) -> SystemFinding {
    let (Some(memory_bytes), Some(limit_mb)) = (memory_bytes, limit_mb) else {
        return SystemFinding::unknown(Topic::WiredMemory, "sysctl does not tell iogpu.wired_limit_mb".to_owned());
    };
    let is_default = limit_mb == 0;
    let limit = if is_default { default_limit(memory_bytes) } else { limit_mb.saturating_mul(1 << 20) };
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / GIB as f64);
    let source = if is_default { "the default of about" } else { "set to" };
    let state = format!("the GPU may wire {} of {} ({source} {})", gib(limit), gib(memory_bytes), gib(limit));
    // The rest is for KV caches and compute buffers, which depend on the context.
    let needed = model_bytes.saturating_add(model_bytes / 10).saturating_add(GIB);
    if needed <= limit {
        return SystemFinding::fine(Topic::WiredMemory, format!("{state}; this model needs about {}", gib(needed)));
    }
    // What the system needs for itself.
    let most = memory_bytes.saturating_sub(8 * GIB).max(memory_bytes / 2);
    if needed > most {
        let text = format!("{state}, and this model needs about {}: choose a smaller one", gib(needed));
        return SystemFinding::advice(Topic::WiredMemory, text);
    }
    let mb = needed.div_ceil(1 << 20);
    SystemFinding::advice(
        Topic::WiredMemory,
        format!(
            "{state}, and this model needs about {}: sudo sysctl iogpu.wired_limit_mb={mb} raises it until the next \
             restart",
            gib(needed)
        ),
    )
}

/// The system's own limit: two thirds of the memory of small machines, three quarters of large ones. Apple documents
/// neither; these are what Metal reports as recommended.
fn default_limit(memory_bytes: u64) -> u64 {
    match memory_bytes <= 36 * GIB {
        true => memory_bytes / 3 * 2,
        false => memory_bytes / 4 * 3,
    }
}

/// Whether the machine sleeps while nobody uses it, by `pmset -g`: minutes, 0 for never.
fn sleep(settings: &str) -> SystemFinding {
    let line = settings.lines().map(str::trim).find(|line| line.split_whitespace().next() == Some("sleep"));
    let mut words = line.into_iter().flat_map(|line| line.split_whitespace()).skip(1);
    match words.next().and_then(|minutes| minutes.parse::<u32>().ok()) {
        None => SystemFinding::unknown(Topic::Sleep, "pmset does not tell when this Mac sleeps".to_owned()),
        Some(0) => SystemFinding::fine(Topic::Sleep, "this Mac does not sleep by itself".to_owned()),
        Some(minutes) => SystemFinding::advice(
            Topic::Sleep,
            format!(
                "Baton keeps this Mac awake while requests run. It sleeps after {minutes} idle minutes, and cannot be reached \
                 then: sudo pmset -c sleep 0 keeps it awake on mains"
            ),
        ),
    }
}

/// The number that `sysctl -n NAME` prints.
fn number(output: &str) -> Option<u64> {
    output.trim().parse().ok()
}

/// What this Mac allows, for a model of this size.
#[cfg(target_os = "macos")]
pub(super) fn findings(model_bytes: u64) -> Vec<SystemFinding> {
    let router = output("/sbin/route", &["-n", "get", "default"]).and_then(|route| gateway(&route));
    let memory = output("/usr/sbin/sysctl", &["-n", "hw.memsize"]).and_then(|text| number(&text));
    let limit = output("/usr/sbin/sysctl", &["-n", "iogpu.wired_limit_mb"]).and_then(|text| number(&text));
    let settings = output("/usr/bin/pmset", &["-g"]).unwrap_or_default();
    vec![local_network(router.map(connect)), wired_limit(memory, limit, model_bytes), sleep(&settings)]
}

/// Connects to a port of the router that is often open. A refusal is an answer, too.
#[cfg(target_os = "macos")]
fn connect(router: std::net::IpAddr) -> Connecting {
    const DEADLINE: Duration = Duration::from_secs(2);
    match TcpStream::connect_timeout(&SocketAddr::new(router, 53), DEADLINE) {
        Ok(_) => Connecting::Answered,
        Err(error) => Connecting::failed(error.raw_os_error()),
    }
}

/// What a command of the system prints. `None` if it fails.
#[cfg(target_os = "macos")]
fn output(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok()
}

#[cfg(test)]
mod tests {
    use super::super::system::SystemState;
    use super::*;

    #[test]
    fn no_route_to_the_router_means_that_the_network_may_be_forbidden() {
        for (os_error, state) in [
            (Some(EHOSTUNREACH), SystemState::Advice),
            (Some(ECONNREFUSED), SystemState::Fine),
            // Timed out; no network; no number.
            (Some(60), SystemState::Unknown),
            (Some(51), SystemState::Unknown),
            (None, SystemState::Unknown),
        ] {
            let finding = local_network(Some(Connecting::failed(os_error)));
            assert_eq!(finding.state, state, "{finding:?}");
        }
        assert!(local_network(Some(Connecting::NoRoute)).text.contains("Local Network"));
        assert_eq!(local_network(None).state, SystemState::Unknown);
    }

    #[test]
    fn the_router_is_read_from_the_default_route() {
        let route = "   route to: default\ndestination: default\n       mask: default\n    gateway: 192.168.1.1\n  \
                     interface: en0\n";
        assert_eq!(gateway(route), Some("192.168.1.1".parse().unwrap()));
        assert_eq!(gateway("gateway: fe80::1%en0"), Some("fe80::1".parse().unwrap()));
        assert_eq!(gateway("route: writing to routing socket: not in table"), None);
        assert_eq!(gateway("gateway: link#12"), None);
    }

    #[test]
    fn the_wired_limit_is_compared_with_the_model() {
        let check = |memory: u64, limit_mb: u64, model: u64, state: SystemState, part: &str| {
            let finding = wired_limit(Some(memory * GIB), Some(limit_mb), model * GIB);
            assert!(finding.state == state && finding.text.contains(part), "{finding:?}");
        };
        check(16, 0, 4, SystemState::Fine, "default");
        check(64, 0, 40, SystemState::Fine, "48.0 GiB of 64.0 GiB");
        check(64, 0, 45, SystemState::Advice, "iogpu.wired_limit_mb=51712");
        check(64, 60_000, 45, SystemState::Fine, "set to 58.6 GiB");
        check(64, 0, 60, SystemState::Advice, "smaller");
        check(64, 0, u64::MAX / GIB, SystemState::Advice, "smaller");
        assert_eq!(wired_limit(None, Some(0), 1).state, SystemState::Unknown);
        assert_eq!((number("51539607552\n"), number("sysctl: unknown oid")), (Some(51_539_607_552), None));
    }

    #[test]
    fn sleep_is_read_from_the_power_settings() {
        let settings = |sleep: &str| {
            format!(
                "System-wide power settings:\nCurrently in use:\n standby 1\n disksleep 10\n {sleep}\n displaysleep 5\n"
            )
        };
        assert_eq!(super::sleep(&settings("sleep 0 (sleep prevented by powerd)")).state, SystemState::Fine);
        let sleeps = super::sleep(&settings("sleep                1"));
        assert!(sleeps.state == SystemState::Advice && sleeps.text.contains("after 1 idle minutes"));
        assert_eq!(super::sleep(" displaysleep 5\n").state, SystemState::Unknown);
    }
}
