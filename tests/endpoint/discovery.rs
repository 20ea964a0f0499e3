//! Nodes that find each other in the local network. Network namespaces stand for machines.
//! Where namespaces cannot be made, the test says so and is skipped.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use baton_link::mdns::{self, Announcement, ServiceType};
use harness::lab::{Lab, Membership, OWNER, ip, with_namespaces, within};
use harness::{BATON, CLUSTER_KEY, Capability, Process};
use rustix::process::Signal;
use serde_json::Value;

/// Set in the process that plays the stranger: the file that gets what it hears.
const STRANGER: &str = "BATON_TEST_STRANGER";

/// A node must be gone this soon after it was killed.
const GONE_WITHIN: Duration = Duration::from_secs(10);

const MEMBER: Membership = Membership::Key(CLUSTER_KEY);

#[test]
fn nodes_with_the_key_are_found_used_lost_and_found_again() {
    with_namespaces("discovery::nodes_with_the_key_are_found_used_lost_and_found_again", || {
        let lab = Lab::new(&[2, 2, 1]);
        let _endpoint = lab.endpoint(MEMBER, &["--no-calibration"]);
        let node = lab.node(1, MEMBER, &[]);
        let used = |states: &[String]| states == ["used"];
        within(Duration::from_secs(20), "the node is used", || used(&lab.states()));
        within(Duration::from_secs(5), "by both networks, and by IPv6", || {
            let found = lab.found();
            let has = |part: &str| found.iter().any(|(_, proven)| proven.iter().any(|address| address.contains(part)));
            has("10.77.0.2:9000") && has("10.77.1.2:9000") && has("[fe80:")
        });
        lab.hands_over("found");

        let _other = lab.node(2, Membership::Key("another cluster secret"), &[]);
        within(Duration::from_secs(10), "another key is listed", || lab.states() == ["other_key", "used"]);
        let table = lab.on(0, &BATON).args(["discover", "--api-key", OWNER]).output().unwrap();
        let table = String::from_utf8(table.stdout).unwrap();
        assert!(table.contains("found, other key") && table.contains("(prefill): used"), "{table}");

        ip(&format!("-n {} link set eth0 down", lab.name(1)));
        lab.hands_over("one network is down");
        ip(&format!("-n {} link set eth0 up", lab.name(1)));
        ip(&format!("-n {} addr flush dev eth1 scope global", lab.name(1)));
        ip(&format!("-n {} addr add 10.77.1.99/24 brd + dev eth1", lab.name(1)));
        within(Duration::from_secs(20), "the new address is used, by the same node", || {
            lab.found().iter().any(|(state, proven)| state == "used" && proven.contains("10.77.1.99:9000"))
        });
        lab.hands_over("another address");

        node.signal(Signal::KILL);
        drop(node);
        within(GONE_WITHIN, "a killed node is gone", || lab.states() == ["other_key"]);
        let nodes = lab.state()["models"][0]["nodes"].as_array().unwrap().len();
        assert_eq!(nodes, 1, "only the endpoint's own engine is left");
        let node = lab.node(1, MEMBER, &[]);
        within(GONE_WITHIN, "one that comes back is used", || lab.states() == ["other_key", "used"]);
        lab.hands_over("back again");
        node.signal(Signal::TERM);
        within(GONE_WITHIN, "one that says goodbye is gone", || lab.states() == ["other_key"]);
    });
}

#[test]
fn kv_takes_the_fastest_measured_network() {
    with_namespaces("discovery::kv_takes_the_fastest_measured_network", || {
        let lab = Lab::new(&[2, 2]);
        let slow =
            format!("netns exec {} tc qdisc add dev eth0 root tbf rate 20mbit burst 64kb latency 200ms", lab.name(1));
        if !Command::new("ip").args(slow.split(' ')).status().is_ok_and(|status| status.success()) {
            let reason = "tc cannot slow a network down here, so the choice of the fastest was not tested";
            return harness::not_possible_here(Capability::TrafficControl, reason);
        }
        // A busy machine measures a slow link even on the fast network, and a codec for it would make the simulator's KV too small to
        // tell from what nodes send besides.
        let _endpoint = lab.endpoint(MEMBER, &["--kv-codecs", "none"]);
        let _node = lab.node(1, MEMBER, &["--kv-codecs", "none"]);
        within(Duration::from_secs(40), "the link is measured", || {
            lab.state()["models"][0]["links"][0]["bytes_per_second"].as_f64().is_some_and(|rate| rate > 20e6 / 8.0)
        });
        lab.hands_over("both networks are there");
        let before = [lab.sent(1, 0), lab.sent(1, 1)];
        lab.hands_over("measured");
        let sent = [lab.sent(1, 0) - before[0], lab.sent(1, 1) - before[1]];
        eprintln!("sent over the slow network and the fast one: {sent:?} bytes");
        assert!(sent[1] > 10 * sent[0], "{sent:?}");
        ip(&format!("-n {} link set eth1 down", lab.name(1)));
        let before = lab.sent(1, 0);
        lab.hands_over("the fast network is down");
        assert!(lab.sent(1, 0) - before > sent[1] / 2, "KV took the next network");
    });
}

#[test]
fn two_paired_nodes_are_used_side_by_side_by_their_own_addresses() {
    with_namespaces("discovery::two_paired_nodes_are_used_side_by_side_by_their_own_addresses", || {
        let lab = Lab::new(&[2, 2, 2]);
        lab.pair(&[1, 2]);
        // Both have the cluster's name in their certificates, and the same port. KV without a codec, as above.
        let nodes = [1, 2].map(|i| lab.node(i, Membership::Paired, &["--kv-codecs", "none"]));
        let _endpoint = lab.endpoint(Membership::Paired, &["--kv-codecs", "none"]);
        within(Duration::from_secs(20), "both are used", || lab.states() == ["used", "used"]);
        within(Duration::from_secs(40), "both links are measured", || {
            let links = lab.state()["models"][0]["links"].as_array().cloned().unwrap_or_default();
            links.iter().filter(|link| link["bytes_per_second"].as_f64().is_some_and(|rate| rate > 0.0)).count() == 2
        });
        let from = |i: usize| lab.sent(i, 0) + lab.sent(i, 1);
        for (i, node) in (1..).zip(nodes) {
            let name = format!("machine-{i}");
            within(Duration::from_secs(20), &format!("{name} prefills, and sends its KV itself"), || {
                let before = from(i);
                let route = lab.hands_over(&name);
                let sent = from(i) - before;
                eprintln!("{route}: {sent} bytes from {name}");
                route.contains(&name) && sent > 100_000
            });
            node.signal(Signal::KILL);
            drop(node);
            let n_left = 2 - i;
            within(GONE_WITHIN, "a killed node is gone", || lab.states().len() == n_left);
        }
    });
}

#[test]
fn kv_crosses_by_ipv6_alone_and_comes_back_after_both_links_were_cut() {
    with_namespaces("discovery::kv_crosses_by_ipv6_alone_and_comes_back_after_both_links_were_cut", || {
        let lab = Lab::new(&[2, 2]);
        for i in 0..2 {
            for network in 0..2 {
                ip(&format!("-n {} -4 addr flush dev eth{network}", lab.name(i)));
            }
        }
        let _endpoint = lab.endpoint(MEMBER, &["--no-calibration"]);
        let _node = lab.node(1, MEMBER, &[]);
        let is_used = || lab.states() == ["used"];
        within(Duration::from_secs(20), "the node is used by IPv6", is_used);
        assert!(lab.found().iter().all(|(_, proven)| proven.iter().all(|address| address.starts_with('['))));
        lab.hands_over("IPv6");
        for network in 0..2 {
            ip(&format!("-n {} -6 addr del fd77:{network}::2/64 dev eth{network}", lab.name(1)));
        }
        within(Duration::from_secs(20), "only link-local addresses are left", || {
            lab.found().iter().all(|(state, proven)| {
                state == "used" && !proven.is_empty() && proven.iter().all(|address| address.starts_with("[fe80:"))
            })
        });
        lab.hands_over("link-local");

        let both = |to: &str| {
            for network in 0..2 {
                ip(&format!("-n {} link set eth{network} {to}", lab.name(1)));
            }
        };
        both("down");
        lab.reply("while the links are cut");
        within(GONE_WITHIN, "a node whose links are cut is gone", || lab.states().is_empty());
        both("up");
        within(GONE_WITHIN, "it is used again", is_used);
        lab.hands_over("links are back");
    });
}

#[test]
fn a_node_that_does_not_announce_itself_is_not_found() {
    with_namespaces("discovery::a_node_that_does_not_announce_itself_is_not_found", || {
        let lab = Lab::new(&[1, 1, 1]);
        let _quiet = lab.node(1, MEMBER, &["--announce", "off"]);
        let _loud = lab.node(2, MEMBER, &[]);
        let discover = || {
            let mut command = lab.on(0, &BATON);
            command.args(["discover", "--json", "--allow-plain-http"]).env("BATON_CLUSTER_KEY", CLUSTER_KEY);
            let output = command.output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(said.contains("listening for 4 s"), "whoever waits is told so: {said}");
            serde_json::from_slice::<Value>(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
        };
        within(Duration::from_secs(20), "the other one is found", || {
            let found = discover();
            let found = found["found"].as_array().unwrap();
            let quiet = found.iter().any(|found| found.to_string().contains("10.77.0.2"));
            assert!(!quiet, "{found:?}");
            found.iter().any(|found| found["state"] == "proven")
        });
    });
}

/// A stranger announces itself as a node, and passes what it hears on to a real one and back.
#[test]
fn a_stranger_that_announces_itself_gets_no_key() {
    with_namespaces("discovery::a_stranger_that_announces_itself_gets_no_key", || {
        let lab = Lab::new(&[1, 1, 1]);
        let heard = std::env::temp_dir().join(format!("baton-heard-{}", std::process::id()));
        std::fs::write(&heard, "").unwrap();
        let _node = lab.node(1, MEMBER, &[]);
        let stranger = lab
            .on(2, &std::env::current_exe().unwrap())
            .args(["--exact", "discovery::plays_the_stranger", "--nocapture"])
            .env(STRANGER, &heard)
            .stdout(Stdio::null())
            .spawn();
        let _stranger = Process(stranger.unwrap());
        let _endpoint = lab.endpoint(MEMBER, &["--no-calibration"]);
        within(Duration::from_secs(20), "the stranger is listed and not used", || {
            lab.states() == ["elsewhere", "used"]
        });
        lab.hands_over("beside a stranger");
        let heard_text = String::from_utf8_lossy(&std::fs::read(&heard).unwrap()).to_lowercase();
        let _ = std::fs::remove_file(&heard);
        assert!(heard_text.contains("get /node/v1/proof"), "it was asked: {heard_text}");
        assert!(
            !heard_text.contains("authorization") && !heard_text.contains(&CLUSTER_KEY.to_lowercase()),
            "{heard_text}"
        );
    });
}

/// Not a test by itself: the process of the stranger.
#[test]
fn plays_the_stranger() {
    let Some(heard) = std::env::var_os(STRANGER) else { return };
    let listener = TcpListener::bind("0.0.0.0:9000").unwrap();
    let name = "spark \u{1b}[2J".to_owned();
    let listening: SocketAddr = "0.0.0.0:9000".parse().unwrap();
    let announcement = Announcement { service: ServiceType::NODE, name, listening, properties: Vec::new() };
    let _announced = mdns::announce(&announcement).unwrap();
    for client in listener.incoming() {
        let (mut client, mut node) = (client.unwrap(), TcpStream::connect("10.77.0.2:9000").unwrap());
        let (mut back_to, mut back_from) = (client.try_clone().unwrap(), node.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
        let mut file = std::fs::OpenOptions::new().append(true).open(&heard).unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = client.read(&mut bytes) {
                file.write_all(&bytes[..n]).unwrap();
                node.write_all(&bytes[..n]).unwrap();
            }
        });
    }
}
