// Writes the chat templates of Llama and Gemma into the folder `templates`, for the test `real_model families::`. Their
// licences do not let this repository hold them.
import fs from 'node:fs';

const MODELS = { 'llama3.1:8b': 'llama-3.1', 'llama4:latest': 'llama-4', 'gemma3:1b': 'gemma-3' };

// The package exports a function over its list of templates, but not the list.
const source = fs.readFileSync(new URL('node_modules/@huggingface/ollama-utils/dist/index.mjs', import.meta.url), 'utf8');
const literal = /"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|`(?:[^`\\$]|\\.)*`/.source;
const folder = new URL('templates/', import.meta.url);
fs.mkdirSync(folder, { recursive: true });
for (const [model, name] of Object.entries(MODELS)) {
  const [, template] = source.match(new RegExp(`model: "library/${model}",\\s*gguf: (${literal})`));
  fs.writeFileSync(new URL(`${name}.jinja`, folder), Function(`return ${template}`)());
}
