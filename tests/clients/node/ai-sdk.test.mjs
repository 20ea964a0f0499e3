// The AI SDK with its provider for compatible endpoints.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embedMany, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ASK, MODEL, N_EMBD, PARAMETERS, TOO_LONG, all, baseURL, checkArguments } from "./shared.mjs";

const provider = createOpenAICompatible({
  name: "baton",
  baseURL,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const GREEDY = { model: provider(MODEL), messages: ASK, temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
const city = z.object({ name: z.string().max(30), is_large: z.boolean() });

test("a stream says what the whole reply says", async () => {
  const whole = await generateText(GREEDY);
  assert.ok(whole.text && whole.usage.outputTokens > 0 && ["stop", "length"].includes(whole.finishReason));
  const stream = streamText(GREEDY);
  assert.equal((await all(stream.textStream)).join(""), whole.text);
  assert.equal(await stream.finishReason, whole.finishReason);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
});

const weather = (asked) =>
  tool({
    description: "The weather in a city.",
    inputSchema: jsonSchema(PARAMETERS),
    execute: async (args) => (asked.push(args), "Sunny, 21 degrees."),
  });

test("a named tool is called", async () => {
  const asked = [];
  const reply = await generateText({
    ...GREEDY,
    maxOutputTokens: 100,
    tools: { get_weather: weather(asked) },
    toolChoice: { type: "tool", toolName: "get_weather" },
  });
  assert.equal(reply.toolCalls[0].toolName, "get_weather");
  checkArguments(asked[0]);
});

test("a loop of steps: the call is required, then answered", async () => {
  const asked = [];
  const stream = streamText({
    ...GREEDY,
    maxOutputTokens: 100,
    tools: { get_weather: weather(asked) },
    stopWhen: stepCountIs(2),
    providerOptions: { baton: { parallel_tool_calls: false } },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  const kinds = new Set((await all(stream.fullStream)).map((part) => part.type));
  assert.ok(kinds.has("tool-input-delta") && kinds.has("tool-call") && kinds.has("tool-result"), [...kinds].join());
  assert.equal((await stream.steps).length, 2);
  assert.equal(asked.length, 1);
  assert.ok(await stream.text);
});

test("structured output, whole and streamed", async () => {
  const ask = { ...GREEDY, maxOutputTokens: 100, output: Output.object({ schema: city }) };
  const whole = await generateText(ask);
  assert.ok(city.parse(whole.output));
  const stream = streamText(ask);
  assert.deepEqual((await all(stream.partialOutputStream)).at(-1), whole.output);
});

test("vectors", async () => {
  const model = provider.embeddingModel(MODEL);
  const { embeddings } = await embedMany({ model, values: ["The cat sits.", "Interest rates rose."], maxRetries: 0 });
  assert.deepEqual(embeddings.map((vector) => vector.length), [N_EMBD, N_EMBD]);
});

test("mistakes are its own errors", async () => {
  const cases = [
    [{ model: provider("nope") }, 404, "does not exist"],
    [{ messages: TOO_LONG }, 400, "maximum context length"],
  ];
  for (const [change, status, words] of cases) {
    const error = await generateText({ ...GREEDY, ...change }).catch((error) => error);
    assert.ok(APICallError.isInstance(error), String(error));
    assert.equal(error.statusCode, status);
    assert.ok(error.message.includes(words), error.message);
    const stream = streamText({ ...GREEDY, ...change, onError: () => {} });
    const failed = (await all(stream.fullStream)).find((part) => part.type === "error");
    assert.equal(failed.error.statusCode, status);
  }
});
