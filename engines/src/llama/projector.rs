//! The projector (mmproj), which turns images into embeddings that the model reads in place of tokens.
//!
//! Its weights are in a separate file, which llama.cpp's mtmd runs. An image is prepared (its file decoded, its pixels
//! scaled and normalised) when the prompt is rendered, which needs its number of tokens. The sequence then takes the
//! prepared image, or has it prepared again on the projector's thread if another node rendered the prompt. One prompt's
//! images or one sequence's image are prepared at a time. The scheduler calls
//! [`Projector::decode_image`], which encodes a prepared image and decodes its embeddings. In a prompt, an image is a run
//! of placeholders ([`baton_schemas::image`]), which includes the text that the projector puts around the embeddings.
//! Such a run is always complete.

use std::collections::VecDeque;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError, Weak};

use baton_model::gguf::Gguf;
use baton_schemas::image::{self, Image, ImageShape, MAX_IMAGES, MIN_PLACEHOLDERS, PromptImages, SharedTokens};
use baton_schemas::{EngineError, SequenceRequest};
use futures::FutureExt;
use futures::future::BoxFuture;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::mtmd::{
    MtmdBitmap, MtmdContext, MtmdContextParams, MtmdEvalError, MtmdInputChunkType, MtmdInputChunks, MtmdInputText,
    mtmd_default_marker,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::devices;
use super::load::threads;
use super::pixels::Pixels;
use crate::engine_options::EngineOptions;
use crate::serving::LoadError;
use crate::serving::images::{ImageEncoder, ImageFailure, ImageRun, Preparation};

/// llama.cpp's code for no free cells. It also stands for a failure of the projector.
const NO_CELLS: i32 = 1;

/// KiB of image files that all sequences may hold together: those of at least 21 requests.
const MAX_KIB: usize = 256 << 10;

/// Memory for prepared images that no sequence has taken yet: several large images, or a conversation's small ones.
const MAX_KEPT_BYTES: usize = 128 << 20;

/// The most memory that a prepared image takes for each of its tokens: SmolVLM makes one of 64×64 pixels with three
/// 32-bit channels, other projectors fewer.
const BYTES_PER_TOKEN: usize = 64 * 64 * 3 * 4;

/// An image whose file is decoded, in mtmd's form, with the text that the projector puts around it.
pub(super) type PreparedImage = Arc<MtmdInputChunks>;

/// The place of an image's embeddings.
#[derive(Debug, Clone, Copy)]
pub(super) struct ImagePlace {
    /// llama.cpp's sequence.
    pub(super) seq: i32,
    /// The position of its first token.
    pub(super) position: u32,
}

/// Images that wait for the projector's thread. Further sequences ask again in the scheduler's next turn.
const MAX_QUEUED: usize = 16;

/// An image of a sequence, prepared or about to be. After it is dropped, it takes no place in the queue.
pub(crate) struct ImagePreparation {
    image: ImageRun,
    outcome: OnceLock<Result<PreparedImage, EngineError>>,
}

impl ImagePreparation {
    /// The prepared image, or why there is none, once one of them is known.
    pub(super) fn prepared(&self) -> Option<&Result<PreparedImage, EngineError>> {
        self.outcome.get()
    }

    fn prepare(&self, chunks: impl FnOnce(&Image) -> Result<MtmdInputChunks, EngineError>) {
        // Without an outcome, the sequence would wait for ever.
        let prepared = catch_unwind(AssertUnwindSafe(|| chunks(&self.image.image)));
        let panicked = || Err(EngineError::internal("preparing an image panicked"));
        let _ = self.outcome.set(prepared.unwrap_or_else(|_| panicked()).map(Arc::new));
    }
}

impl Preparation for ImagePreparation {
    fn start(&self) -> usize {
        self.image.at.start
    }

    fn outcome(&self) -> Option<Result<(), EngineError>> {
        Some(self.outcome.get()?.as_ref().map(|_| ()).map_err(EngineError::clone))
    }
}

/// The images that were prepared last, with the marks that name them; the oldest goes first.
#[derive(Default)]
struct KeptImages {
    images: VecDeque<(String, PreparedImage)>,
}

impl KeptImages {
    /// A sequence takes its image, so that the next caller with the same image cannot tell by the time that it was here.
    fn take(&mut self, mark: &str) -> Option<PreparedImage> {
        let idx = self.images.iter().position(|(kept, _)| kept == mark)?;
        self.images.remove(idx).map(|(_, image)| image)
    }

    fn put(&mut self, mark: String, image: PreparedImage) {
        drop(self.take(&mark));
        self.images.push_back((mark, image));
        let n_bytes = |images: &VecDeque<(String, PreparedImage)>| {
            images.iter().map(|(_, image)| image.total_tokens().saturating_mul(BYTES_PER_TOKEN)).sum::<usize>()
        };
        while n_bytes(&self.images) > MAX_KEPT_BYTES {
            self.images.pop_front();
        }
    }
}

/// A loaded projector. It encodes one image at a time.
pub(crate) struct Projector {
    // Dropped before the model, whose vocabulary it reads.
    context: Mutex<MtmdContext>,
    _model: Arc<LlamaModel>,
    id: String,
    /// An image's tokens attend to later ones, too, so that all must be in one physical batch.
    in_one_batch: bool,
    /// The tokens of an image share a position (M-RoPE).
    shares_positions: bool,
    n_ubatch: usize,
    /// Permits preparing one prompt's or one sequence's images at a time: decoding one may take hundreds of megabytes.
    preparing: Arc<Semaphore>,
    kept: Mutex<KeptImages>,
    /// Images for the projector's thread. Those of sequences that have ended are dropped.
    queued: Mutex<VecDeque<Weak<ImagePreparation>>>,
    /// Wakes the projector's thread.
    wake: SyncSender<()>,
    /// KiB of image files that further sequences may hold.
    room: Arc<Semaphore>,
}

impl Projector {
    /// Loads the configured projector, if there is one. Errors: the file is not a projector, belongs to another model,
    /// or is of a kind that this engine cannot run.
    pub(crate) fn load(options: &EngineOptions, model: &Arc<LlamaModel>) -> Result<Option<Arc<Projector>>, LoadError> {
        let Some(path) = &options.projector else { return Ok(None) };
        let refused = |why: &str| LoadError::Projector { path: path.clone(), why: why.to_owned() };
        let gguf = Gguf::open_projector(path)?;
        let params = MtmdContextParams {
            use_gpu: options.device.as_deref() != Some(devices::CPU) && options.n_gpu_layers != Some(0),
            print_timings: false,
            n_threads: i32::try_from(threads(options)).unwrap_or(i32::MAX),
            media_marker: marker()?,
            ..MtmdContextParams::default()
        };
        let name = path.to_str().ok_or_else(|| refused("its path is not UTF-8"))?;
        let context = MtmdContext::init_from_file(name, model, &params).map_err(|_| {
            refused("llama.cpp does not take it: it is the projector of another model, or of a kind it does not know")
        })?;
        if !context.support_vision() {
            return Err(refused("it sees no images"));
        }
        let id = gguf.weights_hash()?.to_hex().to_string();
        let in_one_batch = context.decode_use_non_causal();
        let shares_positions = context.decode_use_mrope();
        let (wake, woken) = sync_channel(1);
        let projector = Arc::new(Projector {
            context: Mutex::new(context),
            _model: Arc::clone(model),
            id,
            in_one_batch,
            shares_positions,
            n_ubatch: options.ubatch() as usize,
            preparing: Arc::new(Semaphore::new(1)),
            kept: Mutex::default(),
            queued: Mutex::default(),
            wake,
            room: Arc::new(Semaphore::new(MAX_KIB)),
        });
        let weak = Arc::downgrade(&projector);
        let thread = std::thread::Builder::new().name("image".into()).spawn(move || prepare_queued(&weak, &woken));
        thread.map_err(|e| LoadError::Config(format!("the projector's thread cannot start: {e}")))?;
        Ok(Some(projector))
    }

    /// Takes an image of a sequence from those that are kept, or queues it for the projector's thread. `None`: the queue
    /// is full, or that thread has ended.
    pub(super) fn prepare(&self, run: &ImageRun) -> Option<Arc<ImagePreparation>> {
        let preparation = Arc::new(ImagePreparation { image: run.clone(), outcome: OnceLock::new() });
        match lock(&self.kept).take(&run.image.mark()) {
            Some(kept) => drop(preparation.outcome.set(Ok(kept))),
            None => self.queue(&preparation)?,
        }
        Some(preparation)
    }

    fn queue(&self, preparation: &Arc<ImagePreparation>) -> Option<()> {
        if self.n_queued() == MAX_QUEUED {
            return None;
        }
        lock(&self.queued).push_back(Arc::downgrade(preparation));
        match self.wake.try_send(()) {
            Ok(()) | Err(TrySendError::Full(())) => Some(()),
            Err(TrySendError::Disconnected(())) => None,
        }
    }

    /// The number of queued images whose sequences wait for them.
    fn n_queued(&self) -> usize {
        let mut queued = lock(&self.queued);
        queued.retain(|preparation| preparation.strong_count() > 0);
        queued.len()
    }

    /// Takes the image that was queued first from the queue.
    fn next_queued(&self) -> Option<Arc<ImagePreparation>> {
        let mut queued = lock(&self.queued);
        std::iter::from_fn(|| queued.pop_front()).find_map(|preparation| preparation.upgrade())
    }

    /// Returns true if the tokens of an image share a position (M-RoPE).
    pub(super) fn shares_positions(&self) -> bool {
        self.shares_positions
    }

    /// Returns true if the projector is at work on an image, so that another one cannot be decoded now.
    pub(super) fn is_busy(&self) -> bool {
        matches!(self.context.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Encodes a prepared image and decodes its embeddings into the cache at a place. Blocking: up to seconds without a GPU. It
    /// does not wait for an image that is being prepared.
    pub(super) fn decode_image(
        &self,
        run: &ImageRun,
        chunks: &PreparedImage,
        context: &mut LlamaContext<'_>,
        place: ImagePlace,
    ) -> Result<(), ImageFailure> {
        if self.shape_of(chunks).map_err(ImageFailure::Failed)? != run.shape {
            return Err(ImageFailure::Failed(EngineError::invalid("the prompt was rendered with another projector")));
        }
        let position = i32::try_from(place.position).map_err(|e| ImageFailure::Failed(EngineError::internal(e)))?;
        let n_batch = i32::try_from(self.n_ubatch).unwrap_or(i32::MAX);
        let mut projector = match self.context.try_lock() {
            Ok(projector) => projector,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(ImageFailure::Busy),
        };
        let decoded = chunks.eval_chunks(&mut projector, context, position, place.seq, n_batch, false);
        decoded.map(|_| ()).map_err(|MtmdEvalError::EvalFailure(code)| match code {
            NO_CELLS => ImageFailure::NoCells,
            code => {
                ImageFailure::Failed(EngineError::internal(format!("llama.cpp could not see an image (code {code})")))
            }
        })
    }

    /// An image in mtmd's form, with the text that the projector puts around it.
    pub(super) fn chunks(&self, image: &Image) -> Result<MtmdInputChunks, EngineError> {
        let pixels = Pixels::decode(image)?;
        let bitmap = MtmdBitmap::from_image_data(pixels.width, pixels.height, &pixels.rgb);
        let bitmap = bitmap.map_err(EngineError::internal)?;
        let text = MtmdInputText { text: mtmd_default_marker().to_owned(), add_special: false, parse_special: true };
        let chunks = self.lock().tokenize(text, &[&bitmap]).map_err(|error| {
            EngineError::invalid_field(image.field(), format_args!("the projector does not take the image ({error})"))
        })?;
        self.shape_of(&chunks)?;
        let is_image = |i: &usize| chunks.get(*i).is_some_and(|c| c.chunk_type() == MtmdInputChunkType::Image);
        let sizes = (0..chunks.len()).filter(is_image).filter_map(|i| Some(chunks.get(i)?.n_tokens()));
        let largest = sizes.max().unwrap_or(0);
        // llama.cpp aborts the process on a larger image.
        if self.in_one_batch && largest > self.n_ubatch {
            let ubatch = self.n_ubatch;
            let message = format!("an image of this model takes {largest} tokens at once, and --ubatch is {ubatch}");
            return Err(EngineError::invalid_field(image.field(), message));
        }
        Ok(chunks)
    }

    /// The shape of a prepared image. Errors: Baton does not know it.
    fn shape_of(&self, chunks: &MtmdInputChunks) -> Result<ImageShape, EngineError> {
        let (n_tokens, n_positions) = (chunks.total_tokens(), usize::try_from(chunks.total_positions()).unwrap_or(0));
        let unknown = || {
            let pieces = format!("{n_tokens} tokens and {n_positions} positions in {} pieces", chunks.len());
            EngineError::internal(format!("an image has {pieces}"))
        };
        if n_tokens < MIN_PLACEHOLDERS || n_tokens < n_positions {
            return Err(unknown());
        }
        if !self.shares_positions {
            return if n_tokens == n_positions { Ok(ImageShape::plain(n_tokens)) } else { Err(unknown()) };
        }
        let mut start = 0;
        let mut shared = None;
        for chunk in (0..chunks.len()).filter_map(|i| chunks.get(i)) {
            let end = start + chunk.n_tokens();
            if chunk.chunk_type() == MtmdInputChunkType::Image {
                let n_positions = usize::try_from(chunk.n_positions()).unwrap_or(0);
                let before = shared.replace(SharedTokens { tokens: start..end, n_positions });
                if before.is_some() {
                    return Err(unknown());
                }
            }
            start = end;
        }
        // The last token is one of text: its position shows llama.cpp where the sequence ends.
        let shared = shared.filter(|shared| {
            let SharedTokens { tokens, n_positions: of_image } = shared;
            let n_apart = n_tokens - tokens.len();
            tokens.end < n_tokens && (1..=tokens.len()).contains(of_image) && n_apart + of_image == n_positions
        });
        Ok(ImageShape { n_tokens, shared: Some(shared.ok_or_else(unknown)?) })
    }

    /// Waits until the projector is not at work. Until the guard is dropped, no image is scaled or decoded.
    pub(crate) fn lock(&self) -> MutexGuard<'_, MtmdContext> {
        lock(&self.context)
    }
}

impl ImageEncoder for Projector {
    fn id(&self) -> &str {
        &self.id
    }

    fn turn(&self) -> BoxFuture<'_, Option<OwnedSemaphorePermit>> {
        Arc::clone(&self.preparing).acquire_owned().map(Result::ok).boxed()
    }

    fn shape(&self, image: &Image) -> Result<ImageShape, EngineError> {
        let prepared = self.chunks(image)?;
        let shape = self.shape_of(&prepared)?;
        lock(&self.kept).put(image.mark(), Arc::new(prepared));
        Ok(shape)
    }

    fn room(&self, images: &[ImageRun]) -> Option<OwnedSemaphorePermit> {
        let n_bytes: usize = images.iter().map(|run| run.image.bytes().len()).sum();
        let n_kib = u32::try_from(n_bytes.div_ceil(1024)).ok()?;
        Arc::clone(&self.room).try_acquire_many_owned(n_kib).ok()
    }

    fn find(&self, request: &SequenceRequest) -> Result<Vec<ImageRun>, EngineError> {
        find(&request.prompt, request.images.as_ref(), &self.id)
    }
}

/// Prepares the images of sequences, one after the other, until the projector is dropped.
fn prepare_queued(projector: &Weak<Projector>, woken: &Receiver<()>) {
    for () in woken {
        let Some(projector) = projector.upgrade() else { return };
        while projector.n_queued() > 0 {
            let _turn = futures::executor::block_on(projector.turn());
            // All their sequences may have ended meanwhile.
            if let Some(preparation) = projector.next_queued() {
                preparation.prepare(|image| projector.chunks(image));
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn marker() -> Result<CString, LoadError> {
    CString::new(mtmd_default_marker()).map_err(|e| LoadError::Backend(e.to_string()))
}

/// Matches the placeholders of a prompt with their images.
fn find(prompt: &[u32], images: Option<&PromptImages>, projector: &str) -> Result<Vec<ImageRun>, EngineError> {
    let Some(PromptImages { projector: theirs, images }) = images else { return Ok(Vec::new()) };
    if theirs != projector {
        return Err(EngineError::invalid("the prompt was rendered with another projector"));
    }
    if images.len() > MAX_IMAGES {
        return Err(EngineError::invalid(format!("a prompt may have {MAX_IMAGES} images, not {}", images.len())));
    }
    // The logits after the prompt's last token start the reply, and an image has none.
    if prompt.last().is_some_and(|t| image::is_placeholder(*t)) {
        return Err(EngineError::invalid("the prompt ends with an image: the chat template writes nothing behind it"));
    }
    let runs = image::runs(prompt).into_iter().map(|at| {
        let shape = ImageShape::of(&prompt[at.clone()]);
        let is_it = |image: &&Image| image.placeholders(&shape) == prompt[at.clone()];
        let image = images.iter().find(is_it).filter(|_| at.len() >= MIN_PLACEHOLDERS);
        let image = image.ok_or_else(|| EngineError::invalid("the prompt has placeholders of no image"))?.clone();
        Ok(ImageRun { at, shape, image })
    });
    runs.collect()
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::time::{Duration, Instant};

    use super::super::placed::Placed;
    use super::*;

    #[test]
    fn images_of_sequences_that_ended_take_no_place_in_the_queue() {
        let folder = tempfile::tempdir().unwrap();
        let [model, projector] = ["llama.gguf", "mmproj.gguf"].map(|name| folder.path().join(name));
        tiny_gguf::write(&model, tiny_gguf::Architecture::Llama, 1);
        tiny_gguf::projector::write(&projector, tiny_gguf::projector::TinyProjector::Mlp, 64, 1);
        let options = EngineOptions { projector: Some(projector), ..EngineOptions::of(&model) };
        let gguf = Gguf::open(&model).unwrap();
        let model = Arc::new(super::super::load::model(&options, &gguf, &Placed::alone()).unwrap());
        let projector = Projector::load(&options, &model).unwrap().unwrap();
        // The projector's thread waits for its turn.
        let turn = futures::executor::block_on(projector.turn());
        let run = || ImageRun { at: 3..9, shape: ImageShape::plain(6), image: image("a") };
        let prepare = || projector.prepare(&run());
        let ended: Vec<_> = (0..MAX_QUEUED).map(|_| prepare().unwrap()).collect();
        assert!(prepare().is_none(), "the queue is full");
        drop(ended);
        let live = prepare().expect("those that ended have left the queue");
        drop(turn);
        let deadline = Instant::now() + Duration::from_secs(60);
        while live.outcome().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(live.outcome().is_some(), "the thread goes on");
    }

    fn image(name: &'static str) -> Image {
        Image::new(name.as_bytes(), name)
    }

    fn found(prompt: &[u32], images: &[Image]) -> Result<Vec<(Range<usize>, String)>, String> {
        let images = PromptImages { projector: "p".into(), images: images.to_vec() };
        let runs = find(prompt, Some(&images), "p").map_err(|error| error.to_string())?;
        Ok(runs.into_iter().map(|run| (run.at, run.image.field().to_owned())).collect())
    }

    #[test]
    fn a_panic_while_an_image_is_prepared_is_its_outcome() {
        let image = ImageRun { at: 3..9, shape: ImageShape::plain(6), image: image("a") };
        let preparation = ImagePreparation { image, outcome: OnceLock::new() };
        preparation.prepare(|_| panic!("the image is odd"));
        assert!(matches!(preparation.outcome(), Some(Err(EngineError::Internal { .. }))));
    }

    #[test]
    fn placeholders_find_their_images() {
        let a = image("a");
        let b = image("b");
        let plain = ImageShape::plain;
        let prompt = [&[1][..], &b.placeholders(&plain(8)), &a.placeholders(&plain(9)), &[2]].concat();
        let expected = vec![(1..9, "b".to_owned()), (9..18, "a".to_owned())];
        assert_eq!(found(&prompt, &[a.clone(), b.clone()]), Ok(expected));
        assert_eq!(found(&[1, 2], std::slice::from_ref(&a)), Ok(Vec::new()));
        assert_eq!(find(&prompt, None, "p"), Ok(Vec::new()));
    }

    #[test]
    fn placeholders_without_an_image_are_refused() {
        let a = image("a");
        let refused = |prompt: &[u32], part: &str| {
            let error = found(prompt, std::slice::from_ref(&a)).unwrap_err();
            assert!(error.contains(part), "{error}");
        };
        let plain = ImageShape::plain;
        let run = a.placeholders(&plain(8));
        refused(&[&run[..], &image("b").placeholders(&plain(8)), &[1]].concat(), "of no image");
        refused(&[&run[..4], &[1]].concat(), "of no image");
        refused(&[&run[1..], &[1]].concat(), "of no image");
        refused(&[&a.placeholders(&plain(4))[..], &[1]].concat(), "of no image");
        refused(&run, "ends with an image");
        let theirs = PromptImages { projector: "q".into(), images: vec![a.clone()] };
        assert!(find(&[1], Some(&theirs), "p").is_err());
        let many = PromptImages { projector: "p".into(), images: vec![a.clone(); MAX_IMAGES + 1] };
        assert!(find(&[1], Some(&many), "p").is_err());
    }
}
