//! The cluster's certificate authority: its key stays on the first machine, and all machines pin its certificate.
//!
//! Every machine's certificate is for one name, [`NODE_NAME`], and never for an address. A client checks that the cluster's
//! authority has issued the certificate for that name, whatever address it has called. So addresses may change. The
//! certificates do not expire: leaving a cluster means a new cluster.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_ECDSA_P256_SHA256, PublicKeyData, SignatureAlgorithm, SigningKey,
};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{RootCertStore, ServerConfig};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

use super::error::PairingError;
use super::membership::{About, MachineName, Membership};

/// The name in every certificate of a paired machine. `.internal` is reserved for private use.
pub const NODE_NAME: &str = "node.baton.internal";

/// An uncompressed point of P-256.
const PUBLIC_KEY_BYTES: usize = 65;

/// What a signature of a joiner is for.
const REQUEST_CONTEXT: &[u8] = b"baton pairing v1 certificate request";

/// Characters of a cluster's name.
const CLUSTER_NAME_CHARS: usize = 12;

/// What a joiner asks for: a certificate for its key. The signature proves that it has the private key.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CertificateRequest {
    #[serde(with = "hex::serde")]
    public_key: Vec<u8>,
    #[serde(with = "hex::serde")]
    signature: Vec<u8>,
}

/// What the first machine grants. No `Debug`: it holds the cluster key.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Grant {
    cluster_key: String,
    authority: String,
    certificate: String,
}

/// A new cluster, whose first machine is this one.
pub(crate) fn found_cluster(machine: MachineName) -> Result<Membership, PairingError> {
    let authority_key = new_key()?;
    let authority = authority_params(&authority_key)?.self_signed(&authority_key).map_err(not_made)?;
    let about = About { cluster: cluster_name(authority.der()), machine, admitted_by: None, since: now() };
    let key = new_key()?;
    let certificate = issue(&about.machine, &key, &authority_key)?;
    let secret: [u8; 32] = rand::random();
    Ok(Membership {
        about,
        cluster_key: hex::encode(secret),
        authority: authority.pem(),
        certificate,
        private_key: key.serialize_pem(),
        authority_key: Some(authority_key.serialize_pem()),
    })
}

/// A joiner's key, and its request in the run with this transcript.
pub(crate) fn request(transcript: &[u8; 32]) -> Result<(KeyPair, CertificateRequest), PairingError> {
    let key = new_key()?;
    let signature = key.sign(&to_sign(transcript)).map_err(not_made)?;
    let request = CertificateRequest { public_key: key.public_key_raw().to_vec(), signature };
    Ok((key, request))
}

/// Signs a joiner's certificate. Errors: the request proves no key, or this is not the first machine.
pub(crate) fn grant(
    first: &Membership,
    joiner: &MachineName,
    request: &CertificateRequest,
    transcript: &[u8; 32],
) -> Result<Grant, PairingError> {
    let CertificateRequest { public_key, signature } = request;
    let malformed = PairingError::Protocol("a certificate request without a key of its own");
    if public_key.len() != PUBLIC_KEY_BYTES {
        return Err(malformed);
    }
    let proof = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, public_key);
    proof.verify(&to_sign(transcript), signature).map_err(|_| malformed)?;
    let authority_key = first.authority_key.as_ref().ok_or(PairingError::Certificate {
        what: "the authority's key",
        reason: "only the first machine has it".to_owned(),
    })?;
    let authority_key = KeyPair::from_pem(authority_key).map_err(not_made)?;
    Ok(Grant {
        cluster_key: first.cluster_key.clone(),
        authority: first.authority.clone(),
        certificate: issue(joiner, &JoinersKey(public_key.clone()), &authority_key)?,
    })
}

/// The joiner's membership. Errors: the certificates do not belong together.
pub(crate) fn accept(
    grant: Grant,
    key: &KeyPair,
    machine: MachineName,
    first: MachineName,
) -> Result<Membership, PairingError> {
    let Grant { cluster_key, authority, certificate } = grant;
    if cluster_key.len() != 64 || !cluster_key.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(PairingError::Protocol("a cluster key of a wrong form"));
    }
    let der = CertificateDer::from_pem_slice(authority.as_bytes())
        .map_err(|_| PairingError::Protocol("an authority without a certificate"))?;
    let about = About { cluster: cluster_name(&der), machine, admitted_by: Some(first), since: now() };
    let private_key = key.serialize_pem();
    let member = Membership { about, cluster_key, authority, certificate, private_key, authority_key: None };
    check(&member)?;
    Ok(member)
}

/// Checks that a machine's key and certificate belong together, and that the authority has issued it.
pub(crate) fn check(member: &Membership) -> Result<(), PairingError> {
    let wrong = |what, reason: &dyn std::fmt::Display| PairingError::Certificate { what, reason: reason.to_string() };
    let of_machine = "this machine's certificate";
    let of_cluster = "the cluster's authority";
    let certificate = CertificateDer::from_pem_slice(member.certificate.as_bytes());
    let certificate = certificate.map_err(|error| wrong(of_machine, &error))?;
    let authority = CertificateDer::from_pem_slice(member.authority.as_bytes());
    let authority = authority.map_err(|error| wrong(of_cluster, &error))?;
    let key = PrivateKeyDer::from_pem_slice(member.private_key.as_bytes());
    let key = key.map_err(|error| wrong("this machine's key", &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
    let server = server.map_err(|error| wrong(of_machine, &error))?.with_no_client_auth();
    server.with_single_cert(vec![certificate.clone()], key).map_err(|error| wrong(of_machine, &error))?;
    let mut roots = RootCertStore::empty();
    roots.add(authority).map_err(|error| wrong(of_cluster, &error))?;
    let verifier = WebPkiServerVerifier::builder_with_provider(roots.into(), provider).build();
    let verifier = verifier.map_err(|error| wrong(of_cluster, &error))?;
    let name = ServerName::try_from(NODE_NAME).map_err(|error| wrong(of_machine, &error))?;
    let verified = verifier.verify_server_cert(&certificate, &[], &name, &[], UnixTime::now());
    verified.map(drop).map_err(|error| wrong(of_machine, &error))
}

/// A joiner's public key, of which this machine knows no private one.
struct JoinersKey(Vec<u8>);

impl PublicKeyData for JoinersKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

fn new_key() -> Result<KeyPair, PairingError> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(not_made)
}

/// The authority's own data. A function of its key, so that the key alone can sign.
fn authority_params(key: &KeyPair) -> Result<CertificateParams, PairingError> {
    let mut params = CertificateParams::new(Vec::new()).map_err(not_made)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let id = blake3::hash(key.public_key_raw()).to_hex();
    params.distinguished_name.push(DnType::CommonName, format!("Baton cluster {}", &id[..CLUSTER_NAME_CHARS]));
    Ok(params)
}

/// A certificate for [`NODE_NAME`], PEM.
fn issue(machine: &MachineName, key: &impl PublicKeyData, authority_key: &KeyPair) -> Result<String, PairingError> {
    let issuer = Issuer::new(authority_params(authority_key)?, authority_key);
    let mut params = CertificateParams::new([NODE_NAME.to_owned()]).map_err(not_made)?;
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.distinguished_name.push(DnType::CommonName, machine.as_str());
    Ok(params.signed_by(key, &issuer).map_err(not_made)?.pem())
}

fn cluster_name(authority: &CertificateDer<'_>) -> String {
    blake3::hash(authority).to_hex()[..CLUSTER_NAME_CHARS].to_owned()
}

fn to_sign(transcript: &[u8; 32]) -> Vec<u8> {
    [REQUEST_CONTEXT, transcript].concat()
}

fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M:%S UTC").to_string()
}

fn not_made(error: rcgen::Error) -> PairingError {
    PairingError::Certificate { what: "a key or certificate", reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> MachineName {
        MachineName::parse(text).unwrap()
    }

    #[test]
    fn a_granted_certificate_is_of_the_cluster_and_of_the_joiners_key() {
        let first = found_cluster(name("a")).unwrap();
        check(&first).unwrap();
        let transcript = [7; 32];
        let (key, asked) = request(&transcript).unwrap();
        let granted = || grant(&first, &name("b"), &asked, &transcript).unwrap();
        let member = accept(granted(), &key, name("b"), name("a")).unwrap();
        assert_eq!(member.about.cluster, first.about.cluster);
        assert_eq!((&member.cluster_key, &member.authority), (&first.cluster_key, &first.authority));
        assert!(member.authority_key.is_none());
        // Another machine's key does not fit, nor another cluster's authority.
        let (other, _) = request(&transcript).unwrap();
        assert!(accept(granted(), &other, name("b"), name("a")).is_err());
        let stranger = found_cluster(name("c")).unwrap();
        let foreign = Grant { authority: stranger.authority, ..granted() };
        assert!(accept(foreign, &key, name("b"), name("a")).is_err());
        for wrong in ["", "short", &"x".repeat(64)] {
            assert!(accept(Grant { cluster_key: wrong.into(), ..granted() }, &key, name("b"), name("a")).is_err());
        }
        // A member that is not the first admits nobody.
        assert!(grant(&member, &name("d"), &asked, &transcript).is_err());
    }

    #[test]
    fn a_request_must_prove_its_key_in_this_run() {
        let first = found_cluster(name("a")).unwrap();
        let (_, asked) = request(&[7; 32]).unwrap();
        assert!(grant(&first, &name("b"), &asked, &[8; 32]).is_err());
        let (_, other) = request(&[7; 32]).unwrap();
        let mixed = CertificateRequest { public_key: other.public_key, signature: asked.signature };
        assert!(grant(&first, &name("b"), &mixed, &[7; 32]).is_err());
        for n in [0, 33, 64, 66] {
            let request = CertificateRequest { public_key: vec![4; n], signature: Vec::new() };
            assert!(grant(&first, &name("b"), &request, &[7; 32]).is_err());
        }
    }
}
