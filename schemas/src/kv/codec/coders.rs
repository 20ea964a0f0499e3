//! Several cores for one frame: each codes some of its tensors.

use std::sync::LazyLock;
use std::thread::available_parallelism;

use rayon::iter::ParallelIterator as _;
use rayon::iter::{IndexedParallelIterator as _, IntoParallelIterator as _, IntoParallelRefMutIterator as _};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// The most coders of a stream, so that a large machine has cores left for other work.
const MAX_CODERS: usize = 8;

/// Plain bytes of a frame from which several cores save more time than it takes to wake them.
const ENOUGH_BYTES: usize = 1 << 20;

/// The threads of all streams. `None`: the system starts none, so each stream codes on its own thread.
static POOL: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    let pool = ThreadPoolBuilder::new().num_threads(*N_CORES).thread_name(|n| format!("kv-codec-{n}"));
    pool.build().ok()
});

/// The cores that streams use. Linux reads files to tell them, so they are asked for once.
static N_CORES: LazyLock<usize> = LazyLock::new(|| available_parallelism().map_or(1, usize::from).min(MAX_CODERS));

/// The encoders or decoders of a stream, one for each core.
pub(in crate::kv) struct Coders<C>(Vec<C>);

impl<C: Send> Coders<C> {
    /// Makes as many as there are cores and tensors, and at least one. `None`: `make` makes none.
    pub(in crate::kv) fn new<E>(
        n_tensors: usize,
        make: impl Fn() -> Result<Option<C>, E>,
    ) -> Result<Option<Coders<C>>, E> {
        Coders::of((*N_CORES).min(n_tensors).max(1), make)
    }

    /// Makes `n`, at least one.
    pub(super) fn of<E>(n: usize, make: impl Fn() -> Result<Option<C>, E>) -> Result<Option<Coders<C>>, E> {
        let coders = (0..n).map(|_| make()).collect::<Result<Vec<_>, _>>()?;
        Ok(coders.into_iter().collect::<Option<_>>().map(Coders))
    }

    /// The coder of a tensor. Neighbours have different coders, and so have the tensors that are `n` apart: K and V
    /// alternate, and one of them may take longer.
    fn of_tensor(&self, index: usize) -> usize {
        let n = self.0.len();
        (index + index / n) % n
    }

    /// Calls `code` for all tensors of a frame of `n_bytes`, and returns the results in their order, or the first error.
    /// A tensor always has the same coder, because codecs remember the rows before.
    pub(in crate::kv) fn for_all<T: Send, R: Send, E: Send>(
        &mut self,
        tensors: impl IntoIterator<Item = T>,
        n_bytes: usize,
        code: impl Fn(&mut C, T) -> Result<R, E> + Sync,
    ) -> Result<Vec<R>, E> {
        let tensors = tensors.into_iter().enumerate();
        let is_shared = self.0.len() > 1 && n_bytes >= ENOUGH_BYTES;
        let Some(pool) = POOL.as_ref().filter(|_| is_shared) else {
            return tensors
                .map(|(index, tensor)| {
                    let coder = self.of_tensor(index);
                    code(&mut self.0[coder], tensor)
                })
                .collect();
        };
        let mut shares: Vec<Vec<T>> = self.0.iter().map(|_| Vec::new()).collect();
        let mut n_tensors = 0;
        for (index, tensor) in tensors {
            shares[self.of_tensor(index)].push(tensor);
            n_tensors = index + 1;
        }
        let coded =
            self.0.par_iter_mut().zip(shares.into_par_iter()).map(|(coder, share)| {
                share.into_iter().map(|tensor| code(coder, tensor)).collect::<Vec<_>>().into_iter()
            });
        let mut coded: Vec<_> = pool.install(|| coded.collect());
        (0..n_tensors).filter_map(|index| coded[self.of_tensor(index)].next()).collect()
    }
}

/// Calls `code` for tensors of `n_bytes` that do not depend on those before, as [`Coders::for_all`] does.
pub(super) fn for_each<T: Send, R: Send, E: Send>(
    tensors: impl IntoIterator<Item = T>,
    n_bytes: usize,
    code: impl Fn(T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    Coders(vec![(); *N_CORES]).for_all(tensors, n_bytes, |(), tensor| code(tensor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_order_of_the_tensors_and_a_tensor_keeps_its_coder() {
        for n_bytes in [0, ENOUGH_BYTES] {
            let mut coders = Coders(vec!['a', 'b', 'c']);
            let mut frame = || coders.for_all(0..7, n_bytes, |coder, tensor| Ok::<_, ()>((tensor, *coder)));
            let first = frame().unwrap();
            assert_eq!(first.iter().map(|(tensor, _)| *tensor).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6]);
            assert_eq!(frame().unwrap(), first);
        }
    }

    #[test]
    fn no_coder_has_all_k_or_all_v() {
        for n in 1..=MAX_CODERS {
            let coders = Coders(vec![(); n]);
            let mut counts = vec![[0; 2]; n];
            for index in 0..2 * n * n {
                counts[coders.of_tensor(index)][index % 2] += 1;
            }
            assert_eq!(counts, vec![[n, n]; n]);
        }
    }

    #[test]
    fn the_first_error_of_a_frame_is_returned() {
        let mut coders = Coders(vec![(), (), ()]);
        let coded =
            coders.for_all(0..20, ENOUGH_BYTES, |(), tensor| if tensor % 5 == 4 { Err(tensor) } else { Ok(()) });
        assert_eq!(coded, Err(4));
    }
}
