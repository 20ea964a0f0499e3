//! `baton demo --simulate`: the real endpoint in front of simulated machines, in real time.
//!
//! Every node is a process of its own: `baton node` with the simulated engine, at the rates of
//! [`machines`](crate::machines). HTTP, planning, handoff and failover are those of a running endpoint. Frames
//! carry little KV, and take the time of all of it on a 10 Gb/s link. Every line with a figure says "simulated".

mod cluster;
mod load;
mod long_prompt;
mod said;
mod unplugged;

use std::io::IsTerminal;
use std::process::{Command, Stdio};

use baton_proxy::serve::CommandFailure;
use tokio_util::sync::CancellationToken;

use self::cluster::RunningCluster;
pub(super) use self::cluster::SimulatedCluster;
use self::said::say;

/// How the play ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlayOptions {
    /// Opens the page in a browser, if there is one and the output is a terminal.
    pub(super) opens_page: bool,
    /// Ends after the play. Otherwise everything stays up until a signal comes, if the output is a terminal.
    pub(super) ends: bool,
}

/// Starts the machines, plays some requests and returns the last line.
pub(super) async fn run(
    shape: SimulatedCluster,
    options: PlayOptions,
    stop: &CancellationToken,
) -> Result<String, CommandFailure> {
    let is_terminal = std::io::stdout().is_terminal();
    let mut cluster = RunningCluster::start(shape).await?;
    let page = format!("{}/", cluster.endpoint.base);
    say(&format!("{}\n\nWatch it in a browser: {page}", shape.about()))?;
    if is_terminal && options.opens_page {
        open_page(&page);
    }
    cluster.calibrated().await?;
    let alone = long_prompt::play(&cluster).await?;
    load::play(&cluster).await?;
    unplugged::play(&mut cluster).await?;
    if is_terminal && !options.ends {
        say(&format!("\nThe machines stay up. Try them at {page}#try\nStop with Ctrl-C."))?;
        stop.cancelled().await;
    }
    for endpoint in alone {
        endpoint.stop().await;
    }
    cluster.stop().await;
    Ok(String::new())
}

/// Opens the page, if this session has a screen. The link was printed, so a failure changes nothing.
fn open_page(url: &str) {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let (command, has_screen) = match cfg!(target_os = "macos") {
        true => ("open", !is_set("SSH_CONNECTION")),
        false => ("xdg-open", is_set("DISPLAY") || is_set("WAYLAND_DISPLAY")),
    };
    if !has_screen {
        return;
    }
    let quiet = Command::new(command).arg(url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    match quiet {
        // Reaps it; a browser that it starts goes on.
        Ok(mut opening) => drop(std::thread::spawn(move || opening.wait())),
        Err(error) => tracing::debug!(%error, command, "no browser was opened"),
    }
}
