//! The rules of pulls: what is allowed, and how long each step may take.

use std::time::Duration;

use baton_schemas::handoff::HandoffFailure;
use baton_schemas::kv::{Codec, CodecLoss, KvLayout};

use crate::transport::Transport;

/// The longest wait for the queue and the first chunk, and between chunks, for a pull without a predicted time. In a
/// longer time the decode node would compute the prompt itself.
const DEFAULT_ALLOWANCE: Duration = Duration::from_secs(60);

/// The lossless codecs of rows, which are allowed unless the operator names others.
const LOSSLESS: [Codec; 2] = [Codec::None, Codec::PlanesZstd];

/// Those of states.
const LOSSLESS_STATES: [Codec; 1] = [Codec::None];

/// The bytes that all pulls of an engine together may read ahead while it is busy with a step: some seconds of a fast link.
const DEFAULT_READ_AHEAD: usize = 256 << 20;

#[derive(Debug, Clone)]
pub struct PullPolicy {
    /// KV from other weights of the same base model is accepted up to this canary distance (relative L2) of the worst of its
    /// rows and states. `None`: only equal weights are accepted.
    pub max_canary_distance: Option<f64>,
    /// The allowed codecs of rows and of states; each link uses the fastest by its measured rates. If none of them is for rows,
    /// or none for states, the lossless ones are allowed there.
    pub codecs: Vec<Codec>,
    /// The largest mean KL divergence, in nats, at which a lossy codec is used. The prefill node must have measured it.
    /// `None`: every allowed codec is used.
    pub max_kv_kl: Option<f64>,
    /// The trusted certificates, and whether plain HTTP to other machines is allowed.
    pub transport: Transport,
    /// The longest time without a new position for a pull without a predicted time; signs of life do not count. The
    /// whole pull may take this plus 50 ms for each position.
    pub allowance: Duration,
    /// Bytes that all pulls together may read ahead of the engine, in addition to the chunks in [`PULL_WINDOW`].
    ///
    /// [`PULL_WINDOW`]: super::PULL_WINDOW
    pub read_ahead: usize,
    /// The longest silences.
    pub timeouts: PullTimeouts,
    /// KV may come from another engine of the same endpoint, by a Unix socket. For the endpoint's own engine alone: it is the
    /// endpoint that names the socket.
    pub takes_sockets: bool,
}

/// What a codec encodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KvPart {
    /// The rows of positions.
    Rows,
    /// The states of recurrent layers.
    States,
}

/// What every call to a prefill node needs.
pub(super) struct PullSettings {
    /// It is sent only where `policy` allows it, and to a found address only after it has proven the key.
    pub(super) cluster_key: String,
    pub(super) policy: PullPolicy,
}

impl PullSettings {
    /// Checks that the key may be sent to an address. `outcome`: what is not done otherwise, for the log.
    pub(super) fn check_address(&self, url: &str, outcome: &'static str) -> Result<(), HandoffFailure> {
        self.policy.transport.check(url).map_err(|error| {
            tracing::warn!(url, %error, "{outcome}: the address is refused");
            HandoffFailure::AddressRefused
        })
    }
}

impl PullPolicy {
    /// The codecs that are allowed for a part of the KV of this layout with a peer that measured these losses, at least one. If
    /// none is left of those that the operator named, it is no codec.
    pub(super) fn allowed_codecs(&self, part: KvPart, losses: &[CodecLoss], layout: &KvLayout) -> Vec<Codec> {
        let (of_part, lossless) = match part {
            KvPart::Rows => (&Codec::OF_ROWS[..], &LOSSLESS[..]),
            KvPart::States => (&Codec::OF_STATES[..], &LOSSLESS_STATES[..]),
        };
        let named: Vec<Codec> = self.codecs.iter().copied().filter(|codec| of_part.contains(codec)).collect();
        let named = if named.is_empty() { lossless.to_vec() } else { named };
        let is_good = |codec: &Codec| match self.max_kv_kl {
            Some(most) if codec.is_lossy() => losses.iter().any(|loss| loss.codec == *codec && loss.mean_kl <= most),
            _ => true,
        };
        let fits = |codec: &Codec| match part {
            KvPart::Rows => codec.check(layout).is_ok(),
            KvPart::States => codec.check_states(layout).is_ok(),
        };
        let allowed: Vec<Codec> = named.into_iter().filter(is_good).filter(fits).collect();
        if allowed.is_empty() { vec![Codec::None] } else { allowed }
    }
}

/// The allowed codecs that lose nothing; if there are none, KV travels as it is.
pub(super) fn lossless(mut allowed: Vec<Codec>) -> Vec<Codec> {
    allowed.retain(|codec| !codec.is_lossy());
    if allowed.is_empty() { vec![Codec::None] } else { allowed }
}

impl Default for PullPolicy {
    fn default() -> Self {
        PullPolicy {
            max_canary_distance: None,
            codecs: Vec::new(),
            max_kv_kl: None,
            transport: Transport::default(),
            allowance: DEFAULT_ALLOWANCE,
            read_ahead: DEFAULT_READ_AHEAD,
            timeouts: PullTimeouts::default(),
            takes_sockets: false,
        }
    }
}

/// How long a prefill node may be silent.
#[derive(Debug, Clone, Copy)]
pub struct PullTimeouts {
    /// Until the connection is open. A prefill node in the same network answers well within the default.
    pub connect: Duration,
    /// Until the head of the reply. The prefill node answers before it computes.
    pub head: Duration,
    /// Between two bytes. The prefill node sends a sign of life every second.
    pub stall: Duration,
    /// A node that sent a byte within this time is alive: if the pull then misses its deadline, the failure is
    /// `prefill_late` and not `prefill_stalled`.
    pub life_sign: Duration,
}

impl Default for PullTimeouts {
    fn default() -> Self {
        PullTimeouts {
            connect: Duration::from_secs(3),
            head: Duration::from_secs(5),
            stall: Duration::from_secs(5),
            life_sign: Duration::from_secs(3),
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::kv::{Dtype, LayerShape, RopePairing, Rows, Section, StateKind, StateShape};

    use super::*;

    fn layout(dtype: Dtype, n_values: u32) -> KvLayout {
        let layers = vec![LayerShape { k: Rows { dtype, n_values }, v: None }];
        let sections = vec![Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers }];
        KvLayout { rope: RopePairing::HalfSplit, sections, states: Vec::new() }
    }

    #[test]
    fn codecs_that_do_not_fit_the_rows_are_not_offered() {
        let policy = PullPolicy { codecs: Codec::ALL.to_vec(), ..PullPolicy::default() };
        assert_eq!(policy.allowed_codecs(KvPart::Rows, &[], &layout(Dtype::F16, 64)), Codec::OF_ROWS);
        let without_q8_0 = [Codec::None, Codec::PlanesZstd, Codec::Kvq, Codec::KvqFast];
        assert_eq!(policy.allowed_codecs(KvPart::Rows, &[], &layout(Dtype::F16, 48)), without_q8_0, "no whole blocks");
        assert_eq!(
            policy.allowed_codecs(KvPart::Rows, &[], &layout(Dtype::Q8_0, 64)),
            [Codec::None],
            "quantized already"
        );
        let one = PullPolicy { codecs: vec![Codec::PlanesZstd], ..policy };
        assert_eq!(one.allowed_codecs(KvPart::Rows, &[], &layout(Dtype::Q4_0, 64)), [Codec::None]);
    }

    #[test]
    fn a_lossy_codec_is_used_only_up_to_the_allowed_loss() {
        let loss = |codec, mean_kl| CodecLoss { codec, mean_kl, ratio: 4.0 };
        let f16 = layout(Dtype::F16, 64);
        let losses = [loss(Codec::Kvq, 0.004), loss(Codec::KvqFast, 0.02)];
        let named = vec![Codec::None, Codec::Q8_0, Codec::Kvq, Codec::KvqFast];
        let policy = PullPolicy { codecs: named.clone(), ..PullPolicy::default() };
        assert_eq!(policy.allowed_codecs(KvPart::Rows, &[], &f16), named, "without a limit");
        let limited = PullPolicy { max_kv_kl: Some(0.01), ..policy };
        assert_eq!(
            limited.allowed_codecs(KvPart::Rows, &losses, &f16),
            [Codec::None, Codec::Kvq],
            "nothing is known of q8_0"
        );
        assert_eq!(limited.allowed_codecs(KvPart::Rows, &[], &f16), [Codec::None]);
        let only_lossy = PullPolicy { codecs: vec![Codec::KvqFast], ..limited };
        assert_eq!(only_lossy.allowed_codecs(KvPart::Rows, &losses, &f16), [Codec::None], "KV travels as it is");
    }

    #[test]
    fn a_lossless_pull_uses_what_the_operator_allows_and_loses_nothing() {
        assert_eq!(lossless(vec![Codec::Kvq, Codec::PlanesZstd]), [Codec::PlanesZstd]);
        assert_eq!(lossless(vec![Codec::None, Codec::StateF16]), [Codec::None]);
        assert_eq!(lossless(vec![Codec::KvqFast]), [Codec::None], "a lossy one alone");
    }

    #[test]
    fn states_are_narrowed_only_if_the_operator_names_it_and_the_loss_is_known() {
        let values = Rows { dtype: Dtype::F32, n_values: 48 };
        let states = vec![StateShape { kind: StateKind::Recurrence, values }];
        let hybrid = KvLayout { states, ..layout(Dtype::F16, 64) };
        let allowed = |codecs: &[Codec], max_kv_kl, losses: &[CodecLoss], layout: &KvLayout| {
            let policy = PullPolicy { codecs: codecs.to_vec(), max_kv_kl, ..PullPolicy::default() };
            let rows = policy.allowed_codecs(KvPart::Rows, losses, layout);
            (rows, policy.allowed_codecs(KvPart::States, losses, layout))
        };
        let none = vec![Codec::None];
        assert_eq!(allowed(&[], None, &[], &hybrid), (LOSSLESS.to_vec(), none.clone()));
        assert_eq!(allowed(&[Codec::Kvq], None, &[], &hybrid), (vec![Codec::Kvq], none.clone()), "rows alone");
        let named = [Codec::StateInt8];
        assert_eq!(allowed(&named, None, &[], &hybrid), (LOSSLESS.to_vec(), named.to_vec()), "states alone");
        assert_eq!(allowed(&named, None, &[], &layout(Dtype::F16, 64)).1, none, "no states");
        let all = [Codec::None, Codec::StateF16, Codec::StateInt8];
        let loss = |codec, mean_kl| CodecLoss { codec, mean_kl, ratio: 2.0 };
        let losses = [loss(Codec::StateF16, 1e-6), loss(Codec::StateInt8, 0.02)];
        let limited = allowed(&all, Some(0.01), &losses, &hybrid);
        assert_eq!(limited, (none.clone(), vec![Codec::None, Codec::StateF16]));
        assert_eq!(allowed(&named, Some(0.01), &losses, &hybrid).1, none, "KV travels as it is");
        assert_eq!(allowed(&all, Some(0.01), &[], &hybrid).1, none, "nothing is known");
        let narrow = Rows { dtype: Dtype::F16, ..values };
        let narrow = KvLayout { states: vec![StateShape { values: narrow, ..hybrid.states[0] }], ..hybrid };
        assert_eq!(allowed(&named, None, &[], &narrow).1, none, "narrow already");
    }
}
