//! What anybody in the network can say before it has proven anything: announcements, and messages of a pairing.

use baton_link::mdns::Instance;
use mdns_sd::ServiceInfo;

/// An announcement in lines: its name, its addresses, its port, and its properties.
pub(crate) fn mdns_records(input: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(input) else { return false };
    let mut lines = text.split('\n');
    let (name, addresses) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    let Some(Ok(port)) = lines.next().map(str::parse) else { return false };
    let properties: Vec<(&str, &str)> = lines.filter_map(|line| line.split_once('=')).collect();
    let info = ServiceInfo::new("_baton._tcp.local.", name, "host.local.", addresses, port, &properties[..]);
    let Ok(info) = info else { return false };
    let Some(instance) = Instance::of(&info.as_resolved_service()) else { return false };
    let texts = instance.properties.iter().flat_map(|(key, value)| [key, value]).chain([&instance.name]);
    for text in texts {
        assert!(text.chars().count() <= 200 && !text.contains(char::is_control), "{text:?}");
    }
    assert!(instance.properties.len() <= 16 && (1..=16).contains(&instance.addresses.len()), "{instance:?}");
    for address in &instance.addresses {
        let ip = address.ip().to_canonical();
        assert!(address.port() != 0 && !ip.is_loopback() && !ip.is_multicast() && !ip.is_unspecified(), "{address}");
    }
    true
}

pub(crate) fn mdns_seeds() -> Vec<Vec<u8>> {
    let all = [
        "spark\n192.168.0.7,fd00::7,10.0.0.1\n9000\ntls=node.baton.internal\nroom=417",
        "evil\u{1b}[2J\u{202e}\n::ffff:192.168.0.7\n1\nkey=\u{9b}31m",
    ];
    all.map(|text| text.as_bytes().to_vec()).to_vec()
}

/// A byte with the kind of record, then the record.
pub(crate) fn pairing_records(input: &[u8]) -> bool {
    let [kind, record @ ..] = input else { return false };
    let Some(is_written_alike) = baton_pairing::read_record(*kind, record) else { return false };
    assert!(is_written_alike, "another hello or answer has the same meaning");
    true
}

pub(crate) fn pairing_seeds() -> Vec<Vec<u8>> {
    let records = baton_pairing::records().into_iter().enumerate();
    records.map(|(kind, record)| [&[kind as u8], &record[..]].concat()).collect()
}
