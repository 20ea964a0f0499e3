//! Wakes machines of the local network by Wake-on-LAN: a magic packet, which a sleeping machine's network card recognises.
//!
//! The packet is 6 bytes of `ff` and then 16 times the card's address, anywhere in a UDP datagram. Nobody confirms it, and a
//! router does not pass it on.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};

use if_addrs::IfAddr;
use tokio::net::UdpSocket;

/// The port that magic packets are sent to: "discard", where no machine answers.
pub const PORT: u16 = 9;

/// Repetitions of the address in a packet.
const N_REPEATS: usize = 16;

/// The magic packet for the network card of this address.
pub fn magic_packet(mac: [u8; 6]) -> [u8; 6 + 6 * N_REPEATS] {
    let mut packet = [0xff; 6 + 6 * N_REPEATS];
    packet[6..].chunks_exact_mut(6).for_each(|part| part.copy_from_slice(&mac));
    packet
}

/// Sends one magic packet to `to`, or without that to everybody in each IPv4 network of this machine. Errors: it could be sent
/// nowhere.
pub async fn wake(mac: [u8; 6], to: Option<SocketAddrV4>) -> io::Result<()> {
    let targets = match to {
        Some(to) => vec![to],
        None => broadcast_addresses().into_iter().map(|ip| SocketAddrV4::new(ip, PORT)).collect(),
    };
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await?;
    socket.set_broadcast(true)?;
    let mut outcome = Err(io::Error::new(io::ErrorKind::NetworkUnreachable, "this machine is in no IPv4 network"));
    for target in targets {
        let sent = socket.send_to(&magic_packet(mac), SocketAddr::V4(target)).await.map(drop);
        outcome = outcome.or(sent);
    }
    outcome
}

/// The broadcast address of each IPv4 network that this machine is in.
fn broadcast_addresses() -> Vec<Ipv4Addr> {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let mut addresses: Vec<Ipv4Addr> = interfaces
        .iter()
        .filter(|interface| !interface.is_loopback())
        .filter_map(|interface| match &interface.addr {
            IfAddr::V4(own) => own.broadcast,
            IfAddr::V6(_) => None,
        })
        .collect();
    addresses.sort_unstable();
    addresses.dedup();
    addresses
}

/// The address of the network card of this machine that has this IP address, as the system writes it. `None`: no card has it, or the
/// system does not say; only Linux does.
pub fn own_card(ip: IpAddr) -> Option<String> {
    let interfaces = if_addrs::get_if_addrs().ok()?;
    let card = interfaces.into_iter().find(|interface| interface.ip() == ip.to_canonical())?;
    let address = std::fs::read_to_string(format!("/sys/class/net/{}/address", card.name)).ok()?;
    Some(address.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_magic_packet_arrives_as_a_card_expects_it() {
        let card = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let SocketAddr::V4(to) = card.local_addr().unwrap() else { panic!("IPv4") };
        wake([0xa4, 0x83, 0xe7, 0x12, 0x34, 0x56], Some(to)).await.unwrap();
        let mut packet = [0; 200];
        let n = card.recv(&mut packet).await.unwrap();
        let expected = [vec![0xff; 6], [0xa4, 0x83, 0xe7, 0x12, 0x34, 0x56].repeat(16)].concat();
        assert_eq!(&packet[..n], &expected[..]);
    }

    #[test]
    fn an_address_of_another_machine_has_no_card_here() {
        assert_eq!(own_card("192.0.2.1".parse().unwrap()), None);
    }
}
