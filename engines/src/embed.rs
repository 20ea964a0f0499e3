//! What all engines share for embeddings: the checks of a request and of its results.

use baton_schemas::embed::{EmbedSequences, MAX_INPUTS, MAX_TOTAL_TOKENS};
use baton_schemas::{EngineError, Token};

/// Refuses a request with no texts or too many, an empty text, one that exceeds the context, or an unknown token.
pub fn check(request: &EmbedSequences, n_ctx: u32, n_vocab: u32) -> Result<(), EngineError> {
    let n_inputs = request.inputs.len();
    if !(1..=MAX_INPUTS).contains(&n_inputs) {
        return Err(EngineError::invalid(format!("there must be 1 to {MAX_INPUTS} texts, not {n_inputs}")));
    }
    let n_tokens: usize = request.inputs.iter().map(Vec::len).sum();
    if n_tokens > MAX_TOTAL_TOKENS {
        return Err(EngineError::invalid(format!("{n_tokens} tokens in one request are more than {MAX_TOTAL_TOKENS}")));
    }
    for input in &request.inputs {
        if input.is_empty() {
            return Err(EngineError::invalid("a text without tokens has no vector"));
        }
        if input.len() > n_ctx as usize {
            return Err(EngineError::ContextOverflow { n_prompt: input.len() as u32, n_ctx });
        }
        if let Some(bad) = input.iter().find(|&&t: &&Token| t >= n_vocab) {
            return Err(EngineError::invalid(format!("token {bad} is not in the vocabulary of {n_vocab} tokens")));
        }
    }
    Ok(())
}

/// Scales a vector to length 1, as OpenAI does; a vector of zeros stays. Errors: a value is not finite. JSON cannot
/// express such a value, and it would spoil a search index for good.
pub fn normalised(vector: &[f32]) -> Result<Vec<f32>, EngineError> {
    // In f64 no sum of squares of finite f32 values overflows.
    let squares: f64 = vector.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    if !squares.is_finite() {
        return Err(EngineError::NotFinite);
    }
    let scale = if squares > 0.0 { squares.sqrt().recip() } else { 0.0 };
    Ok(vector.iter().map(|&value| (f64::from(value) * scale) as f32).collect())
}

/// A document's score: the first of the classifier's values, as in llama-server. Errors: it is not finite.
pub fn score(values: &[f32]) -> Result<Vec<f32>, EngineError> {
    values.first().filter(|score| score.is_finite()).map(|&score| vec![score]).ok_or(EngineError::NotFinite)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_have_length_one() {
        assert_eq!(normalised(&[3.0, 4.0]).unwrap(), [0.6, 0.8]);
        assert_eq!(normalised(&[0.0, 0.0]).unwrap(), [0.0, 0.0]);
        assert_eq!(normalised(&[f32::MAX, 0.0]).unwrap(), [1.0, 0.0]);
        assert!(normalised(&[f32::NAN, 1.0]).is_err() && normalised(&[f32::INFINITY]).is_err());
        assert_eq!(score(&[-2.5, f32::NAN]).unwrap(), [-2.5]);
        assert!(score(&[f32::NAN]).is_err() && score(&[]).is_err());
    }

    #[test]
    fn invalid_requests_are_refused() {
        let refused =
            |inputs: Vec<Vec<Token>>| check(&EmbedSequences { inputs, ..Default::default() }, 4, 10).unwrap_err();
        assert_eq!(check(&EmbedSequences { inputs: vec![vec![9; 4], vec![0]], ..Default::default() }, 4, 10), Ok(()));
        assert_eq!(refused(vec![vec![0; 5]]), EngineError::ContextOverflow { n_prompt: 5, n_ctx: 4 });
        for inputs in [vec![], vec![vec![]], vec![vec![10]], vec![vec![0]; MAX_INPUTS + 1]] {
            assert!(matches!(refused(inputs), EngineError::InvalidRequest { .. }));
        }
    }
}
