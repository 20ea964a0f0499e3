use super::*;

const NODE: Proven = Proven { process: 7, role: Role::Prefill };
const OTHER_KEY: ProofFailure = ProofFailure::NotProven(NotProven::OtherKey);

fn instance(id: &str, addresses: &[&str]) -> Instance {
    let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
    Instance { id: id.into(), name: id.into(), addresses, properties: BTreeMap::new() }
}

struct Network {
    sighted: Sighted,
    now: Instant,
    transport: Transport,
}

impl Network {
    fn new() -> Network {
        Network { sighted: Sighted::default(), now: Instant::now(), transport: Transport::new(None, true).unwrap() }
    }

    fn found(&mut self, id: &str, addresses: &[&str]) {
        self.sighted.found(instance(id, addresses), self.now);
    }

    /// Asks what is due, which answers like this. Returns what was asked.
    fn ask(&mut self, answer: impl Fn(&str) -> Result<Proven, ProofFailure>) -> Vec<String> {
        let asked = self.sighted.due(&self.transport, self.now);
        for Ask { id, address, .. } in &asked {
            self.sighted.answered(id, *address, answer(&address.to_string()), self.now);
        }
        asked.iter().map(|ask| ask.address.to_string()).collect()
    }

    fn wait(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
    }

    fn reachable(&self) -> Vec<String> {
        self.sighted.proven().values().flat_map(|node| node.reachable.iter().map(ToString::to_string)).collect()
    }

    fn states(&self) -> Vec<&'static str> {
        let used = |_| (FoundState::Used, Some("spark".to_owned()));
        self.sighted.report(used).iter().map(|found| found.state.as_str()).collect()
    }
}

fn unreachable() -> Result<Proven, ProofFailure> {
    Err(ProofFailure::Unreachable("no".into()))
}

#[tokio::test]
async fn a_node_is_used_while_it_proves_the_key_and_gone_after_two_failures() {
    let mut network = Network::new();
    network.found("spark", &["10.0.0.7:9000"]);
    assert_eq!(network.states(), ["asking"]);
    network.ask(|_| Ok(NODE));
    assert_eq!((network.reachable(), network.states()), (vec!["10.0.0.7:9000".to_owned()], vec!["used"]));
    assert!(network.ask(|_| Ok(NODE)).is_empty(), "not due");
    network.wait(2);
    network.ask(|_| unreachable());
    assert_eq!(network.reachable().len(), 1, "one packet may be lost");
    network.wait(1);
    network.ask(|_| unreachable());
    assert!(network.reachable().is_empty() && network.states().is_empty(), "no ghost");
    // Every 2 s, so that it is back at once.
    for _ in 0..20 {
        network.wait(2);
        assert_eq!(network.ask(|_| unreachable()).len(), 1);
    }
    network.wait(2);
    network.ask(|_| Ok(Proven { process: 8, role: Role::Both }));
    assert_eq!(network.sighted.proven().keys().collect::<Vec<_>>(), [&8]);
}

#[tokio::test]
async fn strangers_are_listed_with_their_reason_and_asked_less_and_less() {
    let mut network = Network::new();
    network.found("evil", &["10.0.0.66:9000"]);
    let mut n_asked = 0;
    for _ in 0..120 {
        n_asked += network.ask(|_| Err(OTHER_KEY)).len();
        network.wait(1);
    }
    assert!((5..=10).contains(&n_asked), "{n_asked}");
    assert_eq!((network.states(), network.reachable().len()), (vec!["other_key"], 0));
    network.sighted.gone("evil", network.now);
    assert!(network.states().is_empty());
}

#[tokio::test]
async fn an_address_that_changes_follows_the_process() {
    let mut network = Network::new();
    network.found("spark", &["10.0.0.7:9000", "10.0.1.7:9000"]);
    network.ask(|at| if at.starts_with("10.0.0") { Ok(NODE) } else { unreachable() });
    assert_eq!(network.reachable(), ["10.0.0.7:9000"]);
    let url = network.sighted.proven()[&7].url.clone();
    network.found("spark", &["10.0.0.8:9000"]);
    network.wait(2);
    network.ask(|at| if at == "10.0.0.8:9000" { Ok(NODE) } else { unreachable() });
    network.wait(2);
    assert_eq!(network.reachable(), ["10.0.0.8:9000"], "the old address went with its first failure");
    assert_eq!(network.sighted.proven()[&7].url, url);
}

#[tokio::test]
async fn of_two_ways_the_one_that_answers_comes_first() {
    let mut network = Network::new();
    network.found("spark", &["10.0.0.7:9000", "10.0.1.7:9000"]);
    network.ask(|_| Ok(NODE));
    network.wait(2);
    network.ask(|at| if at.starts_with("10.0.0") { unreachable() } else { Ok(NODE) });
    assert_eq!(network.reachable(), ["10.0.1.7:9000", "10.0.0.7:9000"]);
    assert_eq!(network.sighted.proven()[&7].announced.len(), 2);
}

#[tokio::test]
async fn a_goodbye_is_believed_once_the_node_no_longer_answers() {
    let mut network = Network::new();
    network.found("spark", &["10.0.0.7:9000"]);
    network.ask(|_| Ok(NODE));
    // Anybody can say goodbye for others.
    network.sighted.gone("spark", network.now);
    network.ask(|_| Ok(NODE));
    assert_eq!(network.reachable().len(), 1);
    network.wait(1);
    network.ask(|_| unreachable());
    assert!(network.reachable().is_empty());
    // It is asked on, and used at once when it is back, even if its announcement is not heard.
    network.wait(30);
    assert_eq!(network.ask(|_| Ok(NODE)).len(), 1);
    assert_eq!(network.reachable().len(), 1);
}

#[tokio::test]
async fn a_flood_of_strangers_displaces_no_node() {
    let mut network = Network::new();
    network.found("spark", &["10.0.0.7:9000"]);
    network.ask(|_| Ok(NODE));
    for i in 0..200 {
        network.found(&format!("flood {i}"), &["10.0.0.66:9000"]);
        network.ask(|at| if at == "10.0.0.7:9000" { Ok(NODE) } else { Err(OTHER_KEY) });
    }
    assert_eq!(network.reachable(), ["10.0.0.7:9000"]);
    assert_eq!(network.states().len(), MAX_INSTANCES);
    // A node that comes later still finds a place.
    network.found("mac", &["10.0.0.8:9000"]);
    network.ask(|_| Ok(Proven { process: 8, role: Role::Decode }));
    assert_eq!(network.sighted.proven().len(), 2);
}

#[tokio::test]
async fn an_announcement_in_a_nodes_name_takes_no_address_from_it() {
    let mut network = Network::new();
    network.found("spark", &["10.0.0.7:9000", "10.0.1.7:9000"]);
    network.ask(|_| Ok(NODE));
    let silent: Vec<String> = (1..=16).map(|i| format!("10.0.9.{i}:9000")).collect();
    network.found("spark", &silent.iter().map(String::as_str).collect::<Vec<_>>());
    network.ask(|at| if at.starts_with("10.0.9.") { Err(OTHER_KEY) } else { Ok(NODE) });
    let nodes = network.sighted.proven();
    let node = nodes.values().next().unwrap();
    let real = ["10.0.0.7:9000", "10.0.1.7:9000"].map(|text| text.parse::<SocketAddr>().unwrap());
    assert!(real.iter().all(|address| node.announced[..2].contains(address)), "{node:?}");
    assert_eq!((node.reachable.len(), node.announced.len()), (2, 16), "{node:?}");
}

#[tokio::test]
async fn what_is_no_longer_announced_is_no_ghost() {
    let mut network = Network::new();
    network.found("stranger", &["10.0.0.66:9000"]);
    network.found("spark before", &["10.0.0.7:9000"]);
    network.found("mac", &["10.0.0.8:9000"]);
    let answer = |at: &str| match at {
        "10.0.0.7:9000" => Ok(NODE),
        "10.0.0.8:9000" => Ok(Proven { process: 8, role: Role::Decode }),
        _ => Err(OTHER_KEY),
    };
    network.ask(answer);
    network.wait(60);
    // It was started again, and its old announcement never said goodbye.
    network.found("spark after", &["10.0.0.7:9000"]);
    network.ask(answer);
    network.wait(100);
    network.ask(answer);
    assert_eq!(network.sighted.instances.keys().collect::<Vec<_>>(), ["mac", "spark after"]);
    assert_eq!(network.sighted.proven().len(), 2, "a node whose announcement is not heard is still used");
}

#[tokio::test]
async fn one_process_is_listed_once() {
    let mut network = Network::new();
    network.found("spark", &["10.0.0.7:9000"]);
    network.ask(|_| Ok(NODE));
    let before = network.sighted.proven()[&7].clone();
    // A stranger announces it under a name that sorts before, and again and again.
    let mut evil = instance("evil", &["10.0.0.7:9000"]);
    evil.properties.insert(TLS_PROPERTY.into(), "a.b".into());
    for _ in 0..3 {
        network.wait(2);
        network.sighted.found(evil.clone(), network.now);
        network.ask(|_| Ok(NODE));
    }
    assert_eq!((network.states(), network.sighted.proven().len()), (vec!["used"], 1));
    let node = network.sighted.proven()[&7].clone();
    assert_eq!((&node.name, &node.url, node.urls.len()), (&before.name, &before.url, 2));
    let shown = network.sighted.report(|_| (FoundState::Used, None));
    assert_eq!(shown[0].name, "spark");
}

#[tokio::test]
async fn a_node_that_died_without_a_goodbye_makes_room_in_the_end() {
    let mut network = Network::new();
    network.found("spark", &["10.0.0.7:9000"]);
    network.ask(|_| Ok(NODE));
    for _ in 0..90 {
        network.wait(2);
        assert_eq!(network.ask(|_| unreachable()).len(), 1, "it is used at once when it comes back");
    }
    for i in 0..MAX_INSTANCES {
        network.found(&format!("mac {i}"), &["10.0.0.8:9000"]);
        network.ask(|_| Ok(Proven { process: 100 + i as u64, role: Role::Decode }));
        network.wait(2);
    }
    assert!(!network.sighted.instances.contains_key("spark"));
    assert_eq!(network.sighted.instances.len(), MAX_INSTANCES);
}

#[tokio::test]
async fn announced_certificate_names_are_host_names() {
    for name in ["spark.local", "a", "spark-2.example.com"] {
        assert!(is_host_name(name), "{name}");
    }
    for name in [
        " ",
        "a b",
        "127.0.0.1",
        "2130706433",
        "0x7f.1",
        "a/b",
        "user@host",
        "host:1",
        "a..b",
        "-a",
        "ä",
        "a?b",
        "\u{1b}[2J",
    ] {
        assert!(!is_host_name(name), "{name}");
    }
    let mut network = Network::new();
    let mut evil = instance("evil", &["10.0.0.66:9000"]);
    evil.properties.insert(TLS_PROPERTY.into(), "a@b/".into());
    network.sighted.found(evil, network.now);
    assert!(network.ask(|_| Ok(NODE)).is_empty());
    assert_eq!(network.states(), ["not_a_node"]);
}
