//! `baton bundle --offer`: machines of the local network fetch the bundle for a while.
//!
//! A machine without Baton has neither key nor certificate, so the file goes by plain HTTP. Its path holds a secret, so that only who was
//! given the command gets it, and the command refuses a file with another SHA-256 than the one on this screen.

use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use baton_link::node::{ListenAddress, Listener};
use baton_proxy::serve::signals::OnHangup;
use baton_proxy::serve::{CommandFailure, signals};
use sha2::{Digest, Sha256};
use tokio_util::io::ReaderStream;
use tokio_util::sync::CancellationToken;

use crate::lan_address::lan_address;
use crate::terminal;

/// The folder in the archive.
pub(super) const FOLDER: &str = "baton-bundle";

/// All IPv4 addresses, and a port that the system chooses.
pub(super) const DEFAULT_LISTEN: &str = "0.0.0.0:0";

/// How long the file is offered.
const LIFETIME: Duration = Duration::from_secs(30 * 60);

/// The name of the file there.
const NAME: &str = "baton.tar";

/// The system's program that checks a SHA-256.
const CHECK: &str = if cfg!(target_os = "macos") { "shasum -a 256 -c" } else { "sha256sum -c" };

/// Prints the command for the other machine, and serves the file until a signal or the end of its time. Errors: the file cannot be read,
/// or the address cannot be listened on.
pub(super) async fn serve(file: &Path, n_bytes: u64, listen: &str) -> Result<(), CommandFailure> {
    let address: ListenAddress = listen.parse().map_err(|why| CommandFailure(format!("--offer: {why}")))?;
    if matches!(address, ListenAddress::Unix(_)) {
        return Err(CommandFailure("--offer: other machines reach HOST:PORT, and no Unix socket".into()));
    }
    let hashed = file.to_owned();
    let digest = tokio::task::spawn_blocking(move || sha256(&hashed)).await??;
    let listener = Listener::bind(&address).await?;
    let listening = listener.tcp_address().ok_or_else(|| CommandFailure("--offer: no address".into()))?;
    let secret = uuid::Uuid::new_v4().simple().to_string();
    let path = format!("/{secret}/{NAME}");
    terminal::print_line(format_args!(
        "\nOn a machine of this network, for {} minutes; Ctrl-C ends it:\n\n  {}\n",
        LIFETIME.as_secs() / 60,
        command(&url(listening, &path), &digest)
    ))?;
    let offered = file.to_owned();
    let router = Router::new().route(&path, get(move || reply(offered.clone(), n_bytes)));
    let stop = CancellationToken::new();
    signals::stop_on_signal(stop.clone(), OnHangup::Stops);
    let ending = stop.clone();
    tokio::spawn(async move {
        tokio::time::sleep(LIFETIME).await;
        ending.cancel();
    });
    Ok(listener.serve(router, stop).await?)
}

/// The other machine's command: it fetches, compares, unpacks and installs.
fn command(url: &str, digest: &str) -> String {
    format!(
        "curl --noproxy '*' -fo {NAME} {url} && echo '{digest}  {NAME}' | {CHECK} && tar xf {NAME} && {FOLDER}/install.sh"
    )
}

/// The file's address for other machines. Without an address in a network, the reader fills in HOST.
fn url(listening: SocketAddr, path: &str) -> String {
    let ip = if listening.ip().is_unspecified() { lan_address(listening) } else { Some(listening.ip()) };
    let host = match ip {
        Some(IpAddr::V6(ip)) => format!("[{ip}]"),
        Some(IpAddr::V4(ip)) => ip.to_string(),
        None => "HOST".to_owned(),
    };
    format!("http://{host}:{}{path}", listening.port())
}

/// The file as it is read. One that was changed since does not have the printed digest.
async fn reply(file: std::path::PathBuf, n_bytes: u64) -> Response {
    match tokio::fs::File::open(&file).await {
        Ok(opened) => {
            terminal::announce("A machine fetches the bundle.".to_owned());
            let head = [(CONTENT_LENGTH, n_bytes.to_string()), (CONTENT_TYPE, "application/x-tar".to_owned())];
            (head, Body::from_stream(ReaderStream::with_capacity(opened, BUFFER))).into_response()
        }
        Err(error) => {
            terminal::announce(format!("The bundle cannot be read any more: {error}"));
            StatusCode::GONE.into_response()
        }
    }
}

/// Bytes that are read at once.
const BUFFER: usize = 256 << 10;

/// The SHA-256 of a file, in hexadecimal.
fn sha256(file: &Path) -> Result<String, CommandFailure> {
    let failed = |error: std::io::Error| CommandFailure(format!("{} cannot be read: {error}", file.display()));
    let mut hasher = Sha256::new();
    let mut input = std::fs::File::open(file).map_err(failed)?;
    let mut buffer = vec![0; BUFFER];
    loop {
        match input.read(&mut buffer).map_err(failed)? {
            0 => break,
            n => hasher.update(&buffer[..n]),
        }
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_compares_the_file_before_it_installs_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("b");
        std::fs::write(&file, "abc").unwrap();
        let digest = sha256(&file).unwrap();
        // FIPS 180-2, appendix B.1.
        assert_eq!(digest, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        let command = command(&url("10.0.0.2:81".parse().unwrap(), "/s/baton.tar"), &digest);
        assert!(
            command.starts_with("curl --noproxy '*' -fo baton.tar http://10.0.0.2:81/s/baton.tar && echo 'ba7816bf"),
            "{command}"
        );
        assert!(command.ends_with(" -c && tar xf baton.tar && baton-bundle/install.sh"), "{command}");
        assert_eq!(url("[fd00::2]:81".parse().unwrap(), "/s/b"), "http://[fd00::2]:81/s/b");
    }
}
