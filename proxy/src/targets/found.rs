//! What was found in the network, and why it is used or not: for the state, the page and `baton discover`.

use std::sync::{Mutex, PoisonError};

use baton_link::proof::NotProven;
use baton_link::remote::ProofFailure;
use baton_schemas::node::Role;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether something that announces itself as a node is used. In the order in which one of several addresses decides.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    strum::IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum FoundState {
    /// It has proven the cluster key, and gets requests for its model.
    Used,
    /// It has proven the cluster key, and is one of the nodes that the operator has configured.
    Configured,
    /// It has proven the cluster key. Nothing is used now, because this is only a look around.
    Proven,
    /// It has proven the cluster key, but no served model can use what it runs.
    OtherModel,
    /// It has proven the cluster key, but keeps the KV of a served model in other types or in another form.
    OtherKv,
    /// It knows another cluster key, or none.
    OtherKey,
    /// A node with the key answers, but from another address: the connection is translated or passed on.
    Elsewhere,
    /// Its TLS certificate is not trusted here.
    Certificate,
    /// It speaks plain HTTP, which is not allowed here.
    PlainHttp,
    /// What answers is not a Baton node of this version.
    NotANode,
    /// It does not answer.
    Unreachable,
    /// There is no cluster key here to compare with.
    NoKey,
    /// It has not answered yet.
    #[default]
    Asking,
}

impl FoundState {
    /// The word in tables.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The same in a sentence for people.
    pub fn words(self) -> &'static str {
        match self {
            FoundState::Used => "used",
            FoundState::Configured => "used, as the configuration names it",
            FoundState::Proven => "has the cluster key; baton serve --discover uses it",
            FoundState::OtherModel => "found, but runs another model than those served here",
            FoundState::OtherKv => {
                "found, but keeps the KV of a model served here in other types or in another form: start it with the same \
                 --engine, --cache-type-k and --cache-type-v"
            }
            FoundState::OtherKey => {
                "found, other key: `baton pair` both machines, or start them with the same BATON_CLUSTER_KEY"
            }
            FoundState::Elsewhere => {
                "found, but its address is translated on the way, or another machine pretends to be it; name it with --prefill \
                 or --decode if you trust the way"
            }
            FoundState::Certificate => {
                "found, but its TLS certificate is not trusted here: its key is another cluster's until `baton pair` joins them; \
                 without pairing, --tls-ca FILE adds its authority"
            }
            FoundState::PlainHttp => {
                "found, but it speaks plain HTTP: give it a certificate, or allow it here with --allow-plain-http"
            }
            FoundState::NotANode => "found, but what answers is no Baton node of this version",
            FoundState::Unreachable => "found, but it does not answer: is a firewall between the machines?",
            FoundState::NoKey => "found, but there is no cluster key here: `baton pair`, or set BATON_CLUSTER_KEY",
            FoundState::Asking => "found, being asked",
        }
    }
}

impl From<&ProofFailure> for FoundState {
    fn from(failure: &ProofFailure) -> FoundState {
        match failure {
            ProofFailure::Unreachable(_) | ProofFailure::NotAsked(_) => FoundState::Unreachable,
            ProofFailure::PlainHttp => FoundState::PlainHttp,
            ProofFailure::Certificate(_) => FoundState::Certificate,
            ProofFailure::NotProven(NotProven::OtherKey) => FoundState::OtherKey,
            ProofFailure::NotProven(NotProven::Elsewhere) => FoundState::Elsewhere,
            ProofFailure::NotProven(NotProven::NotANode) => FoundState::NotANode,
        }
    }
}

/// Something that announces itself as a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FoundNode {
    /// The name that it announces. Anybody can announce anything.
    pub name: String,
    /// Whether it is used.
    pub state: FoundState,
    /// The same in words.
    pub reason: String,
    /// Its role, if it has proven the cluster key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Its name in `x-baton-route`, if it is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The addresses that it announces, the preferred one first; only for operators.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<FoundAddress>,
}

/// An address of something that announces itself as a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FoundAddress {
    /// `HOST:PORT`
    pub address: String,
    /// What asking there has shown.
    pub state: FoundState,
}

/// The search for nodes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DiscoveryState {
    /// Why nothing can be found on this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// What was found, in the order of the names.
    pub found: Vec<FoundNode>,
}

/// The latest result of the search.
#[derive(Debug, Default)]
pub struct FoundNodes(Mutex<DiscoveryState>);

impl FoundNodes {
    /// A copy.
    pub fn state(&self) -> DiscoveryState {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the result.
    pub fn set(&self, state: DiscoveryState) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }
}
