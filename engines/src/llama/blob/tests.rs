//! Blobs of invented models: written and parsed again, and damaged in every way.

use baton_schemas::image::{Image, ImageShape, SharedTokens};
use baton_schemas::kv::{
    Codec, Contiguous, Dtype, Fingerprint, Handoff, HandoffId, HandoffReader, HandoffRecord, HandoffWriter, KvLayout,
    LayerShape, Mac, Offer, Placement, Places, RopePairing, Span, StateKind, StateShape, VerifiedKv,
};

use super::form::TENSOR_HEADER_BYTES;
use super::*;
use crate::llama::import_state::ImportState;
use crate::llama::placement::{BlobPlacement, ImportBlob};

const CELL_BYTES: usize = 12;

fn shape(dtype: Dtype, n_k: u32, n_v: Option<u32>) -> LayerShape {
    LayerShape { k: Rows { dtype, n_values: n_k }, v: n_v.map(|n_values| Rows { dtype, n_values }) }
}

fn rows_of(window: Option<u32>, layers: Vec<LayerShape>) -> SectionForm {
    SectionForm::Rows(Section { window, n_rot: [0; 2], tokens_per_row: 1, layers })
}

/// Rows in blocks, rotated: K of one type, V of another.
fn quantized() -> BlobForm {
    let rows = |dtype, n_values| Rows { dtype, n_values };
    let layers = vec![LayerShape { k: rows(Dtype::Q8_0, 64), v: Some(rows(Dtype::Q4_0, 32)) }; 2];
    let section = SectionForm::Rows(Section { window: None, n_rot: [64, 128], tokens_per_row: 1, layers });
    BlobForm::new(RopePairing::HalfSplit, vec![section]).unwrap()
}

/// A full cache of two unequal layers, and a windowed one.
fn windowed() -> BlobForm {
    let full = vec![shape(Dtype::F16, 3, Some(2)), shape(Dtype::F16, 1, Some(4))];
    let sections = vec![rows_of(None, full), rows_of(Some(3), vec![shape(Dtype::F32, 2, Some(1))])];
    BlobForm::new(RopePairing::HalfSplit, sections).unwrap()
}

fn latent() -> BlobForm {
    let sections = vec![rows_of(None, vec![shape(Dtype::Bf16, 5, None); 2])];
    BlobForm::new(RopePairing::Interleaved, sections).unwrap()
}

/// Two recurrent layers of three; the second has no recurrence.
fn states() -> SectionForm {
    let state = |kind, n_values| StateShape { kind, values: Rows { dtype: Dtype::F32, n_values } };
    let convolutions = [3, 3].map(|n| state(StateKind::Convolution, n));
    let shapes = [&convolutions[..], &[state(StateKind::Recurrence, 5), state(StateKind::Recurrence, 0)]].concat();
    SectionForm::States(StatesForm { n_layers: 3, shapes })
}

/// Positions with several axes; latent attention, states, and an indexer.
fn hybrid() -> BlobForm {
    let attention = rows_of(None, vec![shape(Dtype::F16, 4, None)]);
    let indexer = rows_of(None, vec![shape(Dtype::F16, 2, Some(1))]);
    BlobForm::new(RopePairing::MultiAxis, vec![attention, states(), indexer]).unwrap()
}

/// No layer attends to all positions.
fn windowed_hybrid() -> BlobForm {
    let sections = vec![rows_of(None, Vec::new()), rows_of(Some(3), vec![shape(Dtype::F16, 4, Some(4))]), states()];
    BlobForm::new(RopePairing::None, sections).unwrap()
}

fn recurrent() -> BlobForm {
    BlobForm::new(RopePairing::None, vec![states()]).unwrap()
}

/// Forms, and where the sections of a chunk of 4..9 start.
fn forms() -> Vec<(BlobForm, Vec<u32>)> {
    vec![
        (windowed(), vec![4, 7]),
        (windowed(), vec![4, 9]),
        (latent(), vec![4]),
        (quantized(), vec![4]),
        (hybrid(), vec![4, 4]),
        (windowed_hybrid(), vec![7]),
        (windowed_hybrid(), vec![9]),
        (recurrent(), vec![]),
    ]
}

/// A chunk in which each byte differs from its neighbours.
fn filled(form: &BlobForm, positions: Range<u32>, starts: &[u32]) -> Chunk {
    let mut next = 0u8;
    let mut rows = |n_rows: u32, rows: Option<Rows>| -> Bytes {
        // Below 0x78, so that no value is NaN or infinite.
        let byte = |_| {
            next = (next + 1) % 0x77;
            next
        };
        (0..n_rows as usize * rows.map_or(0, |r| r.bytes())).map(byte).collect()
    };
    let sections = form.layout().sections.iter().zip(starts).map(|(section, &start)| {
        let n = positions.end - start;
        let layers = section.layers.iter().map(|l| LayerRows { k: rows(n, Some(l.k)), v: rows(n, l.v) }).collect();
        SectionRows { start, layers }
    });
    Chunk { p0: positions.start, p1: positions.end, sections: sections.collect() }
}

fn blob(chunk: &Chunk, form: &BlobForm) -> Bytes {
    ImportBlob::build(chunk, form).unwrap().into_buffer().into()
}

/// The chunk of text in a blob.
fn chunk(blob: &Bytes, form: &BlobForm, positions: Range<u32>) -> Result<Chunk, BlobError> {
    super::chunk(blob, form, positions, &TokenPositions::TEXT)
}

#[test]
fn a_blob_that_was_built_parses_to_the_same_chunk() {
    for (layout, starts) in forms() {
        let filled = filled(&layout, 4..9, &starts);
        let blob = blob(&filled, &layout);
        let parsed = chunk(&blob, &layout, 4..9).unwrap();
        assert_eq!(parsed, filled);
        // The rows are slices of the blob.
        let bounds = blob.as_ptr_range();
        assert!(parsed.tensors().filter(|t| !t.is_empty()).all(|t| bounds.contains(&t.as_ptr())));
    }
}

#[test]
fn another_rotation_is_another_form() {
    let blob = blob(&filled(&quantized(), 4..9, &[4]), &quantized());
    let rotations = 16 + 5 * CELL_BYTES + 8;
    assert_eq!(blob[rotations..rotations + 8], [64u32, 128].map(u32::to_le_bytes).concat());
    for at in [rotations, rotations + 4] {
        let mut other = blob.to_vec();
        other[at] ^= 64;
        assert!(matches!(chunk(&other.into(), &quantized(), 4..9), Err(BlobError::Shape(_))));
    }
}

/// The smallest possible blob, byte for byte as llama.cpp writes it.
#[test]
fn the_format_is_as_documented() {
    let sections = vec![rows_of(None, vec![shape(Dtype::F16, 1, Some(2))])];
    let layout = BlobForm::new(RopePairing::None, sections).unwrap();
    let chunk = Chunk {
        p0: 7,
        p1: 8,
        sections: vec![SectionRows {
            start: 7,
            layers: vec![LayerRows { k: Bytes::from_static(&[1, 2]), v: Bytes::from_static(&[3, 4, 5, 6]) }],
        }],
    };
    let words = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    let expected = [
        words(&[0xaf14_3cd8, 0, 1, 1]),
        words(&[7, 1, 0]),
        words(&[0, 1, 0, 0]),
        [&words(&[1, 2, 0])[..], &[1, 2]].concat(),
        [&words(&[1, 4, 0])[..], &[3, 4, 5, 6]].concat(),
    ];
    assert_eq!(blob(&chunk, &layout), expected.concat());
}

#[test]
fn a_blob_cut_anywhere_is_refused() {
    for (layout, starts) in forms() {
        let blob = blob(&filled(&layout, 4..9, &starts), &layout);
        for end in 0..blob.len() {
            assert!(chunk(&blob.slice(..end), &layout, 4..9).is_err(), "{end} of {} bytes", blob.len());
        }
        let longer = [&blob[..], &[0]].concat();
        assert!(chunk(&longer.into(), &layout, 4..9).is_err());
    }
}

#[test]
fn a_header_field_of_any_other_value_is_refused() {
    let layout = windowed();
    let blob = blob(&filled(&layout, 4..9, &[4, 9]), &layout);
    // Magic; the first section's n_stream and n_cells; a cell's position, n_sequences and sequence; v_transposed,
    // n_layers, n_rot_k, n_rot_v; type and row bytes, low and high, of the first K.
    let cells = 16;
    let meta = cells + 5 * CELL_BYTES;
    let tensor = meta + 16;
    for at in
        [0, 8, 12, cells, cells + 4, cells + 8, meta, meta + 4, meta + 8, meta + 12, tensor, tensor + 4, tensor + 8]
    {
        for value in [0u32, 1, 2, 5, 6, 0x7FFF_FFFF, 0x8000_0000, u32::MAX] {
            if blob[at..at + 4] == value.to_le_bytes() {
                continue;
            }
            let mut wrong = blob.to_vec();
            wrong[at..at + 4].copy_from_slice(&value.to_le_bytes());
            assert!(chunk(&wrong.into(), &layout, 4..9).is_err(), "{value:#x} at {at}");
        }
    }
}

#[test]
fn cells_in_another_order_become_rows_in_order() {
    let layout = latent();
    let expected = filled(&layout, 4..7, &[4]);
    let mut blob = blob(&expected, &layout).to_vec();
    // The cells of positions 4 and 6 change places, and so do their rows.
    let row_bytes = layout.layout().sections[0].layers[0].bytes();
    swap(&mut blob, 16, 16 + 2 * CELL_BYTES, CELL_BYTES);
    let first_rows = 16 + 3 * CELL_BYTES + 16 + TENSOR_HEADER_BYTES;
    for rows in [first_rows, first_rows + 3 * row_bytes + TENSOR_HEADER_BYTES] {
        swap(&mut blob, rows, rows + 2 * row_bytes, row_bytes);
    }
    assert_eq!(chunk(&blob.into(), &layout, 4..7).unwrap(), expected);
}

fn swap(bytes: &mut [u8], a: usize, b: usize, n_bytes: usize) {
    let (head, tail) = bytes.split_at_mut(b);
    head[a..a + n_bytes].swap_with_slice(&mut tail[..n_bytes]);
}

#[test]
fn other_positions_and_other_layouts_are_refused() {
    let layout = windowed();
    let blob = blob(&filled(&layout, 4..9, &[4, 7]), &layout);
    for positions in [4..8, 3..9, 5..9, 4..10] {
        assert!(chunk(&blob, &layout, positions.clone()).is_err(), "{positions:?}");
    }
    let full = |n_k| rows_of(None, vec![shape(Dtype::F16, 3, Some(2)), shape(Dtype::F16, n_k, Some(4))]);
    for sections in [vec![full(2), layout.sections()[1].clone()], vec![full(1)]] {
        let other = BlobForm::new(RopePairing::HalfSplit, sections).unwrap();
        assert!(chunk(&blob, &other, 4..9).is_err());
    }
    assert!(chunk(&blob, &latent(), 4..9).is_err());
    let mixed = vec![shape(Dtype::F16, 3, Some(2)), shape(Dtype::F16, 1, None)];
    assert!(BlobForm::new(RopePairing::None, vec![rows_of(None, mixed)]).is_err());
}

#[test]
fn a_placement_of_impossible_positions_is_refused() {
    let layout = windowed();
    let last = i32::MAX as u32;
    let cases = [
        (4..4, [4, 4]),
        (Range { start: 5, end: 4 }, [5, 5]),
        (last - 1..last + 1, [last - 1, last - 1]),
        (0..u32::MAX, [0, 0]),
        (4..9, [5, 5]),
        (4..9, [4, 3]),
        (4..9, [4, 10]),
    ];
    for (positions, starts) in cases {
        let refused = BlobPlacement::new(&layout, positions.clone(), &starts);
        assert!(matches!(refused, Err(BlobError::Positions(_))), "{positions:?} from {starts:?}");
    }
    assert!(BlobPlacement::new(&layout, 4..9, &[4]).is_err());
    assert!(BlobPlacement::new(&layout, last - 1..last, &[last - 1, last]).is_ok());
    let wide = vec![rows_of(None, vec![shape(Dtype::F16, u32::MAX, None)])];
    assert!(BlobForm::new(RopePairing::None, wide).is_err());
}

/// A chunk that a reader has received into `placement`, through the wire format.
fn received(chunk: &Chunk, form: &BlobForm, placement: impl Placement) -> VerifiedKv {
    let handoff = Handoff {
        id: HandoffId([0; 16]),
        fingerprint: Fingerprint { vocabulary: [0; 32], weights: [0; 32] },
        layout: KvLayout::clone(form.layout()),
        start: chunk.p0,
        tokens: (0..chunk.p1).collect(),
    };
    let offer = Offer { codecs: &[Codec::None], state_codecs: &[], macs: &[] };
    let mut reader = HandoffReader::with_placement(b"key", handoff.clone(), offer, placement).unwrap();
    // The rest of a used buffer is overwritten.
    reader.recycle(vec![0x5A; 4096]);
    let (mut writer, head) = HandoffWriter::begin(b"key", handoff, Codec::None, Mac::Blake3).unwrap();
    reader.read(&mut &head.concat()[..]).unwrap();
    match reader.read(&mut &writer.frame(chunk).unwrap().concat()[..]) {
        Ok(Some(HandoffRecord::Frame(kv))) => kv,
        other => panic!("{other:?}"),
    }
}

#[test]
fn rows_received_into_their_places_need_no_copy() {
    let layout = windowed();
    let expected = filled(&layout, 4..9, &[4, 7]);
    let placement = BlobPlacement::new(&layout, 4..9, &[4, 7]).unwrap();
    let places = placement.places();
    let kv = received(&expected, &layout, |_: &Span, _: &KvLayout| -> Places { places.clone() });
    let before = kv.buffer().as_ptr();
    let sealed = placement.seal(kv).unwrap();
    assert_eq!(sealed.bytes().as_ptr(), before);
    assert_eq!(sealed.bytes(), &blob(&expected, &layout)[..]);
}

#[test]
fn kv_of_other_places_positions_or_layouts_is_not_sealed() {
    let layout = windowed();
    let kv = received(&filled(&layout, 4..9, &[4, 7]), &layout, Contiguous);
    let latent = latent();
    for placement in [
        BlobPlacement::new(&layout, 4..9, &[4, 7]),
        BlobPlacement::new(&layout, 4..9, &[4, 6]),
        BlobPlacement::new(&layout, 5..9, &[5, 7]),
        BlobPlacement::new(&latent, 4..9, &[4]),
    ] {
        assert!(matches!(placement.unwrap().seal(kv.clone()), Err(BlobError::Shape(_))));
    }
}

#[test]
fn a_chunk_with_a_value_that_is_not_finite_becomes_no_blob() {
    let layout = latent();
    let chunk = filled(&layout, 4..9, &[4]);
    assert!(ImportBlob::build(&chunk, &layout).is_ok());
    for layer in 0..2 {
        let mut wrong = chunk.clone();
        let mut rows = wrong.sections[0].layers[layer].k.to_vec();
        // An exponent of all ones, in the last value.
        let end = rows.len();
        rows[end - 2..].copy_from_slice(&[0x80, 0x7F]);
        wrong.sections[0].layers[layer].k = rows.into();
        let refused = ImportBlob::build(&wrong, &layout).err();
        assert_eq!(refused, Some(BlobError::NotFinite { tensor: 2 * layer }));
    }
}

/// States of 7 tokens.
fn part() -> StatePart {
    let tensor = |from: u8, n: u8| (from..from + 4 * n).collect::<Vec<u8>>().into();
    StatePart { position: 7, first: 0, tensors: vec![tensor(0, 3), tensor(60, 5), tensor(30, 3)] }
}

/// What llama.cpp writes beside the rows of all positions: windowed rows, then states.
fn beside_rows(form: &BlobForm, part: &StatePart, start: u32) -> Bytes {
    let starts = vec![start; form.layout().sections.len()];
    let windowed = ImportBlob::build(&filled(form, 4..9, &starts), form).unwrap().windowed();
    let before = windowed.len().saturating_sub(form.states().unwrap().n_bytes(false)).max(HEADER_BYTES);
    let states = ImportState::build(part, form.layout()).unwrap();
    states.blob(form, states.position(), &windowed[HEADER_BYTES..before], vec![9; 5]).unwrap().bytes().to_vec().into()
}

/// States byte for byte as llama.cpp writes them.
#[test]
fn the_format_of_states_is_as_documented() {
    let form = recurrent();
    let words = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    let part = part();
    let expected = [
        words(&[0xaf14_3cd8, 0, 1, 6, 0, 0, 3]),
        [words(&[0, 12, 0]), part.tensors[0].to_vec()].concat(),
        [words(&[0, 12, 0]), part.tensors[2].to_vec()].concat(),
        [words(&[0, 20, 0]), part.tensors[1].to_vec()].concat(),
        words(&[0, 0, 0]),
    ];
    assert_eq!(beside_rows(&form, &part, 4), expected.concat());
    let without = [words(&[0xaf14_3cd8, 0, 0, 0, 3]), words(&[0, 12, 0, 0, 12, 0, 0, 20, 0, 0, 0, 0])];
    assert_eq!(blob(&filled(&form, 4..9, &[]), &form), without.concat());
}

#[test]
fn tokens_of_an_image_share_a_position_and_keep_their_order() {
    let form = hybrid();
    let shared = SharedTokens { tokens: 1..7, n_positions: 3 };
    let run = Image::new(&b"a"[..], "f").placeholders(&ImageShape { n_tokens: 8, shared: Some(shared) });
    // Its six tokens are 5 to 10; the text after them begins at position 8.
    let positions = TokenPositions::of_tokens(&[&[1; 4][..], &run, &[2; 3]].concat());
    let all = filled(&form, 2..15, &[2, 2]);
    let blob: Bytes = ImportBlob::build_among(&all, &form, positions.clone(), vec![7; 9]).unwrap().into_buffer().into();
    let cell = |position: u32, x: u32| [position, 1, x, position, 0, 0].map(u32::to_le_bytes).concat();
    let cells = [cell(4, 4), cell(5, 5), cell(5, 6), cell(5, 7), cell(5, 8), cell(5, 9), cell(5, 10), cell(8, 8)];
    assert_eq!(blob[16 + 2 * 24..16 + 10 * 24], cells.concat());
    assert_eq!(super::chunk(&blob, &form, 2..15, &positions).unwrap(), all);
    assert!(chunk(&blob, &form, 2..15).is_err(), "it is no text");
    // What llama.cpp lends for a piece of an image holds all of it.
    let whole = filled(&form, 5..11, &[5, 5]);
    let blob: Bytes =
        ImportBlob::build_among(&whole, &form, positions.clone(), vec![7; 1 << 20]).unwrap().into_buffer().into();
    let piece = super::chunk(&blob, &form, 7..9, &positions).unwrap();
    for (piece, whole) in piece.tensors().zip(whole.tensors()) {
        let row = whole.len() / 6;
        assert_eq!(piece, &whole[2 * row..4 * row]);
    }
    assert!(super::chunk(&blob, &form, 7..12, &positions).is_err(), "a token is missing");
}

#[test]
fn a_position_on_several_axes_has_the_same_on_each() {
    let form = hybrid();
    let filled = filled(&form, 4..9, &[4, 4]);
    let blob = blob(&filled, &form);
    let words = |position: u32| [position, 1, position, position, 0, 0].map(u32::to_le_bytes).concat();
    assert_eq!(blob[16..64], [words(4), words(5)].concat());
    // The last cell's token is whatever it was; its axes are those of text.
    for (word, is_taken) in [(2, false), (3, false), (4, true)] {
        let mut other = blob.to_vec();
        other[16 + 4 * 24 + 4 * word] ^= 1;
        assert_eq!(chunk(&other.into(), &form, 4..9).is_ok(), is_taken, "word {word}");
    }
}

#[test]
fn states_that_were_written_are_read_again() {
    for (form, window) in [(hybrid(), None), (recurrent(), None), (windowed_hybrid(), Some(6..9))] {
        let start = if window.is_some() { 6 } else { 4 };
        let read = partial(&beside_rows(&form, &part(), start), &form).unwrap();
        assert_eq!((read.states, read.window), (Some(part()), window));
    }
    // A windowed section without rows, and no states.
    let form = windowed_hybrid();
    let read =
        partial(&ImportBlob::build(&filled(&form, 4..9, &[9]), &form).unwrap().windowed().into(), &form).unwrap();
    assert_eq!((read.states, read.window, read.before_states.len()), (None, None, 8));
}

#[test]
fn states_cut_prolonged_or_of_other_numbers_are_refused() {
    for form in [hybrid(), recurrent(), windowed_hybrid()] {
        let blob = beside_rows(&form, &part(), if form == windowed_hybrid() { 6 } else { 4 });
        for end in 0..blob.len() {
            assert!(partial(&blob.slice(..end), &form).is_err(), "{end} of {} bytes", blob.len());
        }
        assert!(partial(&[&blob[..], &[0]].concat().into(), &form).is_err());
        // Cells, position, sequences, s_transposed, layers; type and row bytes of the first convolution.
        let at = blob.len() - form.states().unwrap().n_bytes(true);
        for (word, values) in
            [(0, &[0, 2, u32::MAX][..]), (1, &[u32::MAX, 1 << 31]), (2, &[1]), (3, &[1]), (4, &[2, 4])]
                .into_iter()
                .chain([(5, &[1, 30][..]), (6, &[8, 16]), (7, &[1])])
        {
            for value in values {
                let mut wrong = blob.to_vec();
                wrong[at + 4 * word..][..4].copy_from_slice(&value.to_le_bytes());
                assert!(partial(&wrong.into(), &form).is_err(), "{value} for word {word}");
            }
        }
    }
}

#[test]
fn only_all_states_with_finite_values_become_a_blob() {
    let form = hybrid();
    let refused = |change: fn(&mut StatePart)| {
        let mut part = part();
        change(&mut part);
        ImportState::build(&part, form.layout()).err()
    };
    assert!(matches!(refused(|part| drop(part.tensors.pop())), Some(BlobError::Shape(_))));
    assert!(matches!(refused(|part| part.first = 1), Some(BlobError::Chunk(_))));
    assert!(matches!(refused(|part| part.tensors[2] = Bytes::new()), Some(BlobError::Chunk(_))));
    assert!(matches!(refused(|part| part.tensors.push(Bytes::new())), Some(BlobError::Chunk(_))));
    assert!(matches!(refused(|part| part.position = 0), Some(BlobError::Positions(_))));
    assert!(matches!(refused(|part| part.position = 1 << 31), Some(BlobError::Positions(_))));
    let nan = refused(|part| part.tensors[1] = [&[0; 16][..], &f32::NAN.to_le_bytes()].concat().into());
    assert_eq!(nan, Some(BlobError::NotFinite { tensor: 1 }));
    assert_eq!(refused(|_| {}), None);
}
