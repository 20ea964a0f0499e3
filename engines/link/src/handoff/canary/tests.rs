use baton_schemas::kv::{LayerShape, RopePairing, Rows, Section, StateKind, StateShape};
use half::f16;

use super::*;

fn chunk(values: &[f32]) -> (KvLayout, Chunk) {
    let rows = Rows { dtype: Dtype::F16, n_values: values.len() as u32 };
    let section =
        Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers: vec![LayerShape { k: rows, v: Some(rows) }] };
    let bytes: Bytes = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
    let layers = vec![LayerRows { k: bytes.clone(), v: bytes }];
    let chunk = Chunk { p0: 0, p1: 1, sections: vec![SectionRows { start: 0, layers }] };
    (KvLayout { rope: RopePairing::Interleaved, sections: vec![section], states: Vec::new() }, chunk)
}

fn distance(layout: &KvLayout, ours: &Chunk, theirs: &Chunk) -> f64 {
    distance_of_chunks(layout, std::slice::from_ref(ours), std::slice::from_ref(theirs))
}

#[test]
fn equal_values_have_distance_zero_and_another_order_is_far() {
    let (layout, ours) = chunk(&[1.0, -2.0, 3.0, -4.0]);
    assert_eq!(distance(&layout, &ours, &ours), 0.0);
    let (_, close) = chunk(&[1.001, -2.0, 3.0, -4.0]);
    assert!(distance(&layout, &ours, &close) < 1e-3);
    let (_, reordered) = chunk(&[1.0, 3.0, -2.0, -4.0]);
    assert!(distance(&layout, &ours, &reordered) > 1.0);
    // In several chunks, as a busy node or one with small batches sends them.
    let second = Chunk { p0: 1, p1: 2, ..ours.clone() };
    let second = Chunk { sections: vec![SectionRows { start: 1, ..ours.sections[0].clone() }], ..second };
    let both = [ours.clone(), second.clone()];
    let joined = [joined(&both).unwrap()];
    assert_eq!(distance_of_chunks(&layout, &joined, &both), 0.0);
    assert_eq!(distance_of_chunks(&layout, &both, &[second, ours.clone()]), f64::INFINITY, "out of order");
    assert_eq!(distance_of_chunks(&layout, &both, &[]), f64::INFINITY);
    let (_, other_size) = chunk(&[1.0]);
    assert_eq!(distance(&layout, &ours, &other_size), f64::INFINITY);
}

#[test]
fn quantized_rows_are_compared_by_their_values() {
    let rows = Rows { dtype: Dtype::Q8_0, n_values: 32 };
    let section =
        Section { window: None, n_rot: [32; 2], tokens_per_row: 1, layers: vec![LayerShape { k: rows, v: None }] };
    let layout = KvLayout { rope: RopePairing::HalfSplit, sections: vec![section], states: Vec::new() };
    let chunk = |scale: f32, first: u8| {
        let values = std::iter::once(first).chain(std::iter::repeat_n(4, 31));
        let block = f16::from_f32(scale).to_le_bytes().into_iter().chain(values);
        let layers = vec![LayerRows { k: block.collect(), v: Bytes::new() }];
        Chunk { p0: 0, p1: 1, sections: vec![SectionRows { start: 0, layers }] }
    };
    assert_eq!(distance(&layout, &chunk(0.5, 4), &chunk(0.25, 8)), (31.0f64 / 32.0).sqrt() / 2.0);
    assert_eq!(distance(&layout, &chunk(0.5, 4), &chunk(0.5, 4)), 0.0);
}

#[test]
fn of_a_window_the_rows_are_compared_that_both_have() {
    let (mut layout, whole) = chunk(&[1.0, 2.0]);
    layout.sections[0].window = Some(2);
    let windowed = |p0: u32, start: u32, rows: &[[f32; 2]]| {
        let bytes: Bytes = rows.iter().flatten().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
        let section = SectionRows { start, layers: vec![LayerRows { k: bytes.clone(), v: bytes }] };
        Chunk { p0, p1: start + rows.len() as u32, sections: vec![section] }
    };
    let ours = [windowed(0, 0, &[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), windowed(3, 3, &[[7.0, 8.0]])];
    let theirs = [windowed(0, 1, &[[9.0, 9.0]]), windowed(2, 2, &[[5.0, 6.0], [7.0, 8.0]])];
    assert!(distance_of_chunks(&layout, &ours, &theirs) > 0.5, "position 1");
    let theirs = [windowed(0, 2, &[]), windowed(2, 2, &[[5.0, 6.0], [7.0, 8.0]])];
    assert_eq!(distance_of_chunks(&layout, &ours, &theirs), 0.0);
    let none = windowed(0, 1, &[]);
    assert_eq!(distance(&layout, &whole, &none), f64::INFINITY, "no row to compare");
    layout.sections[0].window = None;
    assert_eq!(distance_of_chunks(&layout, &ours, &theirs), f64::INFINITY);
}

/// A layer of attention, then two recurrent layers: the first with both kinds of states.
fn hybrid() -> (KvLayout, LayerNumbers) {
    let (layout, _) = chunk(&[1.0, 2.0]);
    let shape = |kind, n_values| StateShape { kind, values: Rows { dtype: Dtype::F32, n_values } };
    let states = [(StateKind::Convolution, 2), (StateKind::Recurrence, 3), (StateKind::Convolution, 2)];
    let states = states.map(|(kind, n_values)| shape(kind, n_values)).to_vec();
    (KvLayout { states, ..layout }, LayerNumbers { sections: vec![vec![0]], states: vec![1, 1, 2] })
}

fn computed(states: [&[f32]; 3]) -> ComputedKv {
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Bytes>();
    let part = StatePart { position: 1, first: 0, tensors: states.map(bytes).to_vec() };
    ComputedKv { chunks: vec![chunk(&[1.0, 2.0]).1], states: Some(part) }
}

const STATES: [&[f32]; 3] = [&[1.0, 2.0], &[3.0, 0.0, 4.0], &[1.0, 1.0]];

#[test]
fn a_state_that_differs_is_named_with_its_layer_and_is_the_worst_of_all() {
    let (layout, layers) = hybrid();
    let ours = computed(STATES);
    let same = compare(&layout, &layers, &ours, &ours).unwrap();
    assert_eq!((same.worst(), same.rows.len(), same.states.len()), (0.0, 2, 3));
    assert_eq!(Farthest(&same.states).to_string(), "");
    let theirs = computed([STATES[0], &[3.0, 3.0, 0.0], &[1.0, 1.125]]);
    let found = compare(&layout, &layers, &ours, &theirs).unwrap();
    assert_eq!((found.of_rows(), found.of_states(), found.worst()), (Some(0.0), Some(1.0), 1.0));
    assert_eq!(Farthest(&found.states).to_string(), "layer 1 recurrence 1.0e0, layer 2 convolution 8.8e-2");
    let unknown = compare(&layout, &LayerNumbers::default(), &ours, &theirs).unwrap();
    assert!(Farthest(&unknown.states).to_string().starts_with("tensor 1 (recurrence) 1.0e0"));
    // A state that only one side has begun.
    let silent = computed([&[0.0, 0.0], STATES[1], STATES[2]]);
    assert_eq!(compare(&layout, &layers, &silent, &ours).unwrap().worst(), f64::INFINITY);
}

#[test]
fn missing_states_and_those_of_another_end_are_not_compared() {
    let (layout, layers) = hybrid();
    let ours = computed(STATES);
    let with = |change: fn(&mut StatePart)| {
        let mut theirs = ours.clone();
        change(theirs.states.as_mut().unwrap());
        theirs
    };
    let cases = [
        ("missing", ComputedKv { states: None, ..ours.clone() }),
        ("another end", with(|part| part.position = 2)),
        ("a part", with(|part| _ = part.tensors.pop())),
        ("not from the first on", with(|part| part.first = 1)),
        ("short", with(|part| part.tensors[1] = Bytes::from_static(&[0; 8]))),
    ];
    for (what, theirs) in cases {
        assert_eq!(compare(&layout, &layers, &ours, &theirs), None, "{what}");
        assert_eq!(compare(&layout, &layers, &theirs, &ours), None, "{what}");
    }
    assert_eq!(KvDistances::default().worst(), f64::INFINITY, "nothing compared admits nobody");
}

#[test]
fn a_model_that_only_has_states_is_judged_by_them() {
    let (layout, _) = hybrid();
    let layout = KvLayout { sections: Vec::new(), ..layout };
    let without_rows = |states| {
        let kv = computed(states);
        ComputedKv { chunks: vec![Chunk { p0: 0, p1: 1, sections: Vec::new() }], ..kv }
    };
    let layers = LayerNumbers::default();
    let (ours, theirs) = (without_rows(STATES), without_rows([&[1.0, 1.0], STATES[1], STATES[2]]));
    assert_eq!(compare(&layout, &layers, &ours, &ours).unwrap().worst(), 0.0);
    assert_eq!(compare(&layout, &layers, &ours, &theirs).unwrap().worst(), 0.2f64.sqrt());
}
