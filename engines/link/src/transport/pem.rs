//! Reads certificates and keys from PEM files.

use std::path::{Path, PathBuf};

use rustls::pki_types::pem::{Error, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The largest PEM file. One certificate has some kilobytes, a system's whole bundle half a megabyte.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Why TLS cannot be set up. For the operator: the messages name files.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read.
    #[error("TLS: cannot read {}: {error}", path.display())]
    Unreadable { path: PathBuf, error: std::io::Error },
    /// The file is too long to be a PEM file.
    #[error("TLS: {} is too long to be a file of certificates or keys", _0.display())]
    TooLong(PathBuf),
    /// The file is not PEM, or has no certificate or key.
    #[error("TLS: {} holds no {wanted} in PEM format", path.display())]
    Missing {
        path: PathBuf,
        /// `certificate` or `private key`.
        wanted: &'static str,
    },
    /// The certificate or key is damaged, or of a kind that is not supported.
    #[error("TLS: the {wanted} in {} cannot be used: {reason}", path.display())]
    Unusable {
        path: PathBuf,
        /// `certificate` or `private key`.
        wanted: &'static str,
        /// The TLS library's message.
        reason: String,
    },
    /// The key belongs to another certificate.
    #[error("TLS: the private key in {} does not belong to the certificate in {}", key.display(), cert.display())]
    KeyMismatch {
        /// The certificate's file.
        cert: PathBuf,
        key: PathBuf,
    },
}

/// All certificates of a file, at least one.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wanted = "certificate";
    let pem = read(path)?;
    let found: Result<Vec<_>, Error> = CertificateDer::pem_slice_iter(&pem).collect();
    let found = found.map_err(|e| unusable(path, wanted, e))?;
    if found.is_empty() {
        return Err(TlsError::Missing { path: path.to_owned(), wanted });
    }
    Ok(found)
}

/// The first private key of a file.
pub(crate) fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let wanted = "private key";
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(|error| match error {
        Error::NoItemsFound => TlsError::Missing { path: path.to_owned(), wanted },
        error => unusable(path, wanted, error),
    })
}

/// The error for a file whose content cannot be used.
pub(crate) fn unusable(path: &Path, wanted: &'static str, reason: impl ToString) -> TlsError {
    TlsError::Unusable { path: path.to_owned(), wanted, reason: reason.to_string() }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    use std::io::Read;
    let unreadable = |error| TlsError::Unreadable { path: path.to_owned(), error };
    // Reading a device or a pipe might never end, or never begin.
    if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(unreadable(std::io::Error::other("it is no regular file")));
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_FILE_BYTES { Err(TlsError::TooLong(path.to_owned())) } else { Ok(bytes) }
}
