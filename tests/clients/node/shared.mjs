// Where the running Baton is (tests/clients/test_node.py says it), and what the tests of all packages have in common.
import assert from "node:assert/strict";

export const MODEL = "smollm2";
export const baseURL = process.env.BATON_URL;
export const ollamaURL = process.env.BATON_OLLAMA_URL;
export const ASK = [{ role: "user", content: "What is the capital of France?" }];
export const TOO_LONG = [{ role: "user", content: "word ".repeat(20000) }];
export const N_EMBD = 576;

export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, unit: { enum: ["celsius", "fahrenheit"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
export const WEATHER = {
  type: "function",
  function: { name: "get_weather", description: "The weather in a city.", parameters: PARAMETERS },
};

export function checkArguments(args) {
  assert.deepEqual(Object.keys(args).sort(), ["city", "unit"]);
  assert.ok(["celsius", "fahrenheit"].includes(args.unit));
}

export async function all(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}
