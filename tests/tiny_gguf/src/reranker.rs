//! The heads of rerankers.

use super::architectures::N_EMBD;
use super::{Architecture, Draft};
use crate::file::Value;

/// llama.cpp's number of the pooling of rerankers.
const RANK: u32 = 4;

/// Like that of Qwen3-Reranker, with the control tokens of these models.
const FORM: &str = "<|start|>judge\n<Query>: {query}\n<Document>: {document}<|end|>\n<|start|>";

impl Draft {
    pub(super) fn add_reranker(&mut self, architecture: Architecture) {
        self.numbers(&[("pooling_type", RANK)]);
        match architecture {
            Architecture::Bert => {
                self.weight("cls.weight", &[N_EMBD, N_EMBD]);
                self.bias("cls.bias", &[N_EMBD]);
                self.weight("cls.output.weight", &[N_EMBD, 1]);
                self.bias("cls.output.bias", &[1]);
            }
            Architecture::Qwen3 => {
                let labels = ["yes", "no"].map(|label| Value::String(label.into()));
                self.set("qwen3.classifier.output_labels", Value::Array(labels.into()));
                self.set("tokenizer.chat_template.rerank", Value::String(FORM.into()));
                self.weight("cls.output.weight", &[N_EMBD, 2]);
            }
            other => unreachable!("llama.cpp has no reranker of {other:?}"),
        }
    }
}
