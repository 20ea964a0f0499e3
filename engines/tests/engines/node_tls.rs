//! Nodes with TLS and an operator's own CA: connections that work, and the operator's errors for those that do not.

use std::path::Path;
use std::sync::Arc;

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_link::node::ServerTls;
use baton_link::remote::{ClientError, NodeAddress, RemoteEngine};
use baton_link::transport::{AddressError, Transport};
use baton_schemas::EngineError;
use baton_schemas::node::Role;
use rcgen::CertificateParams;

use crate::peers::ca::Ca;
use crate::peers::{self, KEY, TestNode};

async fn node(tls: Option<&ServerTls>) -> TestNode {
    peers::serve(Arc::new(SimEngine::new(SimConfig::default())), Role::Both, KEY, tls.cloned()).await
}

fn client(url: &str, key: &str, transport: &Transport) -> RemoteEngine {
    RemoteEngine::with_transport(&NodeAddress::Url(url.to_owned()), key, transport).unwrap()
}

/// The operator's error for a node that cannot be reached.
async fn complaint(url: &str, transport: &Transport) -> String {
    let error = client(url, KEY, transport).info().await.unwrap_err();
    assert!(matches!(error, EngineError::Lost { .. }), "{error}");
    let line = error.to_string();
    assert!(!line.contains('\n') && line.contains("TLS"), "{line}");
    line
}

#[tokio::test]
async fn a_node_with_tls_is_reached_by_clients_that_trust_its_ca_and_have_the_key() {
    let ca = Ca::new();
    let node = node(Some(&ca.issue("127.0.0.1", |_| ()).load())).await;
    let url = format!("https://{}", node.address);
    assert_eq!(client(&url, KEY, &ca.transport()).info().await.unwrap().engine, "sim");
    assert_eq!(client(&url, "wrong", &ca.transport()).info().await.unwrap_err(), EngineError::Unauthorized);
    let untrusting = complaint(&url, &Transport::default()).await;
    assert!(untrusting.contains(&url) && untrusting.contains("--tls-ca"), "{untrusting}");
    let other = Ca::new();
    assert!(complaint(&url, &other.transport()).await.contains("not trusted"));
}

#[tokio::test]
async fn a_pinned_authority_is_trusted_for_its_name_at_any_address() {
    let (ca, other) = (Ca::new(), Ca::new());
    const NAME: &str = "node.test";
    let pinned = Transport::default().pinned_to(&ca.file(), NAME).unwrap();
    let serve = async |ca: &Ca, name| {
        let node = node(Some(&ca.issue(name, |_| ()).load())).await;
        (format!("https://{}", node.address), node)
    };
    let (member, _member) = serve(&ca, NAME).await;
    assert_eq!(client(&member, KEY, &pinned).info().await.unwrap().engine, "sim");
    // Another name does not do, not even that of the host, nor does another authority.
    let (host, _host) = serve(&ca, "127.0.0.1").await;
    assert!(complaint(&host, &pinned).await.contains("another host name"));
    let (stranger, _stranger) = serve(&other, NAME).await;
    assert!(complaint(&stranger, &pinned).await.contains("not trusted"));
    // An operator's own authority beside it is trusted as ever: for the host.
    let both = other.transport().pinned_to(&ca.file(), NAME).unwrap();
    let (named, _named) = serve(&other, "127.0.0.1").await;
    for url in [&member, &named] {
        assert_eq!(client(url, KEY, &both).info().await.unwrap().engine, "sim");
    }
    assert!(complaint(&stranger, &both).await.contains("another host name"));
    assert!(Transport::default().pinned_to(Path::new("absent.pem"), NAME).is_err());
}

#[tokio::test]
async fn both_http_versions_are_spoken_inside_tls() {
    let ca = Ca::new();
    let node = node(Some(&ca.issue("127.0.0.1", |_| ()).load())).await;
    let root = reqwest::Certificate::from_pem(&std::fs::read(ca.file()).unwrap()).unwrap();
    let builder = || reqwest::Client::builder().add_root_certificate(root.clone()).no_proxy();
    let url = format!("https://{}/node/v1/info", node.address);
    for (client, version) in [
        (builder().build().unwrap(), reqwest::Version::HTTP_2),
        (builder().http1_only().build().unwrap(), reqwest::Version::HTTP_11),
    ] {
        let reply = client.get(&url).bearer_auth(KEY).send().await.unwrap();
        assert_eq!((reply.version(), reply.status().as_u16()), (version, 200));
        let stranger = client.get(&url).send().await.unwrap();
        assert_eq!(stranger.status(), 401);
    }
}

#[tokio::test]
async fn each_fault_of_a_certificate_has_its_own_error() {
    let ca = Ca::new();
    let check = async |host: &str, change: fn(&mut CertificateParams), expected: &str| {
        let node = node(Some(&ca.issue(host, change).load())).await;
        let line = complaint(&format!("https://{}", node.address), &ca.transport()).await;
        assert!(line.contains(expected), "{line}");
    };
    let expired = |params: &mut CertificateParams| {
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(2021, 1, 1);
    };
    check("127.0.0.1", expired, "has expired").await;
    check("127.0.0.1", |params| params.not_before = rcgen::date_time_ymd(2999, 1, 1), "clocks").await;
    check("spark.local", |_| (), "another host name").await;
}

#[tokio::test]
async fn a_wrong_scheme_is_reported_for_both_sides() {
    let ca = Ca::new();
    let plain = node(None).await;
    let line = complaint(&format!("https://{}", plain.address), &ca.transport()).await;
    assert!(line.contains("does not speak TLS") && line.contains("http://"), "{line}");
    let tls = node(Some(&ca.issue("127.0.0.1", |_| ()).load())).await;
    let line = complaint(&format!("http://{}", tls.address), &ca.transport()).await;
    assert!(line.contains("https://"), "{line}");
}

#[tokio::test]
async fn a_renewed_certificate_is_shown_to_new_connections() {
    let ca = Ca::new();
    let next = Ca::new();
    let files = ca.issue("127.0.0.1", |_| ());
    let tls = files.load();
    let node = node(Some(&tls)).await;
    let url = format!("https://{}", node.address);
    let before = client(&url, KEY, &ca.transport());
    before.info().await.unwrap();
    let copy = |from: &Path, to: &Path| std::fs::copy(from, to).unwrap();
    let renewed = next.issue("127.0.0.1", |_| ());
    copy(&renewed.cert, &files.cert);
    copy(&renewed.key, &files.key);
    tls.reload().unwrap();
    client(&url, KEY, &next.transport()).info().await.unwrap();
    before.info().await.unwrap();
    complaint(&url, &ca.transport()).await;
}

#[tokio::test]
async fn the_key_is_not_sent_unencrypted_to_another_machine() {
    for url in ["http://spark.local:9000", "http://192.168.0.7:9000"] {
        let refused = RemoteEngine::new(&NodeAddress::Url(url.into()), KEY).err().unwrap();
        assert!(matches!(&refused, ClientError::Address(AddressError::Plain(named)) if named == url), "{refused}");
        let message = refused.to_string();
        assert!(message.contains("--allow-plain-http") && message.contains("--tls-cert"), "{message}");
        let allowed = Transport::new(None, true).unwrap();
        assert!(RemoteEngine::with_transport(&NodeAddress::Url(url.into()), KEY, &allowed).is_ok());
    }
}
