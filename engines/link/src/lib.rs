//! Machines and the connections between them: how an engine is called, wherever it runs.
//!
//! [`Engine`] is the interface of anything that runs one model. [`node`] serves an engine to other machines, and
//! [`remote`] is the client that makes a node an [`Engine`] again, so callers do not know where a model is computed.
//! [`handoff`] moves a prompt's KV from one node to another.
//!
//! ```
//! use baton_link::Engine;
//! use baton_link::remote::{NodeAddress, RemoteEngine};
//!
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let node = NodeAddress::Url("http://127.0.0.1:1".into());
//! let engine = RemoteEngine::new(&node, "the cluster key").unwrap();
//! assert!(engine.info().await.is_err(), "no node listens there");
//! # });
//! ```
//!
//! Rooms in reading order:
//!
//! | room | what it has |
//! |---|---|
//! | [`engine`] | the [`Engine`] trait and its streams; [`wrapper`] for tests, which replaces some calls of an engine |
//! | [`connections`] | a server's HTTP connections and their limits, for nodes and for the endpoint |
//! | [`transport`] | certificates, trusted machines, what may be sent unencrypted |
//! | [`node`], [`remote`] | the two ends of the node protocol |
//! | [`drafts`] | candidates for a sequence's next tokens from another node |
//! | [`handoff`] | pulls KV: from which address, with which codec, how far ahead |
//! | [`mdns`], [`links`], [`proof`] | machines in the network, which of their addresses are near, and their proof of the cluster key |
//! | [`kv_streams`] | whether KV moves, to which transfers of model files give way |
//! | [`trace`] | the trace that a call belongs to |
//! | [`awake`], [`no_sleep`] | deadlines on a machine that was suspended; keeping it from being suspended |
//! | [`wake_on_lan`] | wakes a machine that sleeps |
//! | [`lines`], [`long_json`] | bodies in lines, and bodies that take long to parse |
//!
//! It runs no model and reads no model's file, so it uses none of `baton-model`, `baton-upstream`, `baton-engines`:
//! of Baton only `baton-schemas`.

pub mod awake;
pub mod connections;
pub mod drafts;
pub mod engine;
pub mod handoff;
pub mod kv_streams;
pub mod lines;
pub mod links;
pub mod long_json;
pub mod mdns;
pub mod no_sleep;
pub mod node;
pub mod proof;
pub mod remote;
pub mod trace;
pub mod transport;
pub mod wake_on_lan;
pub mod wrapper;

pub use engine::{EmbedStream, Engine, KvEvent, KvStream, LoadStream, SequenceStream};
