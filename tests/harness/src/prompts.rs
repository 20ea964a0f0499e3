//! Prompts and chat requests.

use serde_json::Value;

/// A chat request for the default model with one user message and further fields.
pub fn chat(prompt: &str, more: Value) -> Value {
    let mut body = serde_json::json!({
        "model": "smollm2", "messages": [{ "role": "user", "content": prompt }], "temperature": 0, "max_tokens": 16,
    });
    body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
    body
}

/// A prompt of about this many words that nothing else shares a prefix with.
pub fn long_prompt(tag: &str, n_words: usize) -> String {
    let words = ["river", "stone", "cloud", "green", "seven", "under", "light", "paper", "north", "quiet"];
    let text: Vec<&str> = (0..n_words).map(|i| words[(i * 7 + i / 10) % 10]).collect();
    format!("{tag}: {}", text.join(" "))
}

/// Prompts of different kinds and lengths.
pub const PROMPTS: [&str; 20] = [
    "Why is the sky blue?",
    "Write a haiku about autumn.",
    "What is 17 times 23?",
    "Name the planets of the solar system in order.",
    "Explain recursion to a child.",
    "Translate 'good morning' into French, German and Spanish.",
    "List three uses for a brick.",
    "Who wrote Hamlet, and when?",
    "Give me a recipe for pancakes.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "What does HTTP stand for?",
    "Write a Python function that reverses a string.",
    "Why do cats purr?",
    "Tell me a joke about programmers.",
    "What is the capital of Australia?",
    "How do vaccines work? Answer in plain words, for somebody who never studied biology, and in one paragraph.",
    "Continue: Once upon a time, in a village at the edge of a dark forest, there lived a clockmaker who",
    "Compare TCP and UDP.",
    "日本の首都はどこですか？",
    "Describe the colour red to someone who cannot see, using sounds, smells, temperatures and textures only. 🙂",
];
