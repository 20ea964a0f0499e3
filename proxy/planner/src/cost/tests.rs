use baton_schemas::held::RestoreRates;
use baton_schemas::no_handoff::NoHandoffReason;

use super::*;
use crate::rates::{Curve, LengthFactors, NodeRates};
use crate::snapshot::{HeldTokens, KvSize};

/// An idle node with these rates.
pub(crate) fn node(name: &str, prefill_tps: f64, decode_tps: f64) -> NodeView {
    NodeView {
        name: name.into(),
        n_slots: 4,
        rates: NodeRates {
            prefill: Curve::constant(prefill_tps),
            decode: Curve::constant(decode_tps),
            ..NodeRates::default()
        },
        kv: Ok(KvSize { bytes_per_token: 131_072, state_bytes: 0 }),
        ..NodeView::default()
    }
}

/// One prefill node and one decode node with the published rates of a DGX Spark and an M3 Ultra for
/// Llama-3.1-8B FP16, on 10 GbE.
pub(crate) fn spark_and_mac(n_prompt: u32, n_output: f64) -> Snapshot {
    Snapshot {
        request: RequestSize { n_prompt, n_replayed: 0, n_output },
        decode: vec![node("mac", 1_470.0, 39.0)],
        prefill: vec![node("spark", 5_570.0, 12.0)],
        links: vec![vec![TransferRates {
            bytes_per_second: 1.25e9,
            rtt_ms: 0.3,
            tail_ms: 5.0,
            ..TransferRates::default()
        }]],
        barred_pairs: Vec::new(),
        corrections: Vec::new(),
        turn: 0,
    }
}

fn predictions(snapshot: &Snapshot) -> (Prediction, Prediction) {
    let all = candidates(snapshot);
    (all[0].prediction.unwrap(), all[1].prediction.unwrap())
}

#[test]
fn a_long_prompt_is_dominated_by_its_prefill() {
    let (direct, handoff) = predictions(&spark_and_mac(8_192, 32.0));
    assert!((direct.prefill_ms - 8_191.0 / 1_470.0 * 1e3).abs() < 1.0);
    assert!((handoff.prefill_ms - 8_191.0 / 5_570.0 * 1e3).abs() < 1.0);
    // The transfer of 1 GiB of KV overlaps with the prefill, except for its end.
    assert!(handoff.wire_ms > 800.0 && handoff.after_prefill_ms < 20.0, "{handoff:?}");
    assert!(handoff.completion_ms < direct.completion_ms / 2.0);
}

#[test]
fn a_slow_link_shows_in_what_is_not_hidden() {
    let mut snapshot = spark_and_mac(8_192, 32.0);
    snapshot.links[0][0].bytes_per_second = 0.125e9;
    let (direct, handoff) = predictions(&snapshot);
    assert!(handoff.after_prefill_ms > 7_000.0, "{handoff:?}");
    assert!(handoff.completion_ms > direct.completion_ms);
    // The measured size after compression counts, not the size of the plain KV.
    snapshot.links[0][0].lossless.per_token = 65_536.0;
    let (_, half) = predictions(&snapshot);
    assert!((handoff.wire_ms / half.wire_ms - 2.0).abs() < 1e-6, "{half:?}");
}

/// [`spark_and_mac`] with the cache shapes of a hybrid model of 27B parameters.
fn hybrid(n_prompt: u32) -> Snapshot {
    let mut snapshot = spark_and_mac(n_prompt, 32.0);
    for node in snapshot.decode.iter_mut().chain(&mut snapshot.prefill) {
        node.kv = Ok(KvSize { bytes_per_token: 65_536, state_bytes: 156_900_000 });
    }
    snapshot
}

#[test]
fn a_state_follows_the_last_chunk_unless_it_was_seen_to_be_hidden() {
    let (_, without) = predictions(&{
        let mut snapshot = hybrid(8_192);
        snapshot.decode[0].kv = Ok(KvSize { bytes_per_token: 65_536, state_bytes: 0 });
        snapshot
    });
    let (_, after) = predictions(&hybrid(8_192));
    let state_ms = 156_900_000.0 / 1.25e9 * 1e3;
    assert!((after.after_prefill_ms - without.after_prefill_ms - state_ms).abs() < 1e-6, "{after:?} {without:?}");
    let head_ms = REPLY_HEAD_TOKENS * 65_536.0 / 1.25e9 * 1e3;
    assert!((after.wire_ms - without.wire_ms - state_ms + head_ms).abs() < 1e-6, "the head is not pulled");
    let mut layer_by_layer = hybrid(8_192);
    layer_by_layer.links[0][0].after_prefill_state_share = 0.05;
    let (_, hidden) = predictions(&layer_by_layer);
    assert!((hidden.after_prefill_ms - without.after_prefill_ms - 0.05 * state_ms).abs() < 1e-6, "{hidden:?}");
    // On a link that is slower than the prefill, rows and states follow one another.
    let mut slow = hybrid(8_192);
    slow.links[0][0].bytes_per_second = 0.05e9;
    let (_, slow) = predictions(&slow);
    assert!(slow.ttft_ms > slow.wire_ms && slow.wire_ms > (8_179.0 * 65_536.0 + 156_900_000.0) / 0.05e9 * 1e3 - 1.0);
}

#[test]
fn the_head_of_a_reply_after_states_is_computed_by_the_reader() {
    let costs = |change: fn(&mut Snapshot)| {
        let mut snapshot = hybrid(8_192);
        snapshot.links[0][0].after_prefill_state_share = 1e-9;
        let mut rows = snapshot.clone();
        rows.decode[0].kv = Ok(KvSize { bytes_per_token: 65_536, state_bytes: 0 });
        change(&mut snapshot);
        change(&mut rows);
        predictions(&snapshot).1.ttft_ms - predictions(&rows).1.ttft_ms
    };
    // The prefill node is spared as many tokens.
    let spared_ms = REPLY_HEAD_TOKENS / 5_570.0 * 1e3;
    let step_ms = 1e3 / 39.0;
    assert!((costs(|_| {}) - (step_ms - spared_ms)).abs() < 0.1, "a step, which is longer than 12 tokens take");
    let slow = costs(|snapshot| snapshot.decode[0].rates.prefill = Curve::constant(100.0));
    assert!((slow - (REPLY_HEAD_TOKENS / 100.0 * 1e3 - spared_ms)).abs() < 0.1, "{slow}");
    assert!(costs(|snapshot| snapshot.request.n_replayed = 100).abs() < 0.1, "a reply that goes on has its head");
    let short = costs(|snapshot| snapshot.decode[0].held.slot = 8_190);
    assert!(short.abs() < 0.1, "one token is left, which is pulled: {short}");
}

#[test]
fn a_state_moves_the_length_from_which_a_handoff_pays() {
    let pays_from = |snapshot: fn(u32) -> Snapshot| {
        (16..4_096).find(|n_prompt| {
            let (direct, handoff) = predictions(&snapshot(*n_prompt));
            handoff.completion_ms < direct.completion_ms
        })
    };
    let (rows, state) = (pays_from(|n| spark_and_mac(n, 32.0)).unwrap(), pays_from(hybrid).unwrap());
    assert!(rows < 64 && (200..400).contains(&state), "{rows} {state}");
}

#[test]
fn a_cached_prompt_costs_nothing_where_it_is() {
    let mut snapshot = spark_and_mac(8_192, 32.0);
    snapshot.decode[0].held.slot = 8_160;
    let (direct, handoff) = predictions(&snapshot);
    assert!(direct.ttft_ms < 60.0 && handoff.ttft_ms > 1_000.0, "{direct:?} {handoff:?}");
    snapshot.decode[0].held.slot = 8_191;
    let (direct, handoff) = predictions(&snapshot);
    assert_eq!(direct, handoff, "nothing is left to hand over");
    // Cached on the prefill node: it only has to be sent.
    snapshot.decode[0].held.slot = 0;
    snapshot.prefill[0].held.slot = 8_160;
    let (_, handoff) = predictions(&snapshot);
    assert!(handoff.prefill_ms < 10.0 && handoff.after_prefill_ms > 800.0, "{handoff:?}");
}

#[test]
fn replayed_tokens_cost_a_step_each() {
    let (whole, _) = predictions(&spark_and_mac(8_192, 32.0));
    let mut taken_up = spark_and_mac(8_392, 32.0);
    taken_up.request.n_replayed = 200;
    let (direct, handoff) = predictions(&taken_up);
    assert!((direct.ttft_ms - whole.ttft_ms - 200.0 / 39.0 * 1e3).abs() < 1.0, "{direct:?} {whole:?}");
    assert!((handoff.prefill_ms - 8_191.0 / 5_570.0 * 1e3).abs() < 1.0, "only the prompt is handed over");
    // But not where a part of it is cached.
    taken_up.decode[0].held.slot = 8_291;
    let (direct, _) = predictions(&taken_up);
    assert!((direct.ttft_ms - 101.0 / 39.0 * 1e3).abs() < 1.0, "{direct:?}");
}

#[test]
fn busy_nodes_are_slower() {
    let idle = spark_and_mac(1_000, 100.0);
    let mut busy = idle.clone();
    (busy.decode[0].n_active, busy.decode[0].n_queued) = (4, 3);
    (busy.prefill[0].n_active, busy.prefill[0].n_backlog) = (1, 8_000);
    let ((direct, handoff), (busy_direct, busy_handoff)) = (predictions(&idle), predictions(&busy));
    assert!(busy_direct.queue_ms > 500.0 && direct.queue_ms == 0.0);
    // A long prompt delays a short one by no more than the short one's own length.
    let delay_ms = busy_handoff.queue_ms - busy_direct.queue_ms;
    assert!((delay_ms - handoff.prefill_ms).abs() < 1.0, "{delay_ms} {handoff:?}");
    // Three long prompts delay it by three times that.
    busy.prefill[0].n_active = 3;
    let (direct, three) = predictions(&busy);
    assert!((three.queue_ms - direct.queue_ms - 3.0 * handoff.prefill_ms).abs() < 1.0, "{three:?}");
    // Without a free slot it waits for the whole backlog.
    busy.prefill[0].n_active = 4;
    let (direct, last) = predictions(&busy);
    assert!((last.queue_ms - direct.queue_ms - 8_000.0 / 5_570.0 * 1e3).abs() < 1.0, "{last:?}");
}

#[test]
fn corrections_scale_own_time_but_not_the_queue() {
    let mut snapshot = spark_and_mac(1_000, 100.0);
    (snapshot.prefill[0].n_active, snapshot.prefill[0].n_backlog) = (1, 8_000);
    let (_, before) = predictions(&snapshot);
    snapshot.corrections = [1.0, 3.0].map(|factor| vec![LengthFactors::constant(factor)]).to_vec();
    let (_, after) = predictions(&snapshot);
    assert!((after.own_ms() / before.own_ms() - 3.0).abs() < 1e-9);
    assert!(after.queue_ms == before.queue_ms && after.queue_ms > 0.0);
}

#[test]
fn a_first_token_is_never_predicted_before_its_prompt_is_computed_and_sent() {
    let mut snapshot = spark_and_mac(8_192, 100.0);
    snapshot.corrections = vec![vec![LengthFactors::constant(0.2)]; 2];
    for bytes_per_second in [1.25e9, 0.125e9] {
        snapshot.links[0][0].bytes_per_second = bytes_per_second;
        let (direct, handoff) = predictions(&snapshot);
        assert!(direct.ttft_ms >= direct.prefill_ms, "{direct:?}");
        assert!(handoff.ttft_ms >= handoff.prefill_ms.max(handoff.wire_ms), "{handoff:?}");
    }
}

#[test]
fn barred_routes_and_unknown_links_have_no_prediction() {
    let mut snapshot = spark_and_mac(1_000, 100.0);
    snapshot.prefill[0].barred = Some(BarReason::PREFILL_DOWN);
    let all = candidates(&snapshot);
    assert_eq!((all[1].prediction, all[1].barred), (None, Some(BarReason::PREFILL_DOWN)));
    let mut snapshot = spark_and_mac(1_000, 100.0);
    snapshot.links[0][0].bytes_per_second = 0.0;
    let all = candidates(&snapshot);
    assert_eq!((all[1].prediction, all[1].barred), (None, None));
    snapshot.decode[0].kv = Err(NoHandoffReason::UnknownCache);
    let barred = candidates(&snapshot)[1].barred;
    assert_eq!(barred.map(BarReason::as_str), Some("unknown_cache"), "the reason itself");
    snapshot.prefill[0].name = snapshot.decode[0].name.clone();
    assert_eq!(candidates(&snapshot)[1].barred, Some(BarReason::SameNode));
}

#[test]
fn a_route_that_was_mispredicted_is_corrected() {
    let mut snapshot = spark_and_mac(1_000, 100.0);
    let (before, _) = predictions(&snapshot);
    let mut of_thousand = LengthFactors::constant(1.0);
    of_thousand.0[LengthFactors::class(999.0)] = 2.0;
    snapshot.corrections = vec![vec![of_thousand], vec![LengthFactors::constant(1.0)]];
    let (after, _) = predictions(&snapshot);
    assert!((after.ttft_ms / before.ttft_ms - 2.0).abs() < 1e-9);
    assert!((after.completion_ms - before.completion_ms - before.ttft_ms).abs() < 1e-6);
    // Another length is not touched.
    snapshot.decode[0].held = HeldTokens::in_slot(900);
    let (cached, _) = predictions(&snapshot);
    assert!((cached.ttft_ms - (99.0 / 1.47 + 1e3 / 39.0)).abs() < 0.1, "{cached:?}");
}

#[test]
fn a_wrong_rate_is_not_a_wrong_route() {
    let (direct, handoff) = predictions(&spark_and_mac(8_192, 32.0));
    for prediction in [direct, handoff] {
        let twice = prediction.own_ms_given(2.0 * prediction.prefill_ms);
        assert!((twice - prediction.own_ms() - prediction.prefill_ms).abs() < 1e-6);
        assert_eq!(prediction.own_ms_given(0.0), prediction.own_ms(), "a node that does not report it");
    }
    let mut slow_link = spark_and_mac(8_192, 32.0);
    slow_link.links[0][0].bytes_per_second = 0.125e9;
    let (_, handoff) = predictions(&slow_link);
    assert_eq!(handoff.own_ms_given(2.0 * handoff.prefill_ms), handoff.own_ms(), "the wire takes longer");
}

#[test]
fn prompts_that_share_steps_wait_less_than_one_after_another() {
    let mut snapshot = spark_and_mac(101, 1.0);
    // A step takes 40 ms beside its tokens.
    let spark = &mut snapshot.prefill[0];
    spark.rates.prefill = Curve::default();
    for n in [64.0, 128.0, 256.0, 512.0] {
        spark.rates.prefill.learn(n, n / (0.04 + n / 5_570.0));
    }
    (spark.n_active, spark.n_backlog) = (3, 300);
    let (_, handoff) = predictions(&snapshot);
    let together_ms = 400.0 / snapshot.prefill[0].rates.prefill.at(400.0).unwrap() * 1e3;
    assert!((handoff.queue_ms + handoff.prefill_ms - together_ms).abs() < 1e-6, "{handoff:?}");
    assert!(handoff.queue_ms < 1.5 * handoff.prefill_ms, "not three times as long: {handoff:?}");
    // A prompt in the queue waits for steps of full slots, too.
    (snapshot.prefill[0].n_active, snapshot.prefill[0].n_backlog) = (4, 400);
    let (_, queued) = predictions(&snapshot);
    assert!(queued.queue_ms < 2.0 * queued.prefill_ms, "{queued:?}");
}

#[test]
fn a_node_restores_what_comes_sooner_than_it_is_computed() {
    let predicted = |held: HeldTokens, restore: RestoreRates| {
        let mut snapshot = spark_and_mac(8_192, 32.0);
        (snapshot.decode[0].held, snapshot.decode[0].rates.restore) = (held, restore);
        predictions(&snapshot).0
    };
    let held = HeldTokens { slot: 1_000, memory: 3_000, disk: 4_000 };
    let fast = predicted(held, RestoreRates { memory: 100_000.0, disk: 10_000.0 });
    assert!((fast.restore_ms - 30.0 - 400.0).abs() < 1e-6, "{fast:?}");
    assert!((fast.prefill_ms - 191.0 / 1_470.0 * 1e3).abs() < 1e-6);
    assert!((fast.ttft_ms - fast.restore_ms - fast.prefill_ms - fast.step_ms).abs() < 1e-6);
    // A disk that is slower than the machine computes.
    let slow = predicted(held, RestoreRates { memory: 100_000.0, disk: 1_000.0 });
    assert!((slow.restore_ms - 30.0).abs() < 1e-6, "{slow:?}");
    assert!((slow.prefill_ms - 4_191.0 / 1_470.0 * 1e3).abs() < 1e-6);
    // An unmeasured rate is tried.
    let unknown = predicted(held, RestoreRates::default());
    assert!(unknown.restore_ms == 0.0 && unknown.prefill_ms == fast.prefill_ms, "{unknown:?}");
    // Of the last token, nothing is restored.
    let whole = predicted(HeldTokens { slot: 0, memory: 9_000, disk: 0 }, RestoreRates { memory: 1e5, disk: 0.0 });
    assert!((whole.restore_ms - 81.91).abs() < 1e-6 && whole.prefill_ms == 0.0, "{whole:?}");
}

#[test]
fn a_returning_conversation_goes_to_the_node_that_has_it_or_its_kv_to_the_node_that_is_free() {
    let mut snapshot = spark_and_mac(8_192, 256.0);
    snapshot.decode.push(node("mac-2", 1_470.0, 39.0));
    let link = snapshot.links[0][0];
    snapshot.links[0].push(link);
    // Not handed over by a third node.
    snapshot.prefill[0].barred = Some(BarReason::PREFILL_DOWN);
    snapshot.decode[1].held = HeldTokens { slot: 0, memory: 8_100, disk: 0 };
    snapshot.decode[1].rates.restore.memory = 100_000.0;
    let first = |snapshot: &Snapshot| {
        let all = candidates(snapshot).into_iter().filter_map(|c| Some((c.route, c.prediction?.completion_ms)));
        all.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0
    };
    assert_eq!(first(&snapshot), Route { decode: 1, prefill: None });
    // It has no free slot: its KV goes to the other one, if it computes prompts for others, too.
    (snapshot.decode[1].n_active, snapshot.decode[1].n_queued) = (4, 4);
    assert_eq!(first(&snapshot), Route { decode: 0, prefill: None });
    snapshot.prefill[0] = NodeView { n_active: 0, n_queued: 0, ..snapshot.decode[1].clone() };
    assert_eq!(first(&snapshot), Route { decode: 0, prefill: Some(0) });
}

#[test]
fn what_a_prefill_node_computes_before_the_wanted_positions_hides_nothing_of_the_wire() {
    let mut snapshot = spark_and_mac(8_001, 32.0);
    snapshot.links[0][0].bytes_per_second = 0.125e9;
    snapshot.decode[0].held = HeldTokens::in_slot(7_000);
    let (_, handoff) = predictions(&snapshot);
    assert!((handoff.prefill_ms - 8_000.0 / 5.57).abs() < 1e-6, "it has none of them: {handoff:?}");
    // 1,000 tokens cross the wire while an eighth of the prompt is computed. The first chunk has half of them.
    let expected = 5.0 + handoff.wire_ms - handoff.prefill_ms / 8.0 + handoff.prefill_ms / 16.0;
    assert!((handoff.after_prefill_ms - expected).abs() < 1e-6, "{handoff:?} {expected}");
}

#[test]
fn a_decode_node_pulls_the_rest_while_it_restores() {
    let handed_over = |on_disk: u32| {
        let mut snapshot = spark_and_mac(30_000, 32.0);
        snapshot.decode[0].held = HeldTokens { slot: 0, memory: 0, disk: on_disk };
        snapshot.decode[0].rates.restore.disk = 5_000.0;
        predictions(&snapshot).1
    };
    // The Spark computes 30,000 tokens in 5.4 s.
    let hidden = handed_over(10_000);
    assert_eq!(hidden.restore_ms, 0.0, "{hidden:?}");
    // From here on the disk is slower, and the pull begins 3 s before its end.
    let late = handed_over(20_000);
    assert!((late.restore_ms - 1e3).abs() < 1e-6, "{late:?}");
    // The Spark has nearly all of it, so that it only has to be sent.
    let mut snapshot = spark_and_mac(8_192, 32.0);
    snapshot.decode[0].held = HeldTokens { slot: 0, memory: 0, disk: 8_000 };
    snapshot.decode[0].rates.restore.disk = 5_000.0;
    snapshot.prefill[0].held.slot = 8_100;
    let (_, sent) = predictions(&snapshot);
    let whole = sent.restore_ms + sent.prefill_ms + sent.after_prefill_ms;
    assert!((whole - 1_600.0).abs() < 1e-6 && sent.ttft_ms > whole, "{sent:?}");
}

proptest::proptest! {
    #[test]
    fn a_store_never_makes_a_route_slower(
        slot in 0u32..9_000, memory in 0u32..9_000, disk in 0u32..9_000, n_prompt in 1u32..9_000,
        rates in proptest::array::uniform2(0f64..20_000.0), prefill in 10f64..10_000.0,
    ) {
        let mut without = spark_and_mac(n_prompt, 32.0);
        without.decode[0].rates.prefill = Curve::constant(prefill);
        without.decode[0].held = HeldTokens::in_slot(slot);
        let mut with = without.clone();
        with.decode[0].held = HeldTokens { slot, memory, disk };
        with.decode[0].rates.restore = RestoreRates { memory: rates[0], disk: rates[1] };
        let (before, after) = (predictions(&without).0, predictions(&with).0);
        proptest::prop_assert!(after.ttft_ms <= before.ttft_ms + 1e-6, "{:?} {:?}", before, after);
        let size = &with.request;
        proptest::prop_assert!(n_cached(size, &with.decode[0]) >= n_cached(size, &without.decode[0]));
    }
}
