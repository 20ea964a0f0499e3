//! Describes a failed call to a node in one line for the operator.

use std::error::Error;
use std::io;

use rustls::CertificateError;

/// The chain of causes in one line, with advice if TLS failed. Not for clients: it may name the URL.
pub(crate) fn explain(error: &reqwest::Error) -> String {
    if let Some(tls) = explain_tls(error, error.url().map(|url| url.as_str())) {
        return tls;
    }
    let mut line = error.to_string();
    for cause in causes(error).skip(1) {
        let cause = cause.to_string();
        // Some errors include their cause's message.
        if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}

/// The description of a failure of TLS with the server at `url`. `None` if TLS did not fail.
pub fn explain_tls(error: &(dyn Error + 'static), url: Option<&str>) -> Option<String> {
    let tls = causes(error).find_map(tls_error)?;
    Some(format!("TLS with {} failed: {}", url.unwrap_or("a node"), cure(tls)))
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| (*error).source())
}

fn tls_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    match error.downcast_ref::<io::Error>() {
        // `source` skips the wrapped error, which can be an I/O error again.
        Some(error) => tls_error(error.get_ref()?),
        None => error.downcast_ref(),
    }
}

fn cure(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(wrong) => match wrong {
            // A bad signature occurs with a CA that has the same name as a trusted one, such as its successor.
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                "its certificate is of a CA that is not trusted here. If the machines are paired, `baton pair --status` shows \
                 whether their clusters are the same; tls_ca in the configuration, or --tls-ca FILE, adds a CA"
                    .into()
            }
            // Among others a self-signed certificate that is marked as a CA. As the certificate of a server it is refused,
            // even if it is trusted as a CA.
            CertificateError::Other(_) => "its certificate cannot be verified. If it is self-signed, it must not be marked as \
                                           a CA (basicConstraints CA:FALSE), and tls_ca in the configuration, or --tls-ca \
                                           FILE, must name it"
                .into(),
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => "its certificate has expired".into(),
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "its certificate is not valid yet: compare the machines' clocks".into()
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                format!("its certificate is for another host name ({wrong})")
            }
            _ => format!("its certificate is refused: {wrong}"),
        },
        rustls::Error::InvalidMessage(_) => {
            "it does not speak TLS; a node without --tls-cert is reached at http://".into()
        }
        _ => error.to_string(),
    }
}
