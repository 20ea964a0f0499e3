// The official openai package.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ASK, MODEL, N_EMBD, TOO_LONG, WEATHER, all, baseURL, checkArguments } from "./shared.mjs";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const GREEDY = { model: MODEL, messages: ASK, temperature: 0, max_tokens: 12 };
const NAMED = { type: "function", function: { name: "get_weather" } };
const CALL = { ...GREEDY, max_tokens: 100, tools: [WEATHER], tool_choice: NAMED };

test("a stream says what the whole reply says", async () => {
  const whole = await client.chat.completions.create(GREEDY);
  assert.ok(whole.choices[0].message.content && whole.usage.completion_tokens > 0);
  const options = { ...GREEDY, stream: true, stream_options: { include_usage: true } };
  const chunks = await all(await client.chat.completions.create(options));
  const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
});

test("its accumulator takes the stream", async () => {
  const stream = client.chat.completions.stream(GREEDY);
  let text = "";
  stream.on("content", (delta) => (text += delta));
  assert.equal((await stream.finalChatCompletion()).choices[0].message.content, text);
});

test("a named tool is called, whole and streamed", async () => {
  const [call] = (await client.chat.completions.create(CALL)).choices[0].message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  checkArguments(JSON.parse(call.function.arguments));
  const message = await client.chat.completions.stream(CALL).finalMessage();
  assert.deepEqual(message.tool_calls.map((c) => c.function.arguments), [call.function.arguments]);
});

test("its runner calls the function and gives back the result", async () => {
  const asked = [];
  const tool = {
    ...WEATHER,
    function: { ...WEATHER.function, parse: JSON.parse, function: (args) => (asked.push(args), "Sunny, 21 degrees.") },
  };
  const runner = client.chat.completions.runTools({ ...CALL, tools: [tool] }, { maxChatCompletions: 1 });
  await runner.done();
  checkArguments(asked[0]);
});

test("structured output is parsed", async () => {
  const city = z.object({ name: z.string().max(30), is_large: z.boolean() });
  const reply = await client.chat.completions.parse({
    ...GREEDY,
    max_tokens: 100,
    response_format: zodResponseFormat(city, "city"),
  });
  assert.ok(city.parse(reply.choices[0].message.parsed));
});

test("/v1/responses, whole and streamed", async () => {
  const ask = { model: MODEL, input: ASK[0].content, temperature: 0, max_output_tokens: 16 };
  const whole = await client.responses.create(ask);
  assert.ok(whole.output_text);
  const stream = client.responses.stream(ask);
  assert.equal((await stream.finalResponse()).output_text, whole.output_text);
});

// The package asks for base64 and decodes it itself: a server that ignores that gives zeros.
test("vectors in both encodings are the same", async () => {
  const ask = { model: MODEL, input: ["The cat sits on the mat.", "Interest rates rose."] };
  const vectors = (await client.embeddings.create(ask)).data.map((item) => item.embedding);
  const floats = (await client.embeddings.create({ ...ask, encoding_format: "float" })).data[0].embedding;
  assert.deepEqual(vectors.map((vector) => vector.length), [N_EMBD, N_EMBD]);
  assert.ok(Math.abs(vectors[0].reduce((sum, x, i) => sum + x * floats[i], 0) - 1) < 1e-3);
});

test("mistakes are the package's own errors", async () => {
  const cases = [
    [{ model: "nope" }, OpenAI.NotFoundError, "model_not_found"],
    [{ temperature: 7 }, OpenAI.BadRequestError, null],
    [{ messages: TOO_LONG }, OpenAI.BadRequestError, "context_length_exceeded"],
  ];
  for (const [change, kind, code] of cases) {
    for (const stream of [false, true]) {
      const error = await client.chat.completions.create({ ...GREEDY, ...change, stream }).catch((error) => error);
      assert.ok(error instanceof kind, String(error));
      assert.ok(error.requestID && (code === null || error.code === code));
    }
  }
});

test("a stream can be left", async () => {
  const stream = await client.chat.completions.create({ ...GREEDY, max_tokens: 500, stream: true });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  assert.ok((await client.chat.completions.create(GREEDY)).choices[0].message.content);
});
