//! Decides if rounding explains that a reply of the real model differs from the undisturbed one.
//!
//! An engine that computes several streams at once rounds otherwise than with one, so the margin between two tokens moves with
//! the streams beside it. A margin that one undisturbed reply has seen therefore says little; this asks for many.

use futures::future::join_all;
use harness::{BatonServer, MAX_MARGIN, MAX_NOISE};

use super::clients::{Divergence, chat, read};
use super::service::{Failure, HUNG, exchange};

/// Rounds of replies, and the most replies at once. Each round has another number of them.
const N_ROUNDS: usize = 40;
const MAX_AT_ONCE: usize = 12;

/// A server of the default model on which nothing breaks. It has a prefill node, so it computes prompts in the same chunks as
/// a cluster does.
pub(crate) fn undisturbed_server(args: &[&str]) -> BatonServer {
    let direct = ["--prefill", "http://127.0.0.1:1", "--policy", "direct", "--no-calibration"];
    BatonServer::start(&[&direct[..], args].concat())
}

/// The differences that rounding does not explain. It explains one whose margin is below [`MAX_MARGIN`], and one for which an
/// undisturbed server, asked for the same reply several times at once, has a margin below [`MAX_NOISE`].
pub(crate) async fn unexplained(differing: &[Divergence]) -> Vec<Divergence> {
    let (_, far): (Vec<_>, Vec<_>) = differing.iter().partition(|divergence| divergence.margin < MAX_MARGIN);
    if far.is_empty() {
        return Vec::new();
    }
    let server = tokio::task::spawn_blocking(|| undisturbed_server(&["--slots", "12"])).await.unwrap();
    let mut unexplained = Vec::new();
    for divergence in far {
        let margin = least_margin(&server.base, divergence).await;
        println!("ASKED AGAIN {divergence}: the least margin beside other streams is {margin:.3}");
        if margin >= MAX_NOISE {
            unexplained.push(divergence.clone());
        }
    }
    unexplained
}

/// The least margin of an undisturbed reply that is equal up to the difference; infinite if none is.
async fn least_margin(base: &str, divergence: &Divergence) -> f32 {
    let Divergence { body, undisturbed, at, other, .. } = divergence;
    let client = reqwest::Client::new();
    let ask = async |seed: usize| {
        // Each has its own key, so none uses another's cached prompt.
        let mut body = body.clone();
        body["seed"] = seed.into();
        body["max_tokens"] = (at + 1).into();
        let reply = async { read(exchange(chat(&client, base, &body)).await?, body["stream"] == true) };
        tokio::time::timeout(HUNG, reply).await.unwrap_or(Err(Failure::Hung))
    };
    let mut least = f32::INFINITY;
    for round in 0..N_ROUNDS {
        let n_at_once = 2 + round % (MAX_AT_ONCE - 1);
        let first = 1_000_000 + round * MAX_AT_ONCE;
        for reply in join_all((first..first + n_at_once).map(&ask)).await {
            let margin = reply.unwrap().margin(undisturbed, *at, other);
            least = least.min(margin.unwrap_or(f32::INFINITY));
        }
        if least < MAX_NOISE {
            break;
        }
    }
    least
}
