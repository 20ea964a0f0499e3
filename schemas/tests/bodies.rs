//! The documented bodies agree with the parsers: the parser enforces every documented limit, type and word exactly.
#![cfg(test)]

use baton_schemas::openai::{
    ChatBody, ChatRequest, CompletionBody, CompletionRequest, EmbeddingsBody, EmbeddingsRequest, InvalidRequest,
    ResponsesBody, ResponsesRequest,
};
use baton_schemas::{anthropic, llama_server, ollama};
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

type Parse = fn(&[u8]) -> Result<(), InvalidRequest>;

/// Fields whose values also depend on other fields, so that probing them alone proves nothing. Their parsers have
/// tests.
const DEPENDENT: [&str; 7] =
    ["tool_choice", "function_call", "top_logprobs", "suffix", "logit_bias", "chat_template_kwargs", "truncation"];

struct Probe {
    parse: Parse,
    root: Value,
    n_checked: usize,
}

fn probe<T: JsonSchema>(parse: Parse) {
    let generator = SchemaSettings::draft2020_12().for_deserialize().into_generator();
    let root = generator.into_root_schema_for::<T>().to_value();
    let example = root["examples"][0].clone();
    assert!(parse(example.to_string().as_bytes()).is_ok(), "{example}");
    let mut probe = Probe { parse, root: root.clone(), n_checked: 0 };
    for field in required(&root, &example) {
        let mut without = example.clone();
        without.as_object_mut().unwrap().remove(&field);
        probe.refused(&without, &field);
    }
    probe.fields(&root, &example, &[]);
    println!("{}: {} values", root["title"], probe.n_checked);
    assert!(probe.n_checked > 4, "{root}");
}

impl Probe {
    fn fields(&mut self, schema: &Value, example: &Value, path: &[String]) {
        let properties = schema["properties"].as_object().cloned().unwrap_or_default();
        let value = path.iter().fold(example, |value, name| &value[name]);
        let is_required = required(schema, value);
        for (name, schema) in properties {
            let here = [path, std::slice::from_ref(&name)].concat();
            if DEPENDENT.contains(&name.as_str()) {
                continue;
            }
            let forms = self.forms(&schema);
            if !is_required.contains(&name) {
                self.accepted(&with(example, &here, Value::Null), &name);
            }
            for form in &forms {
                self.form(form, example, &here);
                if form["properties"].is_object() && here.len() == 1 && forms.len() <= 2 && name != "reasoning" {
                    let inner = with(example, &here, json!({}));
                    if (self.parse)(inner.to_string().as_bytes()).is_ok() {
                        self.fields(form, &inner, &here);
                    }
                }
            }
            // A type that no form of the field has.
            let has = |kind: &str| forms.iter().any(|form| form.get("type").is_none_or(|is| names(is, kind)));
            let may_be = |kind: &str| has(kind) || kind == "number" && has("integer");
            let kinds = [("string", json!("\u{1}no such word")), ("boolean", json!(true)), ("array", json!([[]]))];
            for (kind, value) in kinds.into_iter().chain([("object", json!({"no": {}})), ("number", json!(0.5))]) {
                if !may_be(kind) {
                    self.refused(&with(example, &here, value), &name);
                }
            }
        }
    }

    /// Probes the limits of one form of a field.
    fn form(&mut self, form: &Value, example: &Value, path: &[String]) {
        let name = path.last().unwrap();
        for (limit, step) in [("minimum", -1), ("maximum", 1)] {
            let Some(edge) = form.get(limit).filter(|edge| edge.is_number()) else { continue };
            self.accepted(&with(example, path, edge.clone()), name);
            self.refused(&with(example, path, beyond(edge, step)), name);
            if names(&form["type"], "integer") {
                self.refused(&with(example, path, json!(0.5)), name);
            }
        }
        for word in form["enum"].as_array().into_iter().flatten() {
            self.accepted(&with(example, path, word.clone()), name);
        }
        if form["enum"].is_array() && names(&form["type"], "string") {
            self.refused(&with(example, path, json!("no such word")), name);
        }
        if names(&form["type"], "string") {
            // Every pattern in the schemas matches digits.
            let is_free = form["pattern"].is_null();
            if let Some(longest) = form["maxLength"].as_u64() {
                let text = if is_free { "é" } else { "1" }.repeat(longest as usize);
                self.accepted(&with(example, path, json!(text)), name);
                self.refused(&with(example, path, json!(text + "e")), name);
            }
            if !is_free {
                self.refused(&with(example, path, json!("no such word")), name);
            }
            if form["minLength"] == 1 {
                self.refused(&with(example, path, json!("")), name);
            }
        }
        if form["minItems"] == 1 {
            self.refused(&with(example, path, json!([])), name);
        }
        if let Some(most) = form["maxItems"].as_u64() {
            // Only for texts: other items must be unique.
            let is_image = form["items"]["contentEncoding"] == "base64";
            let item = if is_image { "iVBORw0KGgo=" } else { "a" };
            let items = |n: u64| json!(vec![item; n as usize]);
            let takes_texts = self.forms(&form["items"]).iter().any(|item| names(&item["type"], "string"));
            if takes_texts {
                self.accepted(&with(example, path, items(most)), name);
                self.refused(&with(example, path, items(most + 1)), name);
            }
        }
    }

    /// Returns the forms of a schema, with references resolved.
    fn forms(&self, schema: &Value) -> Vec<Value> {
        if let Some(reference) = schema["$ref"].as_str() {
            return self.forms(self.root.pointer(reference.trim_start_matches('#')).expect("a definition"));
        }
        let several = ["anyOf", "oneOf"].iter().find_map(|word| schema[*word].as_array());
        match several {
            Some(several) if schema["properties"].is_null() => {
                several.iter().flat_map(|schema| self.forms(schema)).collect()
            }
            _ => vec![schema.clone()],
        }
    }

    fn accepted(&mut self, body: &Value, field: &str) {
        self.n_checked += 1;
        let error = (self.parse)(body.to_string().as_bytes()).err();
        assert!(error.is_none(), "{field} of {body}: {error:?}");
    }

    fn refused(&mut self, body: &Value, field: &str) {
        self.n_checked += 1;
        let error = (self.parse)(body.to_string().as_bytes()).expect_err(&format!("{field} of {body}"));
        let param = error.param.unwrap_or_default();
        assert!(param.contains(field), "{field} of {body}: {param}: {}", error.message);
    }
}

/// Returns the fields that `value` cannot lack: those that the schema requires, and those by which `value` has the one
/// of several forms that it has.
fn required(schema: &Value, value: &Value) -> Vec<String> {
    let of = |schema: &Value| -> Vec<String> {
        let names = schema["required"].as_array().into_iter().flatten();
        names.map(|name| name.as_str().unwrap().to_owned()).collect()
    };
    let forms = schema["oneOf"].as_array().into_iter().flatten().map(of);
    let its_form = forms.filter(|names| names.iter().all(|name| value.get(name).is_some()));
    of(schema).into_iter().chain(its_form.flatten()).collect()
}

fn names(kinds: &Value, kind: &str) -> bool {
    kinds == kind || kinds.as_array().is_some_and(|kinds| kinds.iter().any(|one| one == kind))
}

/// Returns a number just beyond a limit.
fn beyond(edge: &Value, step: i64) -> Value {
    match (edge.as_i64(), edge.as_u64()) {
        (Some(i64::MIN), _) => serde_json::from_str("-9223372036854775809").unwrap(),
        (Some(edge), _) => json!(edge + step),
        (None, Some(_)) => serde_json::from_str("18446744073709551616").unwrap(),
        _ => {
            // Large enough to survive parsing, and smaller than the distance between 32-bit floats.
            json!(edge.as_f64().unwrap() + step as f64 * 1e-9)
        }
    }
}

fn with(example: &Value, path: &[String], value: Value) -> Value {
    let mut body = example.clone();
    let mut at = &mut body;
    for name in path {
        at = at.as_object_mut().unwrap_or_else(|| panic!("{path:?}")).entry(name).or_insert_with(|| Map::new().into());
    }
    *at = value;
    body
}

#[test]
fn openais_bodies_are_as_documented() {
    probe::<ChatBody>(|body| ChatRequest::parse(body, 0).map(drop));
    probe::<CompletionBody>(|body| CompletionRequest::parse(body, 0).map(drop));
    probe::<ResponsesBody>(|body| ResponsesRequest::parse(body, 0).map(drop));
    probe::<EmbeddingsBody>(|body| EmbeddingsRequest::parse(body).map(drop));
}

#[test]
fn the_other_dialects_bodies_are_as_documented() {
    probe::<anthropic::MessagesBody>(|body| anthropic::MessagesRequest::parse(body, 0).map(drop));
    probe::<anthropic::CountBody>(|body| anthropic::CountRequest::parse(body).map(drop));
    probe::<ollama::OllamaChatBody>(|body| ollama::OllamaChatRequest::parse(body, 0).map(drop));
    probe::<ollama::OllamaGenerateBody>(|body| ollama::OllamaGenerateRequest::parse(body, 0).map(drop));
    probe::<ollama::OllamaEmbedBody>(|body| ollama::embed::parse(body).map(drop));
    probe::<ollama::OlderEmbedBody>(|body| ollama::embed::parse_older(body).map(drop));
    probe::<llama_server::TokenizeBody>(|body| llama_server::Tokenize::parse(body).map(drop));
    probe::<llama_server::DetokenizeBody>(|body| llama_server::Detokenize::parse(body).map(drop));
    probe::<llama_server::rerank::RerankBody>(|body| llama_server::rerank::Rerank::parse(body).map(drop));
    probe::<llama_server::ApplyTemplateBody>(|body| llama_server::ApplyTemplate::parse(body).map(drop));
}
