//! How llama.cpp divides a model's layers among devices, to say who computes how many.

/// The number of layers of each device, by the shares of the devices in llama.cpp's order. `n_layers` counts the output
/// as a layer. The formula is `llama_model_base::load_tensors`: a layer goes to the first device whose sum of shares
/// exceeds the layer's place.
pub fn layers_of(shares: &[u64], n_layers: u32) -> Vec<u32> {
    let mut counts = vec![0; shares.len()];
    let add = |sum: &mut f32, share: &u64| {
        *sum += *share as f32;
        Some(*sum)
    };
    let sums: Vec<f32> = shares.iter().scan(0.0, add).collect();
    let Some(&whole) = sums.last().filter(|whole| **whole > 0.0) else { return counts };
    for layer in 0..n_layers {
        let place = layer as f32 / n_layers as f32;
        let device = sums.iter().position(|sum| sum / whole > place).unwrap_or(shares.len() - 1);
        counts[device] += 1;
    }
    counts
}

/// The free memory that llama.cpp is told of each of `n_workers` workers, bytes, so that it divides the layers by
/// `shares`. If there are GPUs here, they have `own_free` bytes, which cannot be told otherwise, and the last share.
/// Errors, in words: the number of shares is another one.
pub fn told_memory(shares: &[f64], n_workers: usize, own_free: u64) -> Result<Vec<u64>, String> {
    let unit = match (shares.len().checked_sub(n_workers), own_free) {
        (Some(0), 0) => UNIT,
        (Some(1), 1..) => own_free as f64 / shares[n_workers],
        (_, 0) => return Err(format!("needs a share for each of the {n_workers} workers alone: there is no GPU here")),
        (_, _) => {
            return Err(format!("needs a share for each of the {n_workers} workers, and a last one for the GPU here"));
        }
    };
    Ok(shares[..n_workers].iter().map(|share| (share * unit) as u64).collect())
}

/// Bytes of a share where only relations count.
const UNIT: f64 = (1u64 << 30) as f64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn told_memory_has_the_relations_of_the_shares() {
        assert_eq!(told_memory(&[3.0, 1.5], 2, 0), Ok(vec![3 << 30, 3 << 29]));
        assert_eq!(told_memory(&[1.0, 2.0, 4.0], 2, 8_000), Ok(vec![2_000, 4_000]));
        for (shares, own_free) in [(&[1.0][..], 0), (&[1.0, 1.0, 1.0], 0), (&[1.0, 1.0], 8_000), (&[1.0; 4], 8_000)] {
            assert!(told_memory(shares, 2, own_free).is_err(), "{shares:?}");
        }
    }

    #[test]
    fn layers_follow_the_shares_and_none_is_lost() {
        let check = |shares: &[u64], n_layers, expected: &[u32]| assert_eq!(layers_of(shares, n_layers), expected);
        check(&[1, 1], 31, &[16, 15]);
        check(&[3, 1], 32, &[24, 8]);
        check(&[1 << 40], 31, &[31]);
        check(&[0, 5], 4, &[0, 4]);
        check(&[0, 0], 4, &[0, 0]);
        check(&[], 4, &[]);
        for n in 1..100 {
            assert_eq!(layers_of(&[3, 5, 7], n).iter().sum::<u32>(), n);
        }
    }
}
