//! Replies about images with guesses: what was wrong is taken back behind tokens that share a position.

use std::io::Cursor;
use std::sync::Arc;

use baton_model::options::Speculation;
use baton_schemas::SequenceRequest;
use baton_schemas::image::{Image, PromptImages};
use tiny_gguf::Architecture;
use tiny_gguf::projector::{self, TinyProjector};

use super::rounding::Rounding;
use super::speculation::{N_CELLS, predicted, replies, requests};
use super::{loaded, scheduler_of};
use crate::engine_options::EngineOptions;
use crate::llama::projector::Projector;
use crate::serving::images::ImageEncoder;
use crate::serving::scheduler::Speculating;

/// A row for each patch; one position for all rows of an image; the same with states.
const MODELS: [(Architecture, TinyProjector); 3] = [
    (Architecture::Llama, TinyProjector::Mlp),
    (Architecture::Qwen2Vl, TinyProjector::Qwen2Vl),
    (Architecture::Qwen35, TinyProjector::Qwen35),
];

const N_PROMPTS: u32 = 8;

#[test]
fn replies_about_an_image_are_the_same_with_speculation() {
    for (architecture, kind) in MODELS {
        let folder = tempfile::tempdir().unwrap();
        let [file, eyes] = ["tiny.gguf", "mmproj.gguf"].map(|name| folder.path().join(name));
        tiny_gguf::write(&file, architecture, 1);
        projector::write(&eyes, kind, 64, 1);
        let (model, options) = loaded(&file);
        let speculation = Some(Speculation::Auto);
        let options = EngineOptions { projector: Some(eyes), n_ubatch: Some(64), speculation, ..options };
        let projector = Projector::load(&options, &model).unwrap().unwrap();
        let scheduler = |n_draft: Option<usize>| {
            let mut scheduler = scheduler_of(&model, options.clone(), N_CELLS);
            scheduler.context = scheduler.context.with_projector(Some(Arc::clone(&projector)));
            scheduler.with_speculation(n_draft.map(Speculating::fixed))
        };
        let mut bytes = Cursor::new(Vec::new());
        let picture = image::RgbImage::from_fn(64, 48, |x, y| image::Rgb([(x * 3) as u8, (y * 4) as u8, 77]));
        picture.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
        let image = Image::new(bytes.into_inner(), "image");
        let placeholders = image.placeholders(&projector.shape(&image).unwrap());
        let about = |request: SequenceRequest| {
            let prompt = [&request.prompt[..10], &placeholders, &request.prompt[10..]].concat();
            let images = Some(PromptImages { projector: projector.id().to_owned(), images: vec![image.clone()] });
            SequenceRequest { prompt, images, ..request }
        };
        let asked: Vec<SequenceRequest> = requests(N_PROMPTS).into_iter().map(about).collect();
        for n_together in [1, 2] {
            let (without, _) = replies(&mut scheduler(None), &asked, n_together);
            let (with, drafts) = replies(&mut scheduler(Some(3)), &predicted(&asked, &without), n_together);
            let mut rounding = Rounding { drafts, ..Rounding::default() };
            for (prompt, request) in asked.iter().enumerate() {
                rounding.compare((prompt, request), [&without[prompt], &with[prompt]], 3);
            }
            println!("{architecture:?}, {n_together} together: {rounding:?}");
            rounding.check(N_PROMPTS as usize);
            let counts = drafts.prediction;
            assert!(counts.n > counts.n_accepted && counts.n_accepted > 20, "{architecture:?}: {counts:?}");
        }
    }
}
